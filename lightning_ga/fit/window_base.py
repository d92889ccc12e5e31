"""What windows have in common, whether the loader cuts them (``loader_windows.py``) or the step (``step_windows.py``).

A window is all samples between two optimizer steps. ``TrainingData`` decides where they are cut; nothing else asks.

Tested in tests/differential/test_differential.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_ga.fit.parts import FitParts
from lightning_ga.loading.trial_batches import BatchCutter
from lightning_ga.snapshot.kept_batch import KeptBatch


class CutWindows:
    """The windows of a fit; the methods here are for the kind that has nothing to do for them."""

    in_step: bool  # whether the step cuts

    def __init__(self, parts: FitParts, cutter: Callable[[], BatchCutter]) -> None:
        self._parts = parts
        self._cutter = cutter
        self._trainer = parts.progress.trainer
        self._place = parts.progress.place
        self.batches: list[KeptBatch] = []  # of the running window, as ``keep_batch`` got them
        self._reads = False  # whether the loop has begun to read
        self._is_due_by_recipe = False  # whether the loop's counts are not the recipe's, which then says what is due

    def setting_up(self) -> AbstractContextManager[None]:
        """Return a context in which the loop sets up its data."""
        return nullcontext()

    def kept_order(self) -> str | None:
        """Return the order of the running epoch for a checkpoint, if nothing else gives it again."""
        return None

    def index_of(self, number: int) -> Any:
        """Return the index in the dataset of the only sample of a pass of the running window; ``None`` if not known."""
        return None

    @property
    def keep_batch(self) -> Callable[[Any], None] | None:
        """Gets each batch of the loop before anything changes it; ``None`` if samples are read by their indices."""
        return None

    def can_read_again(self, kept_before: int) -> bool:
        """Return whether the samples of a failed pass can be read again; so many batches were kept before it."""
        return True
