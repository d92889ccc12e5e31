"""The record of one training step: its allocations and releases in order, and the most bytes alive at once.

Tested in tests/probe/test_peak_prediction.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import neg
from typing import NamedTuple

from lightning_ga.plan.accumulation import ceil_div


class Segment(NamedTuple):
    """A part of the device's memory that a caching allocator cuts into blocks, ``(bytes, storage)`` in order.

    Storage 0 is what outlives the step, -1 a hole.
    """

    small: bool
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """The stream of allocations and releases of one training step.

    Examples:
        >>> MemoryTrace(samples=2, sizes=(100, 8, 16), events=(0, 1, 2, ~1, ~2)).peak()
        124
    """

    samples: int  # of the micro-batch
    sizes: tuple[int, ...]  # bytes of each storage, before rounding; the first is all that outlived the step
    events: tuple[int, ...]  # ``n`` allocates, ``~n`` releases; releases in a row are sorted: that changes no peak
    marks: tuple[int, ...] = ()  # places in ``events`` at which a phase ends, such as before the optimizer's step
    layout: tuple[Segment, ...] = ()  # a caching allocator's segments before the step, if they are known
    addresses: tuple[int, ...] = ()  # of storages; 0 or nothing if it is not known
    handed_out: tuple[int, ...] = ()  # blocks that an allocator had handed out in the step when each tensor was there

    def peak(self, rounding: int = 1) -> int:
        """Return the most bytes alive at once, every storage rounded up to a multiple of ``rounding`` bytes."""
        return replay(self.sizes, self.events, rounding)

    def phase_peaks(self, rounding: int = 1) -> tuple[int, ...]:
        """Return the most bytes alive at once in each phase: one more than there are marks."""
        alive = bytes_alive(self.sizes, self.events, rounding)
        bounds = [0, *self.marks, len(self.events)]
        return tuple(max(alive[max(start - 1, 0) : end], default=0) for start, end in pairwise(bounds))

    def kept_bytes(self, rounding: int = 1) -> int:
        """Return the bytes that are alive after the step."""
        return bytes_alive(self.sizes, self.events, rounding)[-1]

    def transient_peak(self, rounding: int = 1) -> int:
        """Return the most bytes alive at once among storages that the step makes and releases: these can grow."""
        released = {~event for event in self.events if event < 0}
        return replay(self.sizes, [event for event in self.events if event < 0 or event in released], rounding)


class Stream:
    """The allocations and releases of a step so far."""

    def __init__(self, alive: int) -> None:
        self.events: list[int] = []
        self._alive = alive  # bytes since the start
        self._older: list[int] = []  # storages that were alive at the start and died since
        self._storages = [(0, 0, 0)]  # of each number: bytes, address, and blocks that an allocator had handed out

    def allocate(self, size: int, address: int = 0, handed_out: int = 0) -> int:
        """Add a storage; return its number."""
        number = len(self._storages)
        self._storages.append((size, address, handed_out))
        self.events.append(number)
        return number

    def release_older(self, size: int, taken: int) -> int:
        """Release a storage that was there before, of which ``taken`` bytes counted; return its number."""
        number = len(self._storages)
        self._storages.append((size, 0, 0))
        self._older.append(number)
        self._alive -= taken
        self.events.append(~number)
        return number

    def trace(self, samples: int, marks: Iterable[int] = ()) -> MemoryTrace:
        """Return the stream of a step of so many samples: what was there before is allocated at its start."""
        sizes, addresses, handed_out = zip(*self._storages)
        before = 1 + len(self._older)
        return MemoryTrace(
            samples,
            sizes=(self._alive, *sizes[1:]),
            events=canonical([0, *self._older, *self.events]),
            marks=tuple(before + mark for mark in marks),
            addresses=addresses,
            handed_out=handed_out,
        )


def replay(sizes: Iterable[int], events: Iterable[int], rounding: int = 1) -> int:
    """Return the most bytes alive at once; the arguments are those of ``bytes_alive``."""
    return max(bytes_alive(sizes, events, rounding), default=0)


def bytes_alive(sizes: Iterable[int], events: Iterable[int], rounding: int = 1) -> list[int]:
    """Return the bytes alive after each event."""
    changes = list(sizes)
    if rounding > 1:
        changes = [rounded_up(size, rounding) for size in changes]
    changes += map(neg, reversed(changes[:]))  # so that index ~n holds the release of storage n
    return list(accumulate(map(changes.__getitem__, events)))


def rounded_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than ``size``."""
    return ceil_div(size, multiple) * multiple


def canonical(events: Iterable[int]) -> tuple[int, ...]:
    """Return the events with every run of releases sorted."""
    ordered: list[int] = []
    for are_releases, group in groupby(events, key=lambda event: event < 0):
        run = list(group)
        ordered += sorted(run) if are_releases else run
    return tuple(ordered)
