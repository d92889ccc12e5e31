"""What the engine runs: windows, their batches (parts), and pieces of these."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_ga.compat.logs import LogBuffer
from lightning_ga.loading.reader import BatchReader, BatchSource, CollatedAgain
from lightning_ga.snapshot.savepoint import Savepoint

Move = Callable[[Any], Any]
_NOTHING = LogBuffer()


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring samples of a batch."""

    start: int  # the first
    stop: int  # one after the last
    of: int  # samples of the batch

    @property
    def samples(self) -> int:
        """How many."""
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether none comes after it in its batch."""
        return self.stop == self.of


def even_pieces(sizes: Sequence[int]) -> list[Piece]:
    """Return neighbouring pieces of these sizes.

    Examples:
        >>> even_pieces([3, 2])
        [Piece(start=0, stop=3, of=5), Piece(start=3, stop=5, of=5)]
    """
    pieces, start = [], 0
    for size in sizes:
        pieces.append(Piece(start, start + size, sum(sizes)))
        start += size
    return pieces


@dataclass(slots=True, eq=False)
class Part:
    """One batch of a window."""

    batch: Any  # ``None`` once it has run and can be fetched again
    number: int
    move: Move | None = None  # moves pieces to the device; ``None`` if the batch is there
    loader: int = 0
    expected: int | None = None  # samples that it should hold, where that is known
    host: Any = None  # the batch on the host, if it was moved from there
    is_changed: bool = False  # whether hooks have changed the batch: no other is like it
    tensors: Sequence[tuple[int, int]] = ()  # as it was before it ran (``tensors_of``)


class BatchResult(NamedTuple):
    """The results of a batch."""

    results: Sequence[Any]  # what the pieces returned; one result of a batch that ran whole
    sizes: Sequence[int] = ()  # samples of each piece; empty for a batch that ran whole
    weights: Sequence[float] = ()  # what each weighs in means
    logs: LogBuffer = _NOTHING  # what they have logged
    order: Sequence[int] = ()  # places of the samples in the batch, if the pieces have them in another order


class Window(ABC):
    """The batches that are undone together, and how they run."""

    stage: str  # ``"training"``, ``"validation"``, ``"test"`` or ``"prediction"``
    savepoint: Savepoint
    parts: list[Any]  # of ``Part``: the batches so far; all but the last have run

    @abstractmethod
    def run_pass(self, part: Any, batch: Any, piece: Piece | None, weight: float) -> Any:
        """Run the samples of a batch: all of them, or a piece that weighs so much in means."""

    def weigh(self, part: Any, cut: Any, piece: Piece) -> float:
        """Return what a piece weighs in means."""
        return float(piece.samples)

    def undo(self) -> str | None:
        """Undo what the savepoint does not keep, before the window runs again; name what cannot be undone."""
        return None

    def gradients_left(self) -> Iterable[tuple[str, Tensor]]:
        """Return gradients that ``undo`` leaves, as no optimizer zeroes them, with their names."""
        return ()


class StageBatches(ABC):
    """What is known of the batches of training, or of evaluation, which is less."""

    logged_batch_sizes: Mapping[float | None, float] = {}  # what constants count as in the current one (``LogTap``)

    @abstractmethod
    def batch_source(self, loader: int) -> BatchSource:
        """Return how the batches of a loader are made."""

    @abstractmethod
    def fetch(self, number: int, loader: int = 0, seed: int = 0) -> CollatedAgain | None:
        """Fetch the samples of a batch again, random numbers drawn from a seed; ``None`` if that is not possible."""

    def samples_of_next(self, batch: Any, reader: BatchReader) -> int | None:
        """Return how many samples the next batch should hold, as the limit counts; ``None`` if that is not known."""
        return None

    def relative_size(self, number: int) -> tuple[int, int]:
        """Return what a sample of a batch counts as, and what it does in the limit, if these differ."""
        return 1, 1

    def verdict(self, hooked: str | None) -> str:
        """Say in sentences whether a batch in pieces gives the same result, if a hook has changed a tensor."""
        return (
            "What they log and return is put together; what compares samples with each other (a contrastive loss), and "
            "what calls of metrics return, is that of parts."
        )

    def later_epochs(self) -> str:
        """Say in a sentence what an out-of-memory error changes from the next epoch on."""
        return ""


def tensors_of(batch: Any) -> list[tuple[int, int]]:
    """Return which tensors a batch holds, and how often each was written to; ``tree_leaves`` would take longer."""
    if isinstance(batch, Tensor):
        return [(id(batch), -1 if batch.is_inference() else batch._version)]
    found: list[tuple[int, int]] = []
    for each in batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ():
        found += tensors_of(each)
    return found
