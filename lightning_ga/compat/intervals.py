"""When validation and schedules are due, in optimizer windows; count optimizer steps.

Lightning's ``loops/training_epoch_loop.py``.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import ceil, inf, lcm
from typing import Any

from lightning_ga.compat import patching
from lightning_ga.errors import UserError


def optimizer_steps(trainer: Any) -> int | float:
    """Count the optimizer steps of a whole training, with or without ``AutoAccumulate``, in ``configure_optimizers``.

    ``trainer.estimated_stepping_batches`` is wrong there if the effective batch changes, because it divides by the
    current factor. The count is infinite if nothing limits it: no number of steps, and no epochs of a known length.

    Raises:
        UserError: If no fit is running.
    """
    if getattr(trainer, "lightning_module", None) is None:
        raise UserError(
            "optimizer_steps(trainer) counts the steps of a fit that is running: call it in configure_optimizers, as "
            "lightning_ga.optimizer_steps(self.trainer)."
        )
    estimate: int | float = trainer.estimated_stepping_batches  # sets the training data up if need be
    counts = (getattr(callback, "optimizer_steps", None) for callback in trainer.callbacks)
    steps = next((count() for count in counts if callable(count)), None)
    return inf if steps is None and estimate == -1 else estimate if steps is None else int(steps)


class Intervals:
    """Sets when validation and schedules by step are due: in whole windows, while the loop counts micro-batches.

    Lightning asks whether ``val_check_batch`` and a schedule's frequency divide its count of micro-batches
    (``training_epoch_loop.py:486``, ``:560``). Both are set as a window begins.
    """

    def __init__(self, trainer: Any, every: int | None, *, factor: int, batches: float, windows: int) -> None:
        """Read what is asked for: validation ``every`` so many batches of the recipe, ``None`` if by time.

        The recipe accumulates ``factor`` batches; a window here has so many ``batches``, an epoch so many ``windows``.
        """
        self._trainer, self._factor, self._batches, self._every = trainer, factor, batches, every
        self._over_epochs = trainer.check_val_every_n_epoch is None
        configs = [each for each in trainer.lr_scheduler_configs if each.interval == "step" and each.frequency > 1]
        # Stock Lightning steps a schedule at multiples of both its frequency and the factor.
        self._schedules = [(each, each.frequency, lcm(each.frequency, factor)) for each in configs]
        found = None if every in (None, inf) else ceil(every / batches)
        self.validation = found if found is None or self._over_epochs else min(found, windows)  # in windows

    def __str__(self) -> str:
        """Say what was rounded to windows."""
        interval = getattr(self._trainer, "val_check_interval", None)
        if not isinstance(interval, int) or self.validation is None or self.validation * self._batches == interval:
            return ""
        return f"validation every {self.validation} windows, for val_check_interval={interval} batches"

    def validates(self, window: int, *, before: int) -> bool | None:
        """Return whether validation is due after a window of the epoch; ``before`` are the windows of earlier ones."""
        return None if self.validation is None else (window + 1 + before * self._over_epochs) % self.validation == 0

    def validates_between(self, start: int, end: int, *, earlier: int) -> bool | None:
        """Return whether validation is due between two batches of the epoch; ``earlier`` ones are of other epochs."""
        every, before = self._every, earlier * self._over_epochs
        return None if every is None else (before + end) // every > (before + start) // every

    def begin_window(self, window: int, *, end: int, validates: bool | None) -> None:
        """Set what is due after a window of the epoch, which ends after ``end`` micro-batches."""
        trainer = self._trainer
        for config, _, batches in self._schedules:
            config.frequency = end if (window + 1) * self._factor % batches == 0 else end + 1
        if validates is not None:
            progress = trainer.fit_loop.epoch_loop.batch_progress
            counted = end + (progress.total.ready - progress.current.ready if self._over_epochs else 0)
            trainer.val_check_batch = counted if validates else counted + 1

    def give_back(self) -> None:
        """Restore what the user wrote."""
        self._trainer.val_check_batch = self._every
        for config, frequency, _ in self._schedules:
            config.frequency = frequency


def before_schedulers(trainer: Any, call: Callable[[], None]) -> AbstractContextManager[None]:
    """Return a context in which ``call`` runs after each optimizer step, before schedules do (``:360``)."""
    loop = trainer.fit_loop.epoch_loop
    update = loop.update_lr_schedulers

    def ours(interval: str, update_plateau_schedulers: bool) -> None:
        if not loop._should_accumulate():
            call()
        update(interval, update_plateau_schedulers=update_plateau_schedulers)

    return patching.shadowed(loop, "update_lr_schedulers", ours)


def log_step(trainer: Any, values: Mapping[str, Any]) -> None:
    """Log values of the current optimizer step, as often as ``log_every_n_steps`` says."""
    for logger in trainer.loggers if trainer._logger_connector.should_update_logs else ():
        known = {name: float(value) for name, value in values.items() if value is not None}
        logger.log_metrics(known, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
