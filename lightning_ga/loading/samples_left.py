"""Count the samples that a collate function has left of those that were planned for a micro-batch.

Tested in tests/integration/test_collate_functions.py.
"""

from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.errors import ExactnessWarning
from lightning_ga.loading.trial_batches import BatchCutter


class SamplesLeft:
    """Counts, and warns once if a batch has more samples than were planned, or a number that cannot be counted."""

    def __init__(self, cutter: Callable[[], BatchCutter]) -> None:
        self._cutter = cutter
        self._has_warned = False

    def count(self, batch: Any, planned: int) -> int | None:
        """Return how many of the ``planned`` samples are left in a batch; ``None`` if the plan is to be believed."""
        cutter = self._cutter()
        left = cutter.count_left(batch)
        if left is None and cutter.were_seen_dropped:
            self._warn(planned, "a number that cannot be counted")
        elif left is not None and left > planned > 0:  # a micro-batch that is planned with none runs one, weighed 0
            self._warn(planned, str(left))
            return None
        return left

    def _warn(self, planned: int, made: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        rank_zero_warn(
            f"A micro-batch was planned with {planned} samples, and the collate function made {made} of them. It "
            f"weighs {planned}: let the collate function make one entry of each sample that it keeps, or count "
            "what the loss is a mean over (normalize=).",
            category=ExactnessWarning,
        )
