"""What is run of one batch, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_ga.fit.pieces import Piece
from lightning_ga.loading.reader import CollatedAgain


class TaskAttempt(Protocol):
    """One attempt at some samples of a batch."""

    def __call__(self, part: Any) -> Any:
        """Run these samples."""

    def undo(self) -> str | None:
        """Undo what it changed beyond what all stages change; name what cannot be undone."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An attempt at a step of an evaluation loop, which changes nothing of its own.

    Attributes:
        step: Runs some samples.
    """

    step: Callable[[Any], Any]

    def __call__(self, part: Any) -> Any:
        """Run these samples."""
        return self.step(part)

    def undo(self) -> str | None:
        """Do nothing."""
        return None


@dataclass(frozen=True, slots=True)
class BatchTask:
    """One batch and how it is run.

    Attributes:
        batch: The batch, whole.
        stage: What it is for: ``"training"``, ``"validation"``, ``"test"`` or ``"prediction"``.
        attempt: Makes an attempt at one piece, or at all of it.
        expected: Samples that it should hold, where that is known.
        loader: Which of several loaders of its stage it comes from.
        weigh: What a piece weighs in means over the batch.
        again: Fetches the samples of the batch again, where they are at hand.
        within_window: Whether no optimizer has stepped since the batch before.
    """

    batch: Any
    stage: str
    attempt: Callable[[Piece | None], TaskAttempt]
    expected: int | None = None
    loader: int = 0
    weigh: Callable[[Any, Piece], float] = lambda _, piece: float(piece.samples)
    again: Callable[[], CollatedAgain | None] = lambda: None
    within_window: bool = False


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a batch.

    Attributes:
        results: What the pieces returned; one result for a batch that ran whole.
        sizes: Samples of each piece; empty for a batch that ran whole.
        weights: What each weighs in means.
        refused: Samples of the attempts that ran out of memory.
        draws: Whether pieces drew random numbers, after one ran out of memory.
    """

    results: tuple[Any, ...]
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    refused: tuple[int, ...] = ()
    draws: bool = False

    @property
    def skips_some(self) -> bool:
        """Whether some pieces returned nothing, and others something."""
        return len({result is None for result in self.results}) > 1

    def largest_that_fits(self) -> int:
        """Return the size of the largest piece below all that failed.

        A piece as large as one that failed may have gone through before: samples differ.
        """
        return max((size for size in self.sizes if size < min(self.refused)), default=1)
