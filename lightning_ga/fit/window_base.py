"""What windows have in common, whether the loader cuts them (``loader_windows.py``) or the step (``step_windows.py``).

A window is all samples between two optimizer steps. ``TrainingData`` decides where they are cut.

They are called in this order: ``setting_up``, by ``TrainingData``, as often as data are loaded; then by ``Fit``
``adopt_position``, ``begin_epoch``, ``install`` and ``begin_reading`` once; ``begin_window`` for each window,
``begin_batch`` for each batch of the loop, and ``end_window`` if the window ``is_over`` with it. ``trial_batches`` may
come before and between. ``Rewinder`` calls ``plan_again`` after an error, and ``begin_window`` again. A ``planner``
cuts the windows.

Tested in tests/differential/test_differential.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lightning_ga.fit.parts import FitParts
from lightning_ga.loading.trial_batches import BatchCutter
from lightning_ga.snapshot.kept_batch import KeptBatch


class CutWindows(ABC):
    """The windows of a fit; the methods here are for the kind that has nothing to do for them."""

    in_step: bool  # whether the step cuts

    def __init__(self, parts: FitParts, cutter: Callable[[], BatchCutter]) -> None:
        self._parts = parts
        self._cutter = cutter
        self._place = parts.place
        self.batches: list[KeptBatch] = []  # of the running window, as ``keep`` got them
        self._begun: tuple[Any, int] | None = None  # source and number of the running epoch; none before the first
        self._reads = False  # whether the loop has begun to read
        self._recipe_is_clock = False  # whether the recipe's batches, not the loop's, say from here on what is due

    def begin_epoch(self, epoch: int) -> None:
        """Plan an epoch and set the loop up for it, once."""
        if self._begun != (self._source, epoch):
            self._begin_epoch(epoch)
            self._begun = (self._source, epoch)

    @property
    @abstractmethod
    def _source(self) -> Any:
        """The loader that is cut."""

    @abstractmethod
    def _begin_epoch(self, epoch: int) -> None:
        """Plan an epoch and set the loop up for it."""

    def kept_order(self) -> str | None:
        """Return the order of the running epoch for a checkpoint, if nothing else gives it again."""
        return None

    def index_of(self, index_in_window: int) -> Any:
        """Return the index in the dataset of the only sample of a pass of the running window; ``None`` if not known."""
        return None

    @property
    def has_unequal_passes(self) -> bool:
        """Whether the loop's batches in a window may have unlike numbers of samples, on any rank."""
        return False

    def keep(self, batch: Any) -> None:
        """Keep a batch of the loop before anything changes it, if its samples cannot be read again by their indices."""
        return

    def halve_passes_of_short_samples(self) -> tuple[int, int] | None:
        """Make passes smaller that have several samples though the limit is one of the longest; ``None`` if none has.

        Return how many samples the largest pass had, and how many it may have from here on.
        """
        return None
