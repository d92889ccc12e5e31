"""The same windows by four programs: a plain loop, stock Lightning, Accelerate, and ours.

Each is set up as its own documentation says, and each ends in an optimizer that notes the gradient
it was given: after accumulation, reduction over ranks, unscaling and clipping.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam
from torch.utils.data import DataLoader

from benchmarks.cases import Case
from benchmarks.tasks import TASKS, Batch, collate
from benchmarks.trainers import quiet_trainer
from lightning_ga import AutoAccumulate

INITIAL_SCALE = 1024.0  # of the GradScaler: no overflow in the one step that is measured
HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
HELD_IN = {"bf16-true": torch.bfloat16}  # the type of the weights


class UnsupportedError(Exception):
    """A stack refuses a case; the message is its own."""


class Recording:
    """Mixed into an optimizer: notes what every step is given."""

    param_groups: list[dict[str, Any]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        self.seen.append(_flat(p.grad for p in self._parameters()))
        super().step()  # type: ignore[misc]
        return loss

    @property
    def seen(self) -> list[Tensor]:
        seen: list[Tensor] = self.__dict__.setdefault("_seen", [])
        return seen

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def last_seen(optimizer: Any) -> Tensor:
    """What the optimizer was given in its last step."""
    seen: Tensor = optimizer.seen[-1]
    return seen


class RecordingUpdates(Recording):
    """The same for an optimizer that evaluates the closure many times: notes what every step changed."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        before = _flat(p.detach() for p in self._parameters())
        loss = super(Recording, self).step(closure)  # type: ignore[misc]
        self.seen.append(_flat(p.detach() for p in self._parameters()) - before)
        return loss


class RecordingSGD(Recording, SGD):
    """SGD that keeps its gradients."""


class RecordingSparseAdam(Recording, SparseAdam):
    """SparseAdam that keeps its gradients."""


class RecordingLBFGS(RecordingUpdates, LBFGS):
    """LBFGS that keeps its updates."""


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": partial(RecordingSGD, lr=0.1),
    "sparse_adam": partial(RecordingSparseAdam, lr=0.1),
    "lbfgs": partial(RecordingLBFGS, max_iter=4),
    # At lr=1 the first trial step lies on the edge of the Wolfe condition, and rounding decides what follows.
    "lbfgs_strong_wolfe": partial(RecordingLBFGS, lr=4, max_iter=4, line_search_fn="strong_wolfe"),
}


def whole_batch(case: Case, seed: int, dtype: torch.dtype, precision: str = "true") -> Tensor:
    """A plain loop in which each window is one batch."""
    task = TASKS[case.task]
    net, rows = (
        task.network(seed, dtype, HELD_IN.get(case.precision, torch.float32)),
        task.rows(case.samples, seed, dtype),
    )
    optimizer = OPTIMIZERS[case.optimizer](list(net.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE, enabled=precision == "16-mixed")
    for window in case.windows():
        batch = collate(rows, window)

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF[precision]) if precision in HALF else nullcontext():
                loss = task.loss(net, batch)
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
    return last_seen(optimizer)


class Module(pl.LightningModule):
    """The case as a LightningModule."""

    def __init__(self, case: Case, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.case = case
        self.net = TASKS[case.task].network(seed, dtype)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None if batch_idx in self.case.skip else TASKS[self.case.task].loss(self.net, batch)

    def configure_optimizers(self) -> Optimizer:
        optimizer: Optimizer = OPTIMIZERS[self.case.optimizer](list(self.net.parameters()))
        return optimizer


def stock_lightning(case: Case, seed: int, dtype: torch.dtype) -> Tensor:
    """``DataLoader(batch_size=micro)`` and ``Trainer(accumulate_grad_batches=factor)``."""
    return _fit(case, seed, dtype, case.micro, accumulate_grad_batches=case.factor)


def ours(case: Case, seed: int, dtype: torch.dtype) -> Tensor:
    """The recipe of the whole batch, and ``AutoAccumulate`` with a limit on the micro-batch."""
    callback = AutoAccumulate(
        case.effective, micro_batch_size=case.micro, normalize=TASKS[case.task].normalize, batch_norm="ignore"
    )
    return _fit(case, seed, dtype, case.micro, callbacks=[callback])


def _fit(case: Case, seed: int, dtype: torch.dtype, batch_size: int, **settings: Any) -> Tensor:
    loader = DataLoader(TASKS[case.task].rows(case.samples, seed, dtype), batch_size=batch_size)
    if case.precision == "16-mixed":  # Lightning turns "16-mixed" on the CPU into bf16
        scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE)
        settings["plugins"] = MixedPrecision("16-mixed", "cpu", scaler)
    elif case.precision != "true":
        settings["precision"] = case.precision
    if case.ranks > 1:
        settings["strategy"] = "ddp"
    module = Module(case, seed, dtype)
    trainer = quiet_trainer(max_epochs=1, devices=case.ranks, gradient_clip_val=case.clip, **settings)
    trainer.fit(module, loader)
    return last_seen(trainer.optimizers[0])


def accelerate(case: Case, seed: int, dtype: torch.dtype) -> Tensor:
    """The loop of Accelerate's guide to gradient accumulation, with ``accumulate()``."""
    task = TASKS[case.task]
    net, rows = task.network(seed, dtype), task.rows(case.samples, seed, dtype)
    recorder = OPTIMIZERS[case.optimizer](list(net.parameters()))
    with fresh_accelerator(case) as accelerator:
        model, optimizer, loader = accelerator.prepare(net, recorder, DataLoader(rows, batch_size=case.micro))
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if index not in case.skip:
                    _accelerate_step(accelerator, model, optimizer, partial(task.loss, model, batch), case)
    return last_seen(recorder)


def _accelerate_step(
    accelerator: Any, model: nn.Module, optimizer: Any, compute_loss: Callable[[], Tensor], case: Case
) -> None:

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = compute_loss()
        accelerator.backward(loss)
        return loss

    if case.optimizer.startswith("lbfgs"):
        optimizer.step(closure)
        return
    accelerator.backward(compute_loss())
    if case.clip is not None and accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    optimizer.zero_grad()


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
        accelerator = _built(Accelerator, gradient_accumulation_steps=case.factor, mixed_precision=mixed, cpu=True)
        if mixed != "no" and not accelerator.native_amp:
            raise UnsupportedError(
                f"Accelerator(mixed_precision={mixed!r}, cpu=True) says nothing and computes in fp32"
            )
        yield accelerator
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def _built(kind: Any, **settings: Any) -> Any:
    try:
        return kind(**settings)
    except (ValueError, NotImplementedError) as refusal:
        raise UnsupportedError(f"{type(refusal).__name__}: {refusal}") from refusal


def _flat(tensors: Any) -> Tensor:
    dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors]
    return torch.cat([tensor.detach().flatten().double() for tensor in dense])


def relative_error(value: Tensor, oracle: Tensor) -> float:
    """‖value − oracle‖ ÷ ‖oracle‖."""
    return float((value - oracle).norm() / oracle.norm())
