"""Schedules of the effective batch size, or of the factor, over training: the public path of ``plan.batch_schedule``.

Tested in tests/plan/test_batch_schedule.py.
"""

from lightning_ga.plan.batch_schedule import *  # noqa: F403
from lightning_ga.plan.batch_schedule import __all__ as __all__
