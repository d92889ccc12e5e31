"""Learning rates between a window's start and its optimizer step, and what loggers are given of them.

Lightning's ``loops/training_epoch_loop.py`` and ``trainer/connectors/logger_connector/logger_connector.py``.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning_ga.compat import patching


def before_schedulers(trainer: Any, call: Any) -> AbstractContextManager[None]:
    """Return a context in which ``call`` runs once the optimizer has stepped, before schedules do (``:383``)."""
    loop = trainer.fit_loop.epoch_loop
    update = loop.update_lr_schedulers

    def ours(interval: str, update_plateau_schedulers: bool) -> None:
        if not loop._should_accumulate():
            call()
        update(interval, update_plateau_schedulers=update_plateau_schedulers)

    return patching.shadowed(loop, "update_lr_schedulers", ours)


def groups(trainer: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups of all optimizers."""
    for optimizer in trainer.optimizers:
        yield from optimizer.param_groups


def saved_groups(checkpoint: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups that a checkpoint keeps, in the same order."""
    for state in checkpoint.get("optimizer_states", ()):
        yield from state["param_groups"]


def log_step(trainer: Any, values: Mapping[str, float]) -> None:
    """Give loggers values of the step that is trained on, as often as ``log_every_n_steps`` says."""
    if trainer.loggers and trainer._logger_connector.should_update_logs:
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
