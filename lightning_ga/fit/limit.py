"""The limit of a fit: the most samples of a micro-batch or piece, or of a chunk with ``whole=``.

``limit_search.py`` finds it, and ``remedies.py`` lowers it once memory is short.

Tested in tests/integration/test_probe.py and tests/integration/test_survive.py.
"""

from typing import Any

from lightning_ga.chunks import ChunkedModules
from lightning_ga.compat import ranks

NO_LIMIT = 2**31  # while nothing bounds a pass: before a limit is known, and if batches run as they are


class Limit:
    """Owns one number, and the size of chunks that follows from it."""

    def __init__(self, trainer: Any, whole: tuple[str, ...]) -> None:
        self._trainer = trainer
        self.chunked = ChunkedModules(trainer, whole) if whole else None  # whose chunks it bounds
        self.samples = NO_LIMIT
        self.is_known = False  # whether it has been found or given
        self.of_first_passes = NO_LIMIT  # what bounded a pass as training began; ``accumulate=`` multiplies it
        self.has_fallen = False  # whether a shortage of memory on any rank, or in the run before, has lowered it

    @property
    def of_pass(self) -> int:
        """The most samples of a pass; with ``whole=`` only chunks are bounded."""
        return self.samples if self.chunked is None else NO_LIMIT

    @property
    def unit(self) -> str:
        """What the limit bounds: ``"micro-batches"`` or ``"chunks"``."""
        return "micro-batches" if self.chunked is None else "chunks"

    @property
    def chunked_names(self) -> tuple[str, ...]:
        """The names of submodules that run in chunks over whole batches."""
        return () if self.chunked is None else self.chunked.names

    @property
    def after_errors(self) -> int | None:
        """The limit after errors, which a resumed run keeps; ``None`` without any."""
        return self.samples if self.has_fallen else None

    def micro_batch_at_start(self, recipe: int) -> int:
        """Return the micro-batch as training began; that of the ``recipe`` if no limit bounded it."""
        return recipe if self.of_first_passes == NO_LIMIT else self.of_first_passes

    def use(self, samples: int) -> None:
        """Use a limit that was found or given; the first one is that of training's start.

        What errors of the run before have left of it does not count: ``accumulate=`` multiplies the same in both runs.
        """
        self.samples = samples
        if not self.is_known:
            self.is_known = True
            self.of_first_passes = self.of_pass

    def fall(self, samples: int) -> None:
        """Lower the limit to so many samples, if it is larger: memory was short in a larger pass, on any rank."""
        if samples < self.samples:
            self.samples = samples
            self.has_fallen = True

    def mark(self) -> tuple[int, bool]:
        """Return what ``go_back`` takes: the limit, and whether it has fallen."""
        return self.samples, self.has_fallen

    def go_back(self, mark: tuple[int, bool]) -> None:
        """Use the limit as it was when it was marked."""
        self.samples, self.has_fallen = mark

    def agree(self) -> None:
        """Set the limit to the smallest of all ranks, which call this together; it has fallen if that of a rank has."""
        marks = ranks.of_all_ranks(self._trainer, self.mark())
        self.samples = min(samples for samples, _ in marks)
        self.has_fallen = any(has_fallen for _, has_fallen in marks)

    def size_chunks(self, samples: int) -> None:
        """Let submodules run over a batch of so many samples in chunks within the limit, all of about the same size."""
        if self.chunked is not None:
            self.chunked.size.use(self.samples, window=samples)
