"""Compute what a caching allocator reserves from the device for a stream of blocks: more than it allocates. Pure.

The limit of a device applies to what is reserved. Blocks are cut out of segments, and a segment is returned only when
it is free as a whole, so holes between blocks are reserved, too. The rules are those of the native allocators of CUDA
and XPU (``CUDACachingAllocator.cpp``, read in torch 2.11), for one stream. Of free blocks of one size the allocator
uses the one whose segment is the oldest, then the one with the lowest address (seen in torch 2.15). Segments from
before the stream are treated as older the lower they lie.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from lightning_ga.memory.trace import MemoryTrace, Segment, rounded_up

MIB = 2**20
ROUNDING = 512  # bytes that every block is rounded up to
SMALL = MIB  # blocks up to here come from segments of their own
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE = 10 * MIB  # blocks from here on have a segment each
SEGMENT_ROUNDING = 2 * MIB


class Peaks(NamedTuple):
    """Most bytes in blocks at once, and most bytes of the segments that hold them."""

    allocated: int
    reserved: int


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, and its neighbours there."""

    place: int  # bytes of the segment before it
    size: int
    small: bool
    age: int
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False

    def __post_init__(self) -> None:
        """Let the neighbours know the block."""
        if self.before is not None:
            self.before.after = self
        if self.after is not None:
            self.after.before = self


Entry = tuple[int, int, int, Block]  # a free block by its size, the age of its segment, and its place there


class Segments:
    """The blocks and segments of an allocator, simulated; ``allocated`` and ``reserved`` are their bytes now."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self.peaks = Peaks(0, 0)
        self._free: dict[bool, list[Entry]] = {True: [], False: []}  # the first that is large enough is taken
        self._ages = count()  # of segments

    def allocate(self, size: int) -> Block:
        """Allocate a block of at least ``size`` bytes."""
        size = max(ROUNDING, rounded_up(size, ROUNDING))
        small = size <= SMALL
        block = self._taken(size, small) or self._reserve(size, small)
        rest = block.size - size
        least = ROUNDING if small else SMALL + ROUNDING  # a smaller rest is not cut off
        if rest >= least:
            block.size = size
            self._track(Block(block.place + size, rest, small, block.age, before=block, after=block.after))
        self._count(allocated=block.size)
        return block

    def adopt(self, segment: Segment, held: Iterable[bool]) -> list[Block]:
        """Add an existing segment, some of whose blocks are allocated."""
        blocks: list[Block] = []
        last = None
        place = 0
        age = next(self._ages)
        for (size, _), is_held in zip(segment.blocks, held):
            block = last = Block(place, size, segment.small, age, before=last)
            blocks.append(block)
            place += size
            if is_held:
                self._count(allocated=size)
            else:
                self._track(block)
        self._count(reserved=place)
        return blocks

    def release(self, block: Block) -> None:
        """Release a block; free neighbours are joined to it."""
        self._count(allocated=-block.size)
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._untrack(neighbour)
                block.size += neighbour.size
                if neighbour is block.before:
                    block.place = neighbour.place
                    block.before = neighbour.before
                else:
                    block.after = neighbour.after
        block.__post_init__()
        self._track(block)

    def reserve(self, size: int) -> None:
        """Take ``size`` bytes of which no more is known, in segments without holes."""
        self._count(allocated=size, reserved=rounded_up(size, SEGMENT_ROUNDING))

    def _count(self, *, allocated: int = 0, reserved: int = 0) -> None:
        self.allocated += allocated
        self.reserved += reserved
        self.peaks = Peaks(max(self.peaks.allocated, self.allocated), max(self.peaks.reserved, self.reserved))

    def _taken(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        block = free[place][3]
        self._untrack(block)
        return block

    def _reserve(self, size: int, small: bool) -> Block:
        """Reserve a segment for a block, all of which is that block."""
        taken = SMALL_SEGMENT
        if not small:
            taken = LARGE_SEGMENT if size < LARGE else rounded_up(size, SEGMENT_ROUNDING)
        self._count(reserved=taken)
        return Block(0, taken, small, next(self._ages))

    def _track(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.age, block.place, block))

    def _untrack(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.age, block.place))]
        block.free = False


def replay_segments(sizes: Iterable[int], trace: MemoryTrace) -> Peaks:
    """Return the peaks of a stream with storages of these sizes, from an empty cache.

    If the segments before it are not known, what was alive before has segments of its own without holes.
    """
    held = list(sizes)
    segments = Segments()
    blocks: dict[int, Block] = {}
    for segment in trace.layout:
        # A storage that grows with the samples is elsewhere then, and its place is a hole.
        there = [n == 0 or (n > 0 and held[n] == trace.sizes[n]) for _, n in segment.blocks]
        adopted = segments.adopt(segment, there)
        for (_, number), kept, block in zip(segment.blocks, there, adopted):
            if kept and number > 0:
                blocks[number] = block
    segments.reserve(held[0] - trace.sizes[0] if trace.layout else held[0])
    for event in trace.events:
        number = max(event, ~event)
        if number == 0 or held[number] == 0 or (event > 0 and number in blocks):
            continue
        if event > 0:
            blocks[number] = segments.allocate(held[number])
        else:
            segments.release(blocks.pop(number))
    return segments.peaks
