"""Count the optimizer steps of a training, and find learning-rate schedules made for another number."""

from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR


def optimizer_steps(trainer: Any) -> int | float:
    """Count the optimizer steps of a whole training, also where the effective batch changes between epochs.

    For use in ``configure_optimizers``, where ``trainer.estimated_stepping_batches`` is right only for a
    constant effective batch: it divides by the current factor.

    Args:
        trainer: The Trainer of the fit that is running, with or without ``AutoAccumulate``.

    Returns:
        The count; infinite where neither epochs nor steps are limited.
    """
    estimate: int | float = trainer.estimated_stepping_batches  # sets the training data up where that has not been done
    for callback in trainer.callbacks:
        count = getattr(callback, "optimizer_steps", None)
        if callable(count):
            steps: int | None = count()
            return estimate if steps is None else steps
    return estimate


def wrong_horizons(trainer: Any, steps: int) -> list[tuple[str, int]]:
    """Return name and horizon of schedules whose horizon is not the number of optimizer steps, which they step with."""
    configs = [config for config in trainer.lr_scheduler_configs if config.interval == "step" and config.frequency == 1]
    found = [(type(config.scheduler).__name__, horizon(config.scheduler)) for config in configs]
    return [(name, length) for name, length in found if length is not None and length != steps]


def horizon(scheduler: LRScheduler) -> int | None:
    """Return the steps after which a schedule ends; ``None`` for schedules without an end."""
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    return int(scheduler.T_max) if isinstance(scheduler, CosineAnnealingLR) else None
