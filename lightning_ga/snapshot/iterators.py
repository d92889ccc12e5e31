"""Iterators that a step reads (``next(self.batches)``): what trials take of them, training gets all the same.

Generators and the iterators of loaders cannot be copied, and copies of others share what they read.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


class LentIterator:
    """An iterator of which items are kept once they are read; each of its loans begins with these."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._read = source, list[Any]()

    def loan(self) -> Iterator[Any]:
        """Return an iterator that begins where the source was when it was lent."""
        position = 0
        while True:
            if position == len(self._read):
                try:
                    self._read.append(next(self._source))
                except StopIteration:
                    return
            yield self._read[position]
            position += 1

    def given_back(self) -> Iterator[Any]:
        """Return the source, behind what was read of it."""
        return chain(self._read.copy(), self._source) if self._read else self._source


def lent(value: Any) -> Any:
    """Return an iterator as one that can be lent; any other value, and an iterator of the user's own, as it is."""
    is_plain = hasattr(value, "__next__") and not hasattr(value, "__dict__")
    return LentIterator(value) if is_plain or isinstance(value, _BaseDataLoaderIter) else value


def given_back(value: Any) -> Any:
    """Return a lent iterator, behind what was read of it; any other value as it is."""
    return value.given_back() if isinstance(value, LentIterator) else value
