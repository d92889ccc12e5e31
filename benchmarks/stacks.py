"""The rows of the fidelity table, by four programs: a plain loop, stock Lightning, Accelerate, and ours.

Each program is set up as its own documentation says, and ends in an optimizer that notes the gradient it was given:
after accumulation, reduction over ranks, unscaling and clipping.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, SparseAdam
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import trainers
from benchmarks.networks import perceptron
from benchmarks.trainers import cross_entropy, flat, quiet_trainer
from lightning_ga import AutoAccumulate
from lightning_ga.plan.item_counters import TargetTokens


@dataclass(frozen=True, slots=True)
class Case:  # one row. The last window of the epoch is measured, over all ranks
    name: str
    samples: int = 128
    effective: int = 128
    micro: int = 32
    factor: int = 4
    task: str = "samples"
    precision: str = "true"
    optimizer: str = "sgd"
    clip: float | None = None
    skip: Sequence[int] = ()
    ranks: int = 1
    fp32_target: float | None = 1e-6
    targeted: bool = True

    def windows(self) -> list[list[int]]:
        kept = [index for index in range(self.samples) if index // self.micro not in self.skip]
        return [[*window] for _, window in groupby(kept, lambda index: index // self.effective)]


UNEQUAL: dict[str, Any] = {"micro": 43, "factor": 3}

CASES: tuple[Case, ...] = (
    Case("equal: 4×32"),
    Case("unequal: 43+43+42", **UNEQUAL),
    Case("ragged: 1 of 4", samples=128 + 32),
    Case("ragged: 2 of 4", samples=128 + 64),
    Case("ragged: 3 of 4", samples=128 + 96),
    Case("tokens: 4×4 sentences", task="tokens", samples=16, effective=16, micro=4),
    Case("skipped: 1 of 4", skip=(1,)),
    Case("DDP, shares 51+50", samples=101, effective=101, micro=26, factor=2, ranks=2),
    Case("bf16-mixed ᵃ", precision="bf16-mixed", **UNEQUAL),
    Case("fp16, GradScaler ᵃ", precision="16-mixed", **UNEQUAL),
    Case("bf16-true, 64×2", precision="bf16-true", micro=2, factor=64),
    Case("bf16-true, 1024×2", precision="bf16-true", samples=2048, effective=2048, micro=2, factor=1024),
    Case("SparseAdam ᵃ", task="sparse", optimizer="sparse_adam", **UNEQUAL),
    Case("clipping by norm ᵃ", clip=0.1, **UNEQUAL),
    Case("LBFGS ᵇ", optimizer="lbfgs", fp32_target=None, **UNEQUAL),
    Case("LBFGS strong Wolfe ᵇ", optimizer="lbfgs_strong_wolfe", **UNEQUAL),
    Case("(BatchNorm, 4×32)", task="batch norm", targeted=False),
)

FEATURES, CLASSES = 32, 10
LENGTH, WORDS, VOCABULARY = 12, 50, 1000
IGNORED = -100  # what cross_entropy leaves out unless told otherwise

Columns = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Task:  # data and network; functions of the seed alone
    draw: Callable[[int, torch.Generator], Columns]
    layers: Callable[[], nn.Module]
    seed: int
    normalize: Any = "samples"

    def network(self, seed: int, dtype: torch.dtype, held_in: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.layers().to(held_in).to(dtype)

    def rows(self, samples: int, seed: int, dtype: torch.dtype) -> TensorDataset:
        """Samples that are drawn in fp32, so that every precision sees the same numbers."""
        columns = self.draw(samples, torch.Generator().manual_seed(self.seed + seed))
        return TensorDataset(*(column.to(dtype) if column.is_floating_point() else column for column in columns))


def images(samples: int, generator: torch.Generator) -> Columns:
    """Features and a class that depends on them."""
    inputs = torch.randn(samples, FEATURES, generator=generator)
    noise = torch.randn(samples, CLASSES, generator=generator)
    return inputs, (inputs[:, :CLASSES] + noise).argmax(1)


def sentences(samples: int, generator: torch.Generator) -> Columns:
    """Words and targets; a sentence has 1 to 12 targets, the rest is padding."""
    words = torch.randint(WORDS, (samples, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
    return words, torch.where(torch.arange(LENGTH) < lengths, (words * 7 + 3) % WORDS, IGNORED)


def bags(samples: int, generator: torch.Generator) -> Columns:
    """A few words of a large vocabulary, and a class."""
    words = torch.randint(VOCABULARY, (samples, 4), generator=generator)
    return words, words.sum(1) % CLASSES


TASKS = {
    "samples": Task(images, lambda: perceptron((FEATURES, 64, CLASSES), nn.Tanh), 1000),
    "tokens": Task(
        sentences,
        lambda: nn.Sequential(nn.Embedding(WORDS, 16), nn.Tanh(), nn.Linear(16, WORDS)),
        2000,
        normalize=TargetTokens(key=1),
    ),
    # An embedding with sparse gradients and nothing else: SparseAdam takes no dense ones.
    "sparse": Task(bags, lambda: nn.EmbeddingBag(VOCABULARY, CLASSES, sparse=True), 3000),
    "batch norm": Task(
        images,
        lambda: nn.Sequential(nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, CLASSES)),
        1000,
    ),
}

INITIAL_SCALE = 1024.0  # of the GradScaler: no overflow in the one step that is measured
HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
HELD_IN = {"bf16-true": torch.bfloat16}  # the type of the weights


class UnsupportedError(Exception):
    """A stack refuses a case; the message is its own."""


def optimizer_of(case: Case, net: nn.Module) -> Any:
    """An optimizer that notes the gradient of every step, or what it changed if it evaluates the closure many times."""
    parameters = list(net.parameters())
    optimizer, updates = OPTIMIZERS[case.optimizer](parameters), case.optimizer.startswith("lbfgs")
    seen = optimizer.seen = list[Tensor]()
    if updates:
        optimizer.register_step_pre_hook(lambda *_: seen.append(flat(parameters)))

    def note(*_: Any) -> None:
        seen.append(flat(parameters) - seen[-1] if updates else flat(p.grad for p in parameters))

    optimizer.register_step_post_hook(note)
    return optimizer


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": partial(SGD, lr=0.1),
    "sparse_adam": partial(SparseAdam, lr=0.1),
    "lbfgs": partial(LBFGS, max_iter=4),
    # At lr=1 the first trial step lies on the edge of the Wolfe condition, and rounding decides what follows.
    "lbfgs_strong_wolfe": partial(LBFGS, lr=4, max_iter=4, line_search_fn="strong_wolfe"),
}


def whole_batch(case: Case, seed: int, dtype: torch.dtype, precision: str = "true") -> Tensor:
    """A plain loop in which each window is one batch."""
    task = TASKS[case.task]
    net = task.network(seed, dtype, HELD_IN.get(case.precision, torch.float32))
    rows, optimizer = task.rows(case.samples, seed, dtype), optimizer_of(case, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE, enabled=precision == "16-mixed")
    for window in case.windows():

        def closure(batch: Any = rows[window]) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF[precision]) if precision in HALF else nullcontext():
                loss = cross_entropy(net, *batch)
            scaler.scale(loss).backward()
            return loss

        if case.optimizer.startswith("lbfgs"):
            optimizer.step(closure)
            continue
        closure()
        scaler.unscale_(optimizer)
        if case.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        scaler.step(optimizer)
    return optimizer.seen[-1]


class Module(trainers.Module):
    def __init__(self, case: Case, seed: int, dtype: torch.dtype) -> None:
        net = TASKS[case.task].network(seed, dtype)
        super().__init__(net, lambda _: optimizer_of(case, net))
        self.case = case

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.case.skip else super().training_step(batch, batch_idx)


def stock_lightning(case: Case, seed: int, dtype: torch.dtype) -> Tensor:
    """``DataLoader(batch_size=micro)`` and ``Trainer(accumulate_grad_batches=factor)``."""
    return _fit(case, seed, dtype, case.micro, accumulate_grad_batches=case.factor)


def ours(case: Case, seed: int, dtype: torch.dtype) -> Tensor:
    """The recipe of the whole batch, and ``AutoAccumulate`` with a limit on the micro-batch."""
    settings = {"normalize": TASKS[case.task].normalize, "batch_norm": "ignore"}
    callback = AutoAccumulate(case.effective, micro_batch_size=case.micro, **settings)
    return _fit(case, seed, dtype, case.effective, callbacks=[callback])


def _fit(case: Case, seed: int, dtype: torch.dtype, batch_size: int, **settings: Any) -> Tensor:
    loader = DataLoader(TASKS[case.task].rows(case.samples, seed, dtype), batch_size=batch_size)
    if case.precision == "16-mixed":  # Lightning turns "16-mixed" on the CPU into bf16
        scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE)
        settings["plugins"] = MixedPrecision("16-mixed", "cpu", scaler)
    elif case.precision != "true":
        settings["precision"] = case.precision
    if case.ranks > 1:
        settings["strategy"] = "ddp"
    trainer: Any = quiet_trainer(max_epochs=1, devices=case.ranks, gradient_clip_val=case.clip, **settings)
    trainer.fit(Module(case, seed, dtype), loader)
    return trainer.optimizers[0].seen[-1]


def accelerate(case: Case, seed: int, dtype: torch.dtype) -> Tensor:
    """The loop of Accelerate's guide to gradient accumulation, with ``accumulate()``."""
    task = TASKS[case.task]
    net, rows = task.network(seed, dtype), task.rows(case.samples, seed, dtype)
    recorder = optimizer_of(case, net)
    with fresh_accelerator(case) as accelerator:
        model, optimizer, loader = accelerator.prepare(net, recorder, DataLoader(rows, batch_size=case.micro))
        for index, batch in enumerate(loader):

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model, *batch)
                accelerator.backward(loss)
                return loss

            with accelerator.accumulate(model):
                if index in case.skip:
                    continue
                if case.optimizer.startswith("lbfgs"):
                    optimizer.step(closure)
                    continue
                accelerator.backward(cross_entropy(model, *batch))
                if case.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
    return recorder.seen[-1]


@contextmanager
def fresh_accelerator(case: Case) -> Iterator[Any]:
    """An ``Accelerator`` that knows nothing of those before it: its state is global."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
    except ImportError as missing:
        raise UnsupportedError(f"{missing}: pip install 'lightning_ga[bench]'") from missing
    mixed = {"true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16", "bf16-true": "no"}[case.precision]
    try:
        accelerator = Accelerator(gradient_accumulation_steps=case.factor, mixed_precision=mixed, cpu=True)
        if mixed != "no" and not accelerator.native_amp:
            raise UnsupportedError(f"Accelerator(mixed_precision={mixed!r}, cpu=True) says nothing, computes in fp32")
        yield accelerator
    except (ValueError, NotImplementedError) as refusal:
        raise UnsupportedError(f"{type(refusal).__name__}: {refusal}") from refusal
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
