"""Schedules of the effective batch size, or of the factor, over training: the public path of ``plan.schedule``."""

from lightning_ga.plan.schedule import (
    EpochSchedule,
    Schedule,
    ScheduleLike,
    WindowSchedule,
    as_schedule,
    by_samples,
    by_step,
    from_lr_decay,
    geometric,
    linear,
    seesaw,
)

__all__ = [
    "EpochSchedule",
    "Schedule",
    "ScheduleLike",
    "WindowSchedule",
    "as_schedule",
    "by_samples",
    "by_step",
    "from_lr_decay",
    "geometric",
    "linear",
    "seesaw",
]
