"""What a client's program is to the trials, and one training of it: what the optimizer was given, and what was told."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning import Callback as LegacyCallback

from lightning_ga.errors import ExactnessWarning, UserError
from lightning_ga.testing import OperationCounter, out_of_memory_at

EPOCHS = 2
OOM_STEP = 1  # memory runs out in the second optimizer step


@dataclass(frozen=True, slots=True)
class Program:
    """One training of one client, on data of its own making."""

    client: str
    name: str
    fit: Callable[[int, Sequence[Any]], torch.nn.Module]
    batch: int
    causes: tuple[str, ...] = ("exact",)
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Client and name."""
        return f"{self.client}: {self.name}"


def train(
    module: Callable[[], LightningModule], data: Callable[[], Any], callbacks: Sequence[Any], **settings: Any
) -> LightningModule:
    """Fit a fresh module to fresh data."""
    seed_everything(0, verbose=False)
    trained, loader = module(), data()
    trainer = Trainer(**trainer_settings(callbacks) | settings)
    trainer.fit(trained, loader)
    return trained


def trainer_settings(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Arguments of a Trainer that trains and does nothing else, in the precision of the program."""
    return {
        "accelerator": "cpu",
        "precision": "64-true" if torch.get_default_dtype() == torch.float64 else "32-true",
        "max_epochs": EPOCHS,
        "callbacks": list(callbacks),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


@dataclass(frozen=True, slots=True)
class Trace:
    """What one training left."""

    gradients: tuple[torch.Tensor, ...]
    weights: dict[str, torch.Tensor]
    operations: int
    error: Exception | None
    started: bool
    told: tuple[str, ...]

    @property
    def refused(self) -> bool:
        """Whether it was refused before the first step."""
        return isinstance(self.error, UserError) and not self.started


def run(program: Program, batch: int, callbacks: Sequence[Any] = (), *, fails_at: int | None = None) -> Trace:
    """Train once."""
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        watch = Watch(fails_at, stack)
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        weights: dict[str, torch.Tensor] = {}
        error = None
        try:
            torch.set_default_dtype(program.dtype)
            trained = program.fit(batch, [*callbacks, watch])
            weights = {name: values.detach().double() for name, values in trained.named_parameters()}
        except Exception as failure:  # whatever a program dies of is a row of the table
            error = failure
        finally:
            torch.set_default_dtype(before)
    told = tuple(f"{warning.category.__name__}: {warning.message}" for warning in caught if _is_ours(warning))
    return Trace(tuple(watch.gradients), weights, watch.operations, error, watch.started, told)


def _is_ours(warning: warnings.WarningMessage) -> bool:
    return issubclass(warning.category, ExactnessWarning) or "lightning_ga" in warning.filename


class Watch(Callback, LegacyCallback):  # type: ignore[misc]
    """Keeps the gradients of each step, and counts the operations of one or lets memory run out in it."""

    def __init__(self, fails_at: int | None, stack: ExitStack) -> None:
        super().__init__()
        self.gradients: list[torch.Tensor] = []
        self.operations = 0
        self.started = False
        self._fails_at = fails_at
        self._outer = stack
        self._inner = ExitStack()
        self._counter: OperationCounter | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Watch":
        """Stay one: programs that own their Trainer keep a copy of what they were given."""
        return self

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to count in the second step."""
        self.started = True
        if trainer.global_step == OOM_STEP and self._fails_at is not None and self._counter is None:
            self._outer.push(self._inner)
            self._counter = self._inner.enter_context(out_of_memory_at(self._fails_at))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Keep the gradient, as it is before clipping."""
        if self._counter is not None:
            self.operations = self.operations or self._counter.operations
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients.append(torch.cat([_gradient(parameter) for parameter in parameters]))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the count with the step."""
        self._inner.close()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
    return gradient.to_dense().double().flatten()
