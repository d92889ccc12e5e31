"""Compute what a caching allocator reserves from the device for a stream of blocks: more than it allocates. Pure.

The limit of a device holds for what is reserved. Blocks are cut out of segments, and a segment is
returned only when it is free as a whole, so holes between blocks count too. The rules are those of the
native allocators of CUDA and XPU (``CUDACachingAllocator.cpp``, read in torch 2.11), for one stream. Of free
blocks of one size the allocator takes the one whose segment is the oldest, then the one with the lowest address
(seen in torch 2.15). Segments from before the stream are taken to be as old as their addresses are low, and a new
one to lie in the lowest gap that is large enough.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from lightning_ga.memory.trace import MemoryTrace, Segment

KIB, MIB = 2**10, 2**20
ROUNDING = 512  # bytes that every block is rounded up to
SMALL = MIB  # blocks up to here come from segments of their own
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
LARGE = 10 * MIB  # blocks from here on have a segment each
SEGMENT_ROUNDING = 2 * MIB


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """Settings by which an allocator cuts blocks out of segments; the defaults are its own.

    Attributes:
        max_split_size: Blocks of so many bytes and more are given out whole, to requests that are about as large;
            ``None`` splits all.
        divisions: Into how many equal steps the sizes between two powers of two are rounded up
            (``roundup_power2_divisions``): below 2 MiB, 4 MiB, and so on, the last for all above; 0 for 512 bytes.
    """

    max_split_size: int | None = None
    divisions: tuple[int, ...] = ()

    def rounded(self, size: int) -> int:
        """Return the bytes of a block for a request.

        Examples:
            >>> SegmentRules(divisions=(4,)).rounded(1200 * KIB) // KIB
            1280
        """
        floor = size.bit_length() - 1
        steps = self.divisions[min(max(floor - 20, 0), len(self.divisions) - 1)] if self.divisions else 0
        if steps > 1 and size > ROUNDING * steps:
            return _up(size, max(1, 2**floor >> (steps.bit_length() - 1)))
        return max(ROUNDING, _up(size, ROUNDING))

    def may_split(self, size: int) -> bool:
        """Return whether a block for a large request of so many bytes may be cut."""
        return self.max_split_size is None or size < self.max_split_size

    def may_take(self, size: int, free: int) -> bool:
        """Return whether a free block of ``free`` bytes may serve a request of ``size``."""
        if self.max_split_size is None:
            return True
        if size < self.max_split_size:
            return free < self.max_split_size
        return free < size + LARGE_SEGMENT  # ``max_non_split_rounding_mb``


class Peaks(NamedTuple):
    """Most bytes in blocks at once, and bytes of the segments that hold them."""

    allocated: int
    reserved: int


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, and its neighbours there."""

    address: int
    size: int
    small: bool
    age: int
    before: "_Block | None" = None
    after: "_Block | None" = None
    free: bool = False


