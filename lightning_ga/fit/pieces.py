"""Run a batch in pieces that fit: try, and where memory runs out, try again in halves. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lightning_ga.plan.accumulation import split_evenly

Result = TypeVar("Result")


class Again:
    """The outcome of a piece that has undone what it changed, and is to run again as it is."""


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

    def contains(self, other: "Piece") -> bool:
        """Whether all samples of another piece are among these."""
        return self.start <= other.start and other.stop <= self.stop

    def halves(self) -> tuple["Piece", "Piece"]:
        """Two pieces of equal size, the first with one sample more where that is odd."""
        middle = (self.start + self.stop + 1) // 2
        return Piece(self.start, middle, self.of), Piece(middle, self.stop, self.of)


def run_pieces(
    pieces: Sequence[Piece], attempt: Callable[[Piece], Result | Again | None], *, from_start: bool = False
) -> list[tuple[Piece, Result]]:
    """Run pieces in order, each that fails again in halves; return those that ran, with their results.

    Args:
        pieces: What to run.
        attempt: Runs a piece and returns its result; ``None`` for one that failed and has undone what it changed,
            ``Again()`` for one that did for another reason than its size. It raises where a single sample fails.
        from_start: Whether a failure undoes the pieces before, too: the batch is cut anew, into near-equal ones.

    Examples:
        >>> done = run_pieces([Piece(0, 5, of=5)], lambda piece: piece.samples if piece.samples <= 2 else None)
        >>> [result for _, result in done]
        [2, 1, 2]
        >>> tried = []
        >>> fails_once = lambda piece: tried.append(piece.start) or (None if len(tried) == 2 else piece.samples)
        >>> [result for _, result in run_pieces(even_pieces([2, 2]), fails_once, from_start=True)], tried
        ([1, 1, 1, 1], [0, 2, 0, 1, 2, 3])
        >>> most_two = lambda piece: piece.samples if piece.samples <= 2 else None
        >>> [result for _, result in run_pieces(even_pieces([3, 3, 2]), most_two, from_start=True)]
        [2, 2, 2, 2]
    """
    waiting, done = list(reversed(pieces)), []
    while waiting:
        piece = waiting.pop()
        result = attempt(piece)
        if result is not None and not isinstance(result, Again):
            done.append((piece, result))
            continue
        waiting.append(piece)
        if from_start:
            waiting, done = [*waiting, *(ran for ran, _ in reversed(done))], []
        # What failed once fails again at its size: the pieces that wait are cut as well before they are tried.
        if result is None and from_start:
            parts = -(-piece.of // piece.halves()[0].samples)
            waiting = [*reversed(even_pieces(split_evenly(piece.of, parts)))]
        elif result is None:
            waiting = [part for other in waiting for part in _cut(other, piece.samples)]
    return done


def _cut(piece: Piece, too_large: int) -> tuple[Piece, ...]:
    """A piece in halves, in the order of a stack, if it is as large as one that failed."""
    return (piece,) if piece.samples < max(too_large, 2) else tuple(reversed(piece.halves()))


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
