"""Readers of the batches of each loader, made when they are first needed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ga.compat import transfer
from lightning_ga.loading.reader import BatchReader, BatchSource
from lightning_ga.probe.isolation import hooks_apart


class BatchReaders:
    """Count the samples of batches, and keep what that needs for each loader.

    Args:
        trainer: The Trainer.
        attempts: Catches no errors while samples are read.
        source: Says what is known of the batches of a loader, by its stage and number.
    """

    def __init__(self, trainer: Any, attempts: Any, source: Callable[[str, int], BatchSource]) -> None:
        self._trainer, self._attempts, self._source = trainer, attempts, source
        self._readers: dict[tuple[str, int], BatchReader] = {}

    def reader(self, stage: str, loader: int = 0) -> BatchReader:
        """Return what counts and cuts the batches of a loader."""
        key = stage, loader
        if key not in self._readers:
            self._readers[key] = BatchReader(transfer.BatchTransfer(self._trainer, loader), self._source(stage, loader))
        return self._readers[key]

    def count(self, batch: Any, stage: str, expected: int | None, loader: int = 0, *, on_host: bool = False) -> int:
        """Return how many samples a batch holds.

        Args:
            batch: The batch.
            stage: What it is for.
            expected: How many it should hold, where that is known.
            loader: Which of several loaders of its stage it comes from.
            on_host: Whether it has not been moved to the device.
        """
        if expected is not None:
            return expected
        reader = self.reader(stage, loader)
        with self.reading(reader, on_host=on_host):
            return reader.count(batch, on_host=on_host)

    @contextmanager
    def reading(self, reader: BatchReader, *, on_host: bool, anew: bool = False) -> Iterator[None]:
        """Return a context in which samples may be read so that nothing is left of it: hooks take part.

        Args:
            reader: What reads them.
            on_host: Whether the batch has not been moved to the device.
            anew: Whether samples are read in any case.
        """
        if reader.is_read(on_host=on_host) and not anew:
            yield
            return
        with self._attempts.suspended(), hooks_apart(self._trainer):
            yield
