"""Scale learning rates with the effective batch, from a window's start to its optimizer step, and log both.

Tested in tests/integration/test_schedules.py.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_ga.compat.logger_rows import log_step
from lightning_ga.compat.schedulers import before_schedulers
from lightning_ga.errors import UserError
from lightning_ga.plan.config import ScaleLr, rate_ratio


class WindowRates:
    """Scales learning rates with the effective batch.

    Schedulers and checkpoints see the rates without this factor. With ``"none"`` rates are logged if windows vary.
    """

    def __init__(self, trainer: Any, scale_lr: ScaleLr, *, varies: bool) -> None:
        self._trainer = trainer
        self._scale_lr = scale_lr
        self._are_logged = varies or scale_lr != "none"
        # Of each parameter group, the rate that schedulers have set, and the scaled one; none outside of a window.
        self._rates: list[tuple[Any, Any]] = []
        self._row: dict[str, Any] = {}  # of the running window, until it is logged

    def unscaled_for_schedulers(self) -> AbstractContextManager[None]:
        """Return a context in which schedulers see the rates that they have set; refuse optimizers without rates."""
        if self._scale_lr == "none":
            return nullcontext()
        for group in self._groups():
            if group.get("lr") is None:
                kind = type(self._trainer.optimizers[0]).__name__
                raise UserError(f"scale_lr={self._scale_lr!r} scales 'lr', and {kind} has none: leave it out.")
        # This gives rates back after each optimizer step, also if there is no scheduler: Lightning asks for schedules.
        return before_schedulers(self._trainer, self.give_back)

    def begin_window(self, batch: int, recipe: int) -> None:
        """Scale the rate of every parameter group for an effective batch."""
        if not self._are_logged:
            return
        self.give_back()
        values: dict[str, Any] = {
            "effective_batch_size": batch,
            "accumulate_grad_batches": int(self._trainer.accumulate_grad_batches),
        }
        for number, group in enumerate(self._groups()):
            if self._scale_lr != "none":
                scaled = group["lr"] * rate_ratio(self._scale_lr, batch, recipe)
                self._rates.append((group["lr"], scaled))
                group["lr"] = scaled
            values[f"learning_rate/{number}" if number else "learning_rate"] = group.get("lr")
        self._row = values

    def log_window(self) -> None:
        """Log effective batch and rates of the running window, once, as it steps: it may have begun several times."""
        log_step(self._trainer, self._row)
        self._row = {}

    def give_back(self) -> None:
        """Restore the rates that schedulers had set."""
        for group, rate in zip(self._groups(), self._unscaled()):
            group["lr"] = rate
        self._rates = []

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Write the rates that schedulers had set into a checkpoint from within a window."""
        groups = [group for state in checkpoint.get("optimizer_states", ()) for group in state["param_groups"]]
        for group, rate in zip(groups, self._unscaled()):
            group["lr"] = rate

    def _unscaled(self) -> list[Any]:
        """Return the rate of each group as schedulers have set it, or as the module has since; none between windows."""
        rates = []
        for group, (before, scaled) in zip(self._groups(), self._rates):
            is_ours = group["lr"] is scaled  # a rate that the module sets may have the same value
            rates.append(before if is_ours else group["lr"])
        return rates

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._trainer.optimizers:
            yield from optimizer.param_groups
