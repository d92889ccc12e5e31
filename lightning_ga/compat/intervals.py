"""Decide when validation is due, and when training may stop; count optimizer steps.

Lightning's ``loops/training_epoch_loop.py``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import inf, isinf
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from lightning_ga.compat import patching
from lightning_ga.errors import UserError


def optimizer_steps(trainer: Any) -> int | float:
    """Count the optimizer steps of a whole training, also where the effective batch changes between epochs.

    For use in ``configure_optimizers``, where ``trainer.estimated_stepping_batches`` is right only for a
    constant effective batch: it divides by the current factor.

    Args:
        trainer: The Trainer of the fit that is running, with or without ``AutoAccumulate``.

    Returns:
        The count; infinite if neither epochs nor steps are limited, or if the data have no length.

    Raises:
        UserError: If no fit is running.
    """
    if getattr(trainer, "lightning_module", None) is None:
        raise UserError(
            "optimizer_steps(trainer) counts the steps of a fit that is running: call it in configure_optimizers, as "
            "lightning_ga.optimizer_steps(self.trainer)."
        )
    estimate: int | float = trainer.estimated_stepping_batches  # sets the training data up if need be
    estimate = inf if estimate == -1 else estimate  # Lightning's word for data without a length
    for callback in trainer.callbacks:
        count = getattr(callback, "optimizer_steps", None)
        if callable(count):
            steps: int | None = count()
            return estimate if steps is None else steps
    return estimate


def wrong_horizons(trainer: Any, steps: int) -> list[tuple[str, int]]:
    """Return name and horizon of schedules whose horizon is not the number of optimizer steps, which they step with."""
    configs = [config for config in trainer.lr_scheduler_configs if config.interval == "step" and config.frequency == 1]
    lengths = ((OneCycleLR, "total_steps"), (CosineAnnealingLR, "T_max"))
    pairs = [(each.scheduler, name) for each in configs for kind, name in lengths if isinstance(each.scheduler, kind)]
    horizons = [(type(scheduler).__name__, int(getattr(scheduler, name))) for scheduler, name in pairs]
    return [(name, length) for name, length in horizons if length != steps]


def validate_when_due(trainer: Any, before: int, after: int, epoch_batches: int | None) -> None:
    """Let validation run after this micro-batch if it is due by the recipe's batches ``before`` and ``after`` it.

    The loop looks whether ``trainer.val_check_batch`` divides its count of micro-batches
    (``training_epoch_loop.py:560``): it is set accordingly.
    """
    interval = _validation_interval(trainer, epoch_batches)
    if interval is None:
        return
    loop = trainer.fit_loop.epoch_loop
    index = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
    if before == index and after == index + 1:  # nothing is cut
        trainer.val_check_batch = interval
        return
    over = bool(loop.batch_progress.is_last_batch)
    due = over if isinf(interval) else after // interval > before // interval  # a stream is validated when it is over
    trainer.val_check_batch = index + 1 if due else index + 2


def set_validation_interval(trainer: Any, epoch_batches: int | None) -> None:
    """Check and set the interval of validation as ``fit_loop.py:289`` does, but in batches of the recipe."""
    interval: Any = getattr(trainer, "val_check_interval", None)
    is_fixed = isinstance(interval, int) and trainer.check_val_every_n_epoch is not None
    if is_fixed and epoch_batches is not None and interval > epoch_batches and trainer.limit_val_batches > 0:
        raise UserError(
            f"val_check_interval={interval} is more than the {epoch_batches} training batches of an epoch: use at "
            "most that, or check_val_every_n_epoch=None to count batches over epochs."
        )
    due_after = _validation_interval(trainer, epoch_batches)
    if due_after is not None:
        trainer.val_check_batch = due_after


def _validation_interval(trainer: Any, epoch_batches: int | None) -> int | float | None:
    """Return ``val_check_interval`` in batches of the recipe: infinite if their number is not known, none if a time."""
    if getattr(trainer, "_val_check_time_interval", None) is not None:  # 2.5 has no interval by time
        return None
    interval: int | float = trainer.val_check_interval
    if not isinstance(interval, float):
        return interval
    return inf if epoch_batches is None else max(1, int(epoch_batches * interval))


@contextmanager
def stopping_only_unless(trainer: Any, holds: Callable[[], bool]) -> Iterator[None]:
    """Return a context in which ``trainer.should_stop`` waits while ``holds()``: between parts of one batch.

    The loop asks in ``on_advance_end``, and before it goes on (``training_epoch_loop.py:135``, ``:540``).
    """
    loop = trainer.fit_loop.epoch_loop
    go_on, is_waiting = type(loop).on_advance_end, False

    def on_advance_end(fetcher: Any) -> None:
        nonlocal is_waiting
        stops = trainer.should_stop or is_waiting
        is_waiting = stops and holds()
        trainer.should_stop = stops and not is_waiting
        go_on(loop, fetcher)

    with patching.shadowed(loop, "on_advance_end", on_advance_end):
        yield


def followed_by_step(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield who decides by a value, and by which one, that ``training_step`` has logged by step alone.

    The values are ``_ResultMetric`` of ``trainer/connectors/logger_connector/result.py``.
    """
    metas = [value.meta for value in trainer.fit_loop.epoch_loop._results.values()]
    names = {meta.name for meta in metas if meta.on_step and not meta.on_epoch}
    names |= {f"{meta.name}_step" for meta in metas if meta.on_step and meta.on_epoch}
    names -= {meta.name for meta in metas if meta.on_epoch}  # a mean over the epoch counts
    plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    followers = [(config.scheduler, config.monitor) for config in plateaus]
    followers += [(callback, getattr(callback, "monitor", None)) for callback in trainer.callbacks]
    yield from ((type(each).__name__, monitor) for each, monitor in followers if monitor in names)


def plateaus_by_step(trainer: Any) -> list[str]:
    """Return the names of schedules by step that follow a monitored value."""
    configs = [each for each in trainer.lr_scheduler_configs if each.interval == "step" and each.reduce_on_plateau]
    return [f"{type(config.scheduler).__name__} by step" for config in configs]


def before_schedulers(trainer: Any, call: Callable[[], None]) -> AbstractContextManager[None]:
    """Return a context in which ``call`` runs after each optimizer step, before schedules do (``:370``)."""
    loop = trainer.fit_loop.epoch_loop
    update = loop.update_lr_schedulers

    def ours(interval: str, update_plateau_schedulers: bool) -> None:
        if not loop._should_accumulate():
            call()
        update(interval, update_plateau_schedulers=update_plateau_schedulers)

    return patching.shadowed(loop, "update_lr_schedulers", ours)


def log_step(trainer: Any, values: Mapping[str, Any]) -> None:
    """Give loggers values of the step that is trained on, as often as ``log_every_n_steps`` says."""
    for logger in trainer.loggers if trainer._logger_connector.should_update_logs else ():
        known = {name: float(value) for name, value in values.items() if value is not None}
        logger.log_metrics(known, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
