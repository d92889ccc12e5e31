"""Neighbouring samples of a batch, run as one pass."""

from collections.abc import Sequence
from dataclasses import dataclass


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
