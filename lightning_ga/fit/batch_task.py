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


class Evaluation(TaskAttempt):
    """An attempt at a step of an evaluation loop, which changes nothing of its own."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self._step = step

    def __call__(self, part: Any) -> Any:
        """Run these samples."""
        return self._step(part)


@dataclass(frozen=True, slots=True)
class TrainingBatches:
    """What is known of the batches of training."""

    source: Callable[[], BatchSource] = lambda: ReadyMadeBatches(list)  # how they are made
    verdict: Callable[[], str] = str  # says in a sentence whether a batch in parts has the gradient of the whole
    samples: Callable[[], int | None] = lambda: None  # how many the current one should hold, where that is known
    samples_again: Callable[[], CollatedAgain | None] = lambda: None  # those of the current one, where at hand
    samples_of_next: Callable[[Any], int | None] = lambda _: None  # how many the next one should hold


@dataclass(frozen=True, slots=True)
class BatchTask:
    """One batch and how it is run."""

    batch: Any
    stage: str  # ``"training"``, ``"validation"``, ``"test"`` or ``"prediction"``
    attempt: Callable[[Piece | None], TaskAttempt]  # makes an attempt at one piece, or at all of it
    expected: int | None = None  # samples that it should hold, where that is known
    loader: int = 0  # which of several loaders of its stage it comes from
    weigh: Callable[[Any, Piece], float] = lambda _, piece: float(piece.samples)  # in means over the batch
    again: Callable[[], CollatedAgain | None] = lambda: None  # fetches its samples again, where they are at hand
    within_window: bool = False  # whether no optimizer has stepped since the batch before


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