class Segments:
    """The blocks and segments of an allocator, simulated.

    Args:
        rules: Its settings, if not the default.

    Attributes:
        allocated: Bytes in allocated blocks.
        reserved: Bytes of all segments.
    """

    def __init__(self, rules: SegmentRules | None = None) -> None:
        self._rules = rules or SegmentRules()
        self.allocated = self.reserved = 0
        # Free blocks by (size, age of the segment, address): the first that is large enough is taken.
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self._ages = count()  # of segments
        self._blocks: dict[int, _Block] = {}  # the free ones, by address
        self._spans: list[tuple[int, int]] = []  # of all segments: first address, and first after it

    def allocate(self, size: int) -> _Block:
        """Allocate a block of at least ``size`` bytes."""
        size = self._rules.rounded(size)
        small = size <= SMALL
        block = self._taken(size, small) or self._reserve(size, small)
        rest = block.size - size
        if rest >= ROUNDING if small else rest > SMALL and self._rules.may_split(size):
            self._split(block, size)
        self.allocated += block.size
        return block

    def adopt(self, segment: Segment, held: Iterable[bool]) -> list[_Block]:
        """Add an existing segment, some of whose blocks are allocated."""
        blocks: list[_Block] = []
        address, age = segment.address, next(self._ages)
        for (size, _), is_held in zip(segment.blocks, held):
            block = _Block(address, size, segment.small, age, before=blocks[-1] if blocks else None)
            if block.before is not None:
                block.before.after = block
            blocks.append(block)
            address += size
            if is_held:
                self.allocated += size
            else:
                self._track(block)
        self.reserved += address - segment.address
        insort(self._spans, (segment.address, address))
        return blocks

    def release(self, block: _Block) -> None:
        """Release a block; free neighbours are joined to it."""
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._untrack(neighbour)
                block.size += neighbour.size
                if neighbour is block.before:
                    block.address, block.before = neighbour.address, neighbour.before
                else:
                    block.after = neighbour.after
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        self._track(block)

    def _taken(self, size: int, small: bool) -> _Block | None:
        free = self._free[small]
        place = bisect_left(free, (size, -1))
        if place == len(free) or not self._rules.may_take(size, free[place][0]):
            return None
        block = self._blocks[free[place][2]]
        self._untrack(block)
        return block

    def _reserve(self, size: int, small: bool) -> _Block:
        large = LARGE_SEGMENT if size < LARGE else _up(size, SEGMENT_ROUNDING)
        taken = SMALL_SEGMENT if small else large
        block = _Block(self._gap(taken), taken, small, next(self._ages))
        insort(self._spans, (block.address, block.address + taken))
        self.reserved += taken
        return block

    def _gap(self, size: int) -> int:
        """Return the lowest address with so much room behind it."""
        place = self._spans[0][0] if self._spans else 0
        for start, end in self._spans:
            if start - place >= size:
                break
            place = end
        return place

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.small, block.age, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        self._track(rest)

    def _track(self, block: _Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._free[block.small], (block.size, block.age, block.address))

    def _untrack(self, block: _Block) -> None:
        del self._blocks[block.address]
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.age, block.address))]
        block.free = False


def replay_segments(
    sizes: Iterable[int],
    trace: MemoryTrace,
    rules: SegmentRules | None = None,
) -> Peaks:
    """Return the peaks of a stream with storages of these sizes, from an empty cache.

    Args:
        sizes: Bytes of each storage.
        trace: The stream, and the segments before it. Where these are not known, what was alive before
            has segments of its own without holes.
        rules: The allocator's settings, if not the default.

    Examples:
        >>> replay_segments([0, 3 * MIB, 3 * MIB], MemoryTrace(1, (0, 1, 1), (0, 1, 2, ~1, ~2)))
        Peaks(allocated=6291456, reserved=20971520)
    """
    held = list(sizes)
    segments = Segments(rules)
    blocks: dict[int, _Block] = {}
    for segment in trace.layout:
        # A storage that grows with the samples is elsewhere then, and its place is a hole.
        there = [n == 0 or (n > 0 and held[n] == trace.sizes[n]) for _, n in segment.blocks]
        adopted = segments.adopt(segment, there)
        blocks |= {n: block for (_, n), kept, block in zip(segment.blocks, there, adopted) if kept and n > 0}
    known = trace.sizes[0] if trace.layout else 0
    segments.allocated += held[0] - known
    segments.reserved += _up(held[0] - known, SEGMENT_ROUNDING)
    peak = segments.allocated
    for event in trace.events:
        number = event if event >= 0 else ~event
        if number == 0 or held[number] == 0 or (event > 0 and number in blocks):
            continue
        if event > 0:
            blocks[number] = segments.allocate(held[number])
            peak = max(peak, segments.allocated)
        else:
            segments.release(blocks.pop(number))
    return Peaks(peak, segments.reserved)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
