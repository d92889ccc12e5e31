"""Streams that can be read ahead of training, which still gets every item, and loaders that save their position."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

_END = object()
MOST = 64  # items that are held


def length_of(data: Any) -> int | None:
    """Return the length of a dataset; ``None`` if that is not known."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # as Lightning asks
        return None


class PeekableStream(IterableDataset[Any]):
    """A stream that can be read ahead, started once per epoch, as its source may continue where it was left.

    Other attributes are looked up at the dataset that it stands for, ``of``.
    """

    def __init__(self, start: Callable[[], Iterator[Any]], length: int | None = None, of: Any = None) -> None:
        self._start, self._length, self._of = start, length, of
        self._waiting: Iterator[Any] | None = None
        self._peeked: list[Any] = []
        self._begun = False

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("a stream of unknown length has no len()")
        return self._length

    def peek(self, most: int) -> list[Any]:
        """Return the first items of the next epoch, which still yields them; none once training reads the stream."""
        if self._begun:
            return []
        waiting = self._started()
        while len(self._peeked) < min(most, MOST) and (item := next(waiting, _END)) is not _END:
            self._peeked.append(item)
        return self._peeked[:most]

    def peeked(self) -> Iterator[Any]:
        """Yield these items one by one, reading each when it is asked for."""
        number = 0
        while len(self.peek(number + 1)) > number:
            yield self._peeked[number]
            number += 1

    def __iter__(self) -> Iterator[Any]:
        self._started()
        return self._read()

    def _started(self) -> Iterator[Any]:
        self._waiting = self._start() if self._waiting is None else self._waiting
        return self._waiting

    def _read(self) -> Iterator[Any]:
        items = self._started()
        peeked, self._peeked, self._waiting, self._begun = self._peeked, [], None, True
        while peeked:
            yield peeked.pop(0)
        yield from items

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._of is None:
            raise AttributeError(name)
        return getattr(self._of, name)


class WholeBatches(IterableDataset[Any]):
    """A stream without the incomplete batch of ``size`` samples at its end, which its loader drops.

    It stands for its dataset where data workers inspect that: all other attributes are the dataset's.
    """

    def __init__(self, dataset: Any, size: int) -> None:
        vars(self).update(_of=dataset, _size=size)

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._of)
        while len(batch := list(islice(samples, self._size))) == self._size:
            yield from batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_of" not in vars(self):
            raise AttributeError(name)
        return getattr(self._of, name)

    def __len__(self) -> int:
        return len(self._of)

    def __reduce__(self) -> Any:
        return WholeBatches, (self._of, self._size)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._of) if "_of" in vars(self) else WholeBatches

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of, name, value)


def keeps_place(loader: Any) -> bool:
    """Return whether a loader saves and restores its position."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
