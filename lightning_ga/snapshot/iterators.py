"""Iterators that a step reads (``next(self.batches)``): what trials take of them, training gets all the same.

Generators and the iterators of loaders cannot be copied, and copies of others share what they read.
"""

from collections.abc import Iterator
from itertools import chain, count, islice
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


class LentIterator:
    """An iterator of which items are kept once they are read; each of its loans begins with these."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source, self.read = source, list[Any]()

    def loan(self) -> Iterator[Any]:
        """Yield what the source does from where it was when it was lent."""
        for position in count():
            if position == len(self.read):
                self.read.extend(islice(self.source, 1))
            if position == len(self.read):
                return
            yield self.read[position]


def lent(value: Any) -> Any:
    """Return an iterator as one that can be lent; any other value, and an object of another class, as it is."""
    is_plain = hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools")
    return LentIterator(value) if is_plain or isinstance(value, _BaseDataLoaderIter) else value


def given_back(value: Any) -> Any:
    """Return a lent iterator, with what was read of it before all else; any other value as it is."""
    if not isinstance(value, LentIterator):
        return value
    return chain(value.read.copy(), value.source) if value.read else value.source
