"""Scale learning rates with the effective batch, from a window's start to its optimizer step, and log both.

Tested in tests/integration/test_schedules.py.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_ga.compat.schedulers import before_schedulers
from lightning_ga.compat.step_log import log_step
from lightning_ga.errors import UserError
from lightning_ga.plan.config import ScaleLr, rate_ratio


class WindowRates:
    """Scales learning rates with the effective batch.

    Schedulers and checkpoints see the rates without this factor. With ``"none"`` rates are only logged.
    """

    def __init__(self, trainer: Any, scale_lr: ScaleLr) -> None:
        self._trainer = trainer
        self._scale_lr = scale_lr
        self._before: list[Any] = []  # what schedulers have set, of each parameter group

    def unscaled_for_schedulers(self) -> AbstractContextManager[None]:
        """Return a context in which schedulers see the rates that they have set; refuse optimizers without rates."""
        if self._scale_lr == "none":
            return nullcontext()
        if any(group.get("lr") is None for group in self._groups):
            kind = type(self._trainer.optimizers[0]).__name__
            raise UserError(f"scale_lr={self._scale_lr!r} scales 'lr', and {kind} has none: leave it out.")
        return before_schedulers(self._trainer, self.give_back)

    def begin_window(self, batch: int, recipe: int) -> None:
        """Scale the rate of every parameter group for an effective batch, and log both."""
        self.give_back()
        if self._scale_lr != "none":
            for group in self._groups:
                before = group["lr"]
                group["lr"] = before * rate_ratio(self._scale_lr, batch, recipe)
                self._before.append(before)
        values: dict[str, Any] = {
            "effective_batch_size": batch,
            "accumulate_grad_batches": int(self._trainer.accumulate_grad_batches),
        }
        for number, group in enumerate(self._groups):
            values[f"learning_rate/{number}" if number else "learning_rate"] = group.get("lr")
        log_step(self._trainer, values)

    def give_back(self) -> None:
        """Restore the rates that schedulers had set."""
        for group, before in zip(self._groups, self._before):
            group["lr"] = before
        self._before = []

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Write the rates that schedulers had set into a checkpoint from within a window."""
        saved = [group for state in checkpoint.get("optimizer_states", ()) for group in state["param_groups"]]
        for group, before in zip(saved, self._before):
            group["lr"] = before

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
