"""When validation and schedules are due, in batches of the recipe; count optimizer steps.

Lightning's ``loops/training_epoch_loop.py``.

Tested in tests/integration/test_recipe_inputs.py.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from math import inf
from typing import Any, Protocol

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
    if steps is not None:
        return int(steps)
    return inf if estimate == -1 else estimate


class WindowEnd(Protocol):
    """The end of a window, which knows what is due there by the recipe's batches (``plan/recipe.py``)."""

    def validates(self, every: int, *, over_epochs: bool) -> bool:
        """Return whether validation is due, ``every`` so many batches."""

    def steps_schedule(self, frequency: int, *, is_last: bool) -> bool:
        """Return whether a schedule by step is due; the window may be the last of its epoch."""


class RecipeIntervals:
    """Lets validation and schedules by step be due by the recipe's batches, while the loop counts its own.

    Lightning asks whether ``val_check_batch`` and a schedule's frequency divide the loop's count
    (``training_epoch_loop.py:486``, ``:560``). Both are replaced while it asks.
    """

    def __init__(self, trainer: Any, window_end: Callable[[], WindowEnd]) -> None:
        """``window_end`` returns that of the window that runs or has just ended."""
        self._trainer = trainer
        self._loop = trainer.fit_loop.epoch_loop
        self._window_end = window_end

    def of_schedules(self) -> AbstractContextManager[None]:
        """Return a context in which frequencies of schedules by step count batches of the recipe."""
        stock = self._loop.update_lr_schedulers

        def update(interval: str, update_plateau_schedulers: bool) -> None:
            with ExitStack() as stack:
                if interval == "step" and not self._loop._should_accumulate():
                    self._replace_frequencies(stack)
                stock(interval, update_plateau_schedulers=update_plateau_schedulers)

        return patching.shadowed(self._loop, "update_lr_schedulers", update)

    def of_validation(self) -> AbstractContextManager[None]:
        """Return a context in which validation is due at the ends of windows, by batches of the recipe."""
        stock = self._loop._should_check_val_fx

        def should_check(fetcher: Any) -> bool:
            every = self._trainer.val_check_batch
            counted = self._batches_counted()
            if every in (None, inf) or not counted:  # by time, or as the epoch ends; or before the first batch
                return bool(stock(fetcher))
            asked = counted if self._validates(every) else counted + 1
            with patching.replaced(self._trainer, val_check_batch=asked):
                return bool(stock(fetcher))

        return patching.shadowed(self._loop, "_should_check_val_fx", should_check)

    def _replace_frequencies(self, stack: ExitStack) -> None:
        end = self._window_end()
        is_last = bool(self._loop._num_ready_batches_reached())
        counted = self._loop.batch_idx + 1
        for config in self._trainer.lr_scheduler_configs:
            if config.interval != "step" or config.frequency == 1:
                continue
            is_due = end.steps_schedule(config.frequency, is_last=is_last)
            stack.enter_context(patching.replaced(config, frequency=counted if is_due else counted + 1))

    @property
    def _is_over_epochs(self) -> bool:
        return self._trainer.check_val_every_n_epoch is None

    def _batches_counted(self) -> int:
        """Return the loop's count that Lightning divides by ``val_check_batch``."""
        if self._is_over_epochs:
            index = self._loop.total_batch_idx
        else:
            index = self._loop.batch_idx
        return int(index) + 1

    def _validates(self, every: int) -> bool:
        if self._loop._should_accumulate():
            return False
        return self._window_end().validates(every, over_epochs=self._is_over_epochs)


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
    if not trainer._logger_connector.should_update_logs:
        return
    for logger in trainer.loggers:
        known = {name: float(value) for name, value in values.items() if value is not None}
        logger.log_metrics(known, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
