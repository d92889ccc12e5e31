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


def wrong_horizons(schedulers: list[Any], steps: int | float) -> list[tuple[str, int]]:
    """Return name and horizon of schedules by step whose horizon is not the number of optimizer steps.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=24)
        >>> wrong_horizons([schedule], 6)
        [('OneCycleLR', 24)]
    """
    found = [(type(scheduler).__name__, horizon(scheduler)) for scheduler in schedulers]
    return [(name, length) for name, length in found if length is not None and length != steps]


def horizon(scheduler: LRScheduler) -> int | None:
    """Return the steps after which a schedule ends; ``None`` for schedules without an end."""
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    return int(scheduler.T_max) if isinstance(scheduler, CosineAnnealingLR) else None
