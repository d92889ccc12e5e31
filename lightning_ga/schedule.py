"""Schedules of the effective batch size over epochs: the public path of ``plan.schedule``."""

from lightning_ga.plan.schedule import Schedule, ScheduleLike, as_schedule

__all__ = ["Schedule", "ScheduleLike", "as_schedule"]
