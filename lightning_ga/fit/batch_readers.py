"""Readers of the batches of each loader, made when they are first needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ga.compat import transfer
from lightning_ga.loading.reader import BatchReader
from lightning_ga.probe.isolation import hooks_apart


class BatchReaders:
    """Count the samples of batches, and keep what that needs for each loader.

    The engine knows how batches are made, and catches no errors while samples are read.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._readers: dict[tuple[str, int], BatchReader] = {}

    def reader(self, stage: str, loader: int = 0) -> BatchReader:
        """Return what counts and cuts the batches of a loader."""
        key = stage, loader
        if key not in self._readers:
            mover, source = transfer.BatchTransfer(self._engine.trainer, loader), self._engine.batches(stage)
            self._readers[key] = BatchReader(mover, source.source(loader))
        return self._readers[key]

    def count(self, batch: Any, stage: str, expected: int | None, loader: int = 0, *, on_host: bool = False) -> int:
        """Return how many samples a batch holds: those ``expected``, if that is known."""
        if expected is not None:
            return expected
        reader = self.reader(stage, loader)
        with self.reading(reader, on_host=on_host):
            return reader.count(batch, on_host=on_host)

    @contextmanager
    def reading(self, reader: BatchReader, *, on_host: bool) -> Iterator[None]:
        """Return a context in which samples may be read so that nothing is left of it: hooks take part."""
        if reader.is_read(on_host=on_host):
            yield
            return
        with self._engine.suspended(), hooks_apart(self._engine.trainer):
            yield
