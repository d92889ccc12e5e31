"""Hold back what the pieces of a batch do until all have run, and drop what failed pieces did."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Noted(Generic[Entry]):
    """An entry, the weight in means of the piece that made it, and the piece's samples."""

    entry: Entry
    weight: float
    samples: int


class PieceBuffer(Generic[Entry]):
    """The entries of one batch, piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[list[Noted[Entry]]] = []
        self._open: list[Entry] = []
        self.samples = 0  # of the pieces that succeeded

    @property
    def pieces(self) -> int:
        """How many pieces have succeeded."""
        return len(self._pieces)

    def add(self, entry: Entry) -> None:
        """Note an entry of the piece that runs."""
        self._open.append(entry)

    def keep(self, weight: float, samples: int = 0) -> None:
        """Keep the entries of a piece that succeeded, of this weight in means."""
        self._pieces.append([Noted(entry, weight, samples) for entry in self._open])
        self.samples += samples
        self._open = []

    def drop(self, *, from_start: bool = False) -> None:
        """Drop the entries of a piece that failed; ``from_start`` those of the pieces before, too."""
        self._open = []
        if from_start:
            self._pieces, self.samples = [], 0

    def alike(self, key: Callable[[Entry], Hashable]) -> Iterable[list[Noted[Entry]]]:
        """Return entries that belong together: in each piece the first of a key, the second, and so on."""
        groups: dict[Hashable, list[Noted[Entry]]] = {}
        for piece in self._pieces:
            times: Counter[Hashable] = Counter()
            for noted in piece:
                name = key(noted.entry)
                times[name] += 1
                groups.setdefault((name, times[name]), []).append(noted)
        return groups.values()
