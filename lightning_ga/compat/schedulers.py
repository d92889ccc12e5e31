"""Let schedules by step be due by the recipe's batches, and let a call run before them.

Lightning's ``loops/training_epoch_loop.py`` (``update_lr_schedulers``, 2.6.6).

Tested in tests/integration/test_recipe_inputs.py and tests/integration/test_schedules.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from lightning_ga.compat import patching


def due_by_recipe(trainer: Any, span: Callable[[], Any]) -> AbstractContextManager[None]:
    """Return a context in which frequencies of schedules by step count batches of the recipe.

    Lightning asks whether a frequency divides the loop's own count (``:486``), so the frequency is replaced while it
    asks. ``span`` returns the ``WindowSpan`` of the window that has just ended.
    """
    return _prepared(trainer, partial(_replace_frequencies, trainer, span))


def before_schedulers(trainer: Any, call: Callable[[], None]) -> AbstractContextManager[None]:
    """Return a context in which ``call`` runs before schedules do after an optimizer step, up to four times a step."""
    return _prepared(trainer, lambda *_: call())


def _prepared(trainer: Any, prepare: Callable[[str, ExitStack], None]) -> AbstractContextManager[None]:
    """Return a context in which, after an optimizer step, schedules run in the context that ``prepare`` fills."""
    loop = trainer.fit_loop.epoch_loop
    stock = loop.update_lr_schedulers

    def update(interval: str, update_plateau_schedulers: bool) -> None:
        with ExitStack() as stack:
            if not loop._should_accumulate():
                prepare(interval, stack)
            stock(interval, update_plateau_schedulers=update_plateau_schedulers)

    return patching.shadowed(loop, "update_lr_schedulers", update)


def _replace_frequencies(trainer: Any, span: Callable[[], Any], interval: str, stack: ExitStack) -> None:
    if interval != "step":
        return
    loop = trainer.fit_loop.epoch_loop
    counted = loop.batch_idx + 1
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.frequency != 1:
            is_due = span().steps_schedule(config.frequency, is_last=loop._num_ready_batches_reached())
            stack.enter_context(patching.replaced(config, frequency=counted if is_due else counted + 1))
