"""Run a batch in pieces that fit: try, and where memory runs out, try again in halves. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring samples of a batch.

    Attributes:
        start: The first.
        stop: One after the last.
        of: Samples of the batch.
    """

    start: int
    stop: int
    of: int

    @property
    def samples(self) -> int:
        """How many."""
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether none comes after it in its batch."""
        return self.stop == self.of

    def contains(self, other: "Piece") -> bool:
        """Whether all samples of another piece are among these."""
        return self.start <= other.start and other.stop <= self.stop

    def halves(self) -> tuple["Piece", "Piece"]:
        """Two pieces of equal size, the first with one sample more where that is odd."""
        middle = (self.start + self.stop + 1) // 2
        return Piece(self.start, middle, self.of), Piece(middle, self.stop, self.of)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Result]):
    """What came of a batch.

    Attributes:
        pieces: The pieces that ran, in order.
        results: What each returned.
        failed: Samples of the pieces that did not fit, in the order they were tried.
    """

    pieces: tuple[Piece, ...]
    results: tuple[Result, ...]
    failed: tuple[int, ...]


class TooLargeError(Exception):
    """One sample alone does not fit."""


def run_pieces(pieces: Sequence[Piece], attempt: Callable[[Piece], tuple[bool, Result | None]]) -> Outcome[Result]:
    """Run pieces in order; each that fails is run again in halves.

    Args:
        pieces: What to run.
        attempt: Runs a piece: whether it went through, and what it returned. One that did not has
            undone what it changed.

    Raises:
        TooLargeError: If a piece of one sample fails.

    Examples:
        >>> run_pieces([Piece(0, 5, of=5)], lambda piece: (piece.samples <= 2, piece.samples)).results
        (2, 1, 2)
    """
    waiting, done, failed = list(reversed(pieces)), [], []
    while waiting:
        piece = waiting.pop()
        went_through, result = attempt(piece)
        if went_through:
            done.append((piece, result))
            continue
        failed.append(piece.samples)
        if piece.samples <= 1:
            raise TooLargeError
        # What failed once fails again at its size: the pieces that wait are cut as well before they are tried.
        waiting = [part for other in waiting for part in _cut(other, piece.samples)] + [*reversed(piece.halves())]
    return Outcome(tuple(piece for piece, _ in done), tuple(result for _, result in done), tuple(failed))  # type: ignore[misc]


def _cut(piece: Piece, too_large: int) -> tuple[Piece, ...]:
    """A waiting piece in halves, in the order of a stack, if it is as large as one that failed."""
    return (piece,) if piece.samples < too_large else tuple(reversed(piece.halves()))


def even_pieces(sizes: Sequence[int]) -> list[Piece]:
    """Neighbouring pieces of these sizes.

    Examples:
        >>> even_pieces([3, 2])
        [Piece(start=0, stop=3, of=5), Piece(start=3, stop=5, of=5)]
    """
    pieces, start = [], 0
    for size in sizes:
        pieces.append(Piece(start, start + size, sum(sizes)))
        start += size
    return pieces
