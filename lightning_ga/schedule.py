"""Schedules of the effective batch size, or of the factor, over training: the public path of ``plan.batch_schedule``.

Tested in tests/plan/test_batch_schedule.py.
"""

from lightning_ga.plan.batch_schedule import (
    Schedule,
    ScheduleLike,
    as_schedule,
    by_samples,
    by_step,
    from_lr_decay,
    geometric,
    linear,
)

__all__ = ["Schedule", "ScheduleLike", "as_schedule", "by_samples", "by_step", "from_lr_decay", "geometric", "linear"]
