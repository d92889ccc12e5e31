"""The same windows by four programs: a plain loop, stock Lightning, Accelerate, and ours.

Each is set up as its own documentation says, and ends in an optimizer that notes the gradient it was given: after
accumulation, reduction over ranks, unscaling and clipping.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, SparseAdam
from torch.utils.data import DataLoader

from benchmarks import trainers
from benchmarks.cases import TASKS, Case
from benchmarks.trainers import cross_entropy, flat, quiet_trainer
from lightning_ga import AutoAccumulate

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
    return _fit(case, seed, dtype, accumulate_grad_batches=case.factor)


def ours(case: Case, seed: int, dtype: torch.dtype) -> Tensor:
    """The recipe of the whole batch, and ``AutoAccumulate`` with a limit on the micro-batch."""
    settings = {"normalize": TASKS[case.task].normalize, "batch_norm": "ignore"}
    return _fit(case, seed, dtype, callbacks=[AutoAccumulate(case.effective, micro_batch_size=case.micro, **settings)])


def _fit(case: Case, seed: int, dtype: torch.dtype, **settings: Any) -> Tensor:
    loader = DataLoader(TASKS[case.task].rows(case.samples, seed, dtype), batch_size=case.micro)
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
            raise ValueError(f"Accelerator(mixed_precision={mixed!r}, cpu=True) says nothing and computes in fp32")
        yield accelerator
    except (ValueError, NotImplementedError) as refusal:
        raise UnsupportedError(f"{type(refusal).__name__}: {refusal}") from refusal
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
