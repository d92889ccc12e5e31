"""What is run of one batch, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_ga.fit.pieces import Piece
from lightning_ga.loading.batch_source import BatchSource, ReadyMadeBatches
from lightning_ga.loading.reader import CollatedAgain


class TaskAttempt(Protocol):
    """One attempt at some samples of a batch."""

    def __call__(self, part: Any) -> Any:
        """Run these samples."""

    def undo(self) -> str | None:
        """Undo what it changed beyond what all stages change; name what cannot be undone."""
        return None


@dataclass(frozen=True, slots=True)
class TrainingBatches:
    """What is known of the batches of training."""

    source: Callable[[], BatchSource] = lambda: ReadyMadeBatches(list)  # how they are made
    verdict: Callable[[], str] = str  # says in a sentence whether a batch in parts has the gradient of the whole
    # Of one of the window that is trained on, by its number: how many it should hold, where that is known; those
    # samples, where at hand.
    samples: Callable[[int], int | None] = lambda _: None
    samples_again: Callable[[int], CollatedAgain | None] = lambda _: None
    samples_of_next: Callable[[Any], int | None] = lambda _: None  # how many the next one should hold
    is_empty: Callable[[int], bool] = lambda _: False  # whether one, by its number, only fills its window up


class BatchTask:
    """One batch and how it is run.

    Args:
        batch: The batch.
        stage: ``"training"``, ``"validation"``, ``"test"`` or ``"prediction"``.
        loader: Which of several loaders of its stage it comes from.
    """

    is_first = False  # of its epoch
    within_window = False  # whether no optimizer has stepped since the batch before
    may_begin_again = True  # whether all that its pieces have done can be undone once several have run

    def __init__(self, batch: Any, stage: str, loader: int = 0) -> None:
        self.batch, self.stage, self.loader = batch, stage, loader

    @property
    def expected(self) -> int | None:
        """Samples that it should hold, where that is known."""
        return None

    def attempt(self, piece: Piece | None, *, from_start: bool) -> TaskAttempt:
        """Return an attempt at one piece, or at all of it.

        Args:
            piece: The piece; ``None`` for all samples.
            from_start: Whether to undo it is to undo the pieces before, too.
        """
        raise NotImplementedError

    def weigh(self, part: Any, piece: Piece) -> float:
        """Return what a piece weighs in means over the batch."""
        return float(piece.samples)

    def again(self) -> CollatedAgain | None:
        """Fetch its samples again; ``None`` where they are not at hand."""
        return None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a batch."""

    results: tuple[Any, ...]  # what the pieces returned; one result for a batch that ran whole
    sizes: tuple[int, ...] = ()  # samples of each piece; empty for a batch that ran whole
    weights: tuple[float, ...] = ()  # what each weighs in means
    refused: tuple[int, ...] = ()  # samples of the attempts that ran out of memory
    draws: bool = False  # whether pieces drew random numbers, after one ran out of memory

    @property
    def skips_some(self) -> bool:
        """Whether some pieces returned nothing, and others something."""
        return len({result is None for result in self.results}) > 1

    def largest_that_fits(self) -> int:
        """Return the size of the largest piece below all that failed.

        A piece as large as one that failed may have gone through before: samples differ.
        """
        return max((size for size in self.sizes if size < min(self.refused)), default=1)
