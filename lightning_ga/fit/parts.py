"""The parts of a fit that its windows share.

Tested in tests/integration/test_fits.py.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from lightning_ga.compat.logged_values import StepValues
from lightning_ga.compat.loop_counters import LoopPlace
from lightning_ga.fit.data_progress import DataProgress
from lightning_ga.fit.gradients import Gradients
from lightning_ga.fit.limit import Limit
from lightning_ga.fit.shares import Shares
from lightning_ga.plan.config import Request


@dataclass(frozen=True, slots=True)
class FitParts:
    """What was asked for, what fits, where training is, what passes weigh and log, what is undone as the fit ends."""

    request: Request
    limit: Limit
    shares: Shares
    progress: DataProgress
    gradients: Gradients
    values: StepValues
    undo_at_end: ExitStack = field(default_factory=ExitStack)

    @property
    def trainer(self) -> Any:
        """The Trainer whose fit this is."""
        return self.progress.trainer

    @property
    def place(self) -> LoopPlace:
        """The place of the fit loop in its data."""
        return self.progress.place
