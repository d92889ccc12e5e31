"""What windows have in common, whether the loader cuts them (``loader_windows.py``) or the step (``step_windows.py``).

A window is all samples between two optimizer steps. ``TrainingData`` decides where they are cut.

They are called in this order: ``setting_up``, by ``TrainingData``, as often as data are loaded; then by ``Fit``
``adopt_position``, ``begin_epoch`` of the first epoch, ``install`` and ``begin_reading``, once each; ``begin_epoch`` as
each epoch starts; ``begin_window`` for each window, ``begin_batch`` for each batch of the loop, and ``end_window`` if
the window ``is_over`` with it. ``trial_batches`` may come before and between. To cut the running window anew,
``Rewinder`` calls ``plan_again``, after an error or retries of the allocator, and ``begin_window`` again. If limit or
shares have changed, ``LoaderWindows.begin_window`` calls it. A ``planner`` cuts the windows.

Tested in tests/differential/test_differential.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lightning_ga.fit.parts import FitParts
from lightning_ga.loading.trial_batches import BatchCutter
from lightning_ga.snapshot.kept_batch import KeptBatch


class CutWindows(ABC):
    """The windows of a fit. Methods that do nothing here are overridden by the kind that needs them.

    Methods that each kind has in its own way are not declared here: callers have the union of both (``Windows`` in
    ``training_data.py``), so mypy finds them in each. They have the same arguments, though one kind may not need all.
    """

    in_step: bool  # whether the step cuts

    def __init__(self, parts: FitParts, cutter: Callable[[], BatchCutter]) -> None:
        self._parts = parts
        self._cutter = cutter
        self._place = parts.place
        self.batches: list[KeptBatch] = []  # of the running window, as ``keep`` got them
        self._begun: tuple[Any, int] | None = None  # source and number of the running epoch; none before the first
        self._reads = False  # whether the loop has begun to read
        self._recipe_is_clock = False  # whether validation and schedules follow the recipe's batches, not the loop's

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
        """Halve passes of several short samples, with ``size_of``, once the limit is one of the longest.

        Return how many samples the largest pass had, and how many it may have from here on; ``None`` if all have one.
        """
        return None
