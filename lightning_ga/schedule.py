"""Schedules of the effective batch size, or of the factor, over training: the public path of ``plan.schedule``.

Tested in tests/plan/test_schedule.py.
"""

from lightning_ga.plan.schedule import *  # noqa: F403
from lightning_ga.plan.schedule import __all__ as __all__
