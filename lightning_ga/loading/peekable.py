"""Read a stream ahead of training, which still gets every item."""

from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

_END = object()
MOST = 64  # items that are held


class PeekableStream(IterableDataset[Any]):
    """A stream that can be read ahead, started once per epoch, as its source may continue where it was left.

    Args:
        start: Starts the stream.
        of: The dataset that it stands for, if any: other attributes are looked up there.
    """

    def __init__(self, start: Callable[[], Iterator[Any]], of: Any = None) -> None:
        self._start, self._of = start, of
        self._waiting: Iterator[Any] | None = None
        self._peeked: list[Any] = []
        self._begun = False

    def peek(self, most: int) -> list[Any]:
        """Return the first items of the next epoch, which still yields them; none once training reads the stream."""
        if self._begun:
            return []
        self._waiting = self._start() if self._waiting is None else self._waiting
        while len(self._peeked) < min(most, MOST) and (item := next(self._waiting, _END)) is not _END:
            self._peeked.append(item)
        return self._peeked[:most]

    def peeked(self) -> Iterator[Any]:
        """Yield these items one by one, reading each when it is asked for."""
        number = 0
        while len(self.peek(number + 1)) > number:
            yield self._peeked[number]
            number += 1

    def __iter__(self) -> Iterator[Any]:
        self._waiting = self._start() if self._waiting is None else self._waiting
        return self._read()

    def _read(self) -> Iterator[Any]:
        items = self._start() if self._waiting is None else self._waiting
        peeked, self._peeked, self._waiting, self._begun = self._peeked, [], None, True
        while peeked:
            yield peeked.pop(0)
        yield from items

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._of is None:
            raise AttributeError(name)
        return getattr(self._of, name)


class WholeBatches(IterableDataset[Any]):
    """A stream without the incomplete batch at its end, which its loader drops.

    It stands for its dataset where data workers inspect that: all other attributes are the dataset's.

    Args:
        dataset: The stream.
        size: Samples of a batch.
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

    def __reduce__(self) -> Any:
        return whole_batches, (self._of, self._size)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._of) if "_of" in vars(self) else WholeBatches

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of, name, value)


class _SizedWholeBatches(WholeBatches):
    """A ``WholeBatches`` with a length."""

    def __len__(self) -> int:
        return len(self._of)


def whole_batches(dataset: Any, size: int) -> WholeBatches:
    """Return a stream without the incomplete batch of less than ``size`` samples at its end."""
    return (_SizedWholeBatches if isinstance(dataset, Sized) else WholeBatches)(dataset, size)


class _Sized(PeekableStream):
    """A ``PeekableStream`` with a length."""

    def __init__(self, start: Callable[[], Iterator[Any]], length: int, of: Any = None) -> None:
        super().__init__(start, of)
        self._length = length

    def __len__(self) -> int:
        return self._length


def peekable_stream(start: Callable[[], Iterator[Any]], length: int | None, of: Any = None) -> PeekableStream:
    """Return a stream that can be read ahead.

    Args:
        start: Starts the stream.
        length: Items of the stream; ``None`` if that is not known.
        of: The dataset that it stands for, if any.
    """
    return PeekableStream(start, of) if length is None else _Sized(start, length, of)
