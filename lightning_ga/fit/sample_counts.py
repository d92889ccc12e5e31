"""Count the samples of training's batches: as planned, but for what a collate function has dropped."""

from collections.abc import Callable
from typing import Any

from lightning_ga.loading.reader import BatchReader, length_of_first
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.windows import Chunk


class SampleCounts:
    """Counts samples, and keeps the counts of the window that is trained on.

    Args:
        reader: Returns what counts the samples of a batch.
    """

    def __init__(self, reader: Callable[[], BatchReader]) -> None:
        self._reader = reader
        self._of_window: dict[int, int | None] = {}  # by the number of the batch

    def note(self, index: int, samples: int | None, *, begins_window: bool) -> None:
        """Keep what the ``index``-th batch should hold, where that is known; those of other windows are forgotten."""
        if begins_window:
            self._of_window.clear()
        self._of_window[index] = samples

    def expected(self, index: int) -> int | None:
        """Return what the ``index``-th batch, one of this window, should hold, where that is known."""
        return self._of_window.get(index)

    def count(self, source: TrainingSource, batch: Any, chunk: Chunk, *, on_host: bool) -> int:
        """Count the samples of a batch.

        Args:
            source: The training data.
            batch: The batch.
            chunk: What was planned for it.
            on_host: Whether it lies on the host.
        """
        if not chunk.count or not (source.streams or source.may_drop):
            return chunk.count
        if not source.may_drop:  # stacked: every part is as long as the batch
            return min(chunk.count, length_of_first(batch))
        return self._reader().count(batch, expected=source.expected(chunk), otherwise=chunk.count, on_host=on_host)
