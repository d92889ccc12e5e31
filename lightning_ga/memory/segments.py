"""Compute what a caching allocator reserves from the device for a stream of blocks: more than it allocates. Pure.

The limit of a device applies to what is reserved. Blocks are cut out of segments, and a segment is returned only when
it is free as a whole, so holes between blocks are reserved, too. The rules are those of the native allocators of CUDA
and XPU (``CUDACachingAllocator.cpp``, read in torch 2.11), for one stream. Of free blocks of one size the allocator
uses the one whose segment is the oldest, then the one with the lowest address (seen in torch 2.15). Segments from
before the stream are treated as older the lower they lie; a new one goes into the lowest gap that is large enough.

With ``expandable_segments:True`` there is one segment for small and one for large blocks, and they grow. Parts of its
addresses have memory behind them, in pages of 2 or 20 MiB; the others are unmapped, and a request that finds no free
block has the lowest of them mapped.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, repeat
from typing import NamedTuple

from lightning_ga.memory.trace import MemoryTrace, Segment, rounded_up

KIB = 2**10
MIB = 2**20
ROUNDING = 512  # bytes that every block is rounded up to
SMALL = MIB  # blocks up to here come from segments of their own
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE = 10 * MIB  # blocks from here on have a segment each
SEGMENT_ROUNDING = 2 * MIB
_ENDLESS = 1 << 90  # addresses of a segment that grows: sizes that are only predicted may be any


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """Settings by which an allocator cuts blocks out of segments; the defaults are its own. Others are not known."""

    expandable: bool = False  # whether segments grow (``expandable_segments``)
    # Whether a segment grows while there is memory. In a process that may reserve a share of the device only, it grows
    # only if a whole new one would fit, too.
    grows_freely: bool = False


def segment_size(size: int, *, small: bool) -> int:
    """Return the bytes of the segment that is reserved for a block of ``size`` bytes."""
    if small:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else rounded_up(size, SEGMENT_ROUNDING)


class Peaks(NamedTuple):
    """Most bytes in blocks at once, bytes of the segments that hold them, and bytes that a budget must leave for that.

    Within a share of the device the allocator refuses a segment that grows unless a whole new one would fit, too.
    """

    allocated: int
    reserved: int
    needed: int


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, and its neighbours there."""

    address: int
    size: int
    small: bool
    age: int
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False
    mapped: bool = True

    def __post_init__(self) -> None:
        """Let the neighbours know the block."""
        if self.before is not None:
            self.before.after = self
        if self.after is not None:
            self.after.before = self


Entry = tuple[int, int, int, Block]  # a free block by its size, the age of its segment, and its address


class Segments:
    """The blocks and segments of an allocator, simulated; ``allocated`` and ``reserved`` are their bytes now."""

    _splits_large_to_the_end = False

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self.peaks = Peaks(0, 0, 0)
        self._free: dict[bool, list[Entry]] = {True: [], False: []}  # the first that is large enough is taken
        self._ages: Iterator[int] = count()  # of segments
        self._spans: list[tuple[int, int]] = []  # of all segments: first address, and first after it

    def allocate(self, size: int) -> Block:
        """Allocate a block of at least ``size`` bytes."""
        size = max(ROUNDING, rounded_up(size, ROUNDING))
        small = size <= SMALL
        block = self._taken(size, small) or self._reserve(size, small)
        rest = block.size - size
        least = ROUNDING if small or self._splits_large_to_the_end else SMALL + ROUNDING  # else it is not cut off
        if rest >= least:
            block.size = size
            self._track(Block(block.address + size, rest, small, block.age, before=block, after=block.after))
        self._count(allocated=block.size)
        return block

    def adopt(self, segment: Segment, held: Iterable[bool]) -> list[Block]:
        """Add an existing segment, some of whose blocks are allocated."""
        blocks: list[Block] = []
        last = None
        address = segment.address
        age = next(self._ages)
        for (size, _), is_held in zip(segment.blocks, held):
            block = last = Block(address, size, segment.small, age, before=last)
            blocks.append(block)
            address += size
            if is_held:
                self._count(allocated=size)
            else:
                self._track(block)
        self._count(reserved=address - segment.address)
        insort(self._spans, (segment.address, address))
        return blocks

    def release(self, block: Block) -> None:
        """Release a block; free neighbours are joined to it."""
        self._count(allocated=-block.size)
        self._join(block)

    def reserve(self, size: int) -> None:
        """Take ``size`` bytes of which no more is known, in segments without holes."""
        self._count(allocated=size, reserved=rounded_up(size, SEGMENT_ROUNDING))

    def _count(self, *, allocated: int = 0, reserved: int = 0, needed: int = 0) -> None:
        """Change what is taken; ``needed`` are bytes demanded at that moment beyond what was reserved before."""
        needed += self.reserved
        self.allocated += allocated
        self.reserved += reserved
        now = self.allocated, self.reserved, max(self.reserved, needed)
        self.peaks = Peaks(*map(max, self.peaks, now))

    def _taken(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        place = self._first(free, size)
        if place == len(free):
            return None
        block = free[place][3]
        self._untrack(block)
        return block

    def _first(self, free: list[Entry], size: int) -> int:
        """Return the place of the free block that is looked at for a request."""
        return bisect_left(free, (size, -1))

    def _reserve(self, size: int, small: bool) -> Block:
        taken = segment_size(size, small=small)
        block = Block(self._gap(taken), taken, small, next(self._ages))
        insort(self._spans, (block.address, block.address + taken))
        self._count(reserved=taken)
        return block

    def _gap(self, size: int) -> int:
        """Return the lowest address with so much room behind it."""
        place = None
        for start, end in self._spans:
            if place is not None and start - place >= size:
                break
            place = end
        return place or 0

    def _join(self, block: Block) -> Block:
        """Make a block free; free neighbours are joined to it."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._untrack(neighbour)
                block.size += neighbour.size
                if neighbour is block.before:
                    block.address = neighbour.address
                    block.before = neighbour.before
                else:
                    block.after = neighbour.after
        block.__post_init__()
        self._track(block)
        return block

    def _track(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.age, block.address, block))

    def _untrack(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.age, block.address))]
        block.free = False


class ExpandableSegments(Segments):
    """The two segments that grow: what is adopted are their mapped parts, by rising address."""

    _splits_large_to_the_end = True

    def __init__(self, *, grows_freely: bool) -> None:
        super().__init__()
        self._grows_freely = grows_freely
        self._ages = repeat(0)
        self._unmapped: dict[bool, list[Block]] = {True: [], False: []}  # by address

    def adopt(self, segment: Segment, held: Iterable[bool]) -> list[Block]:
        """Add a mapped part, some of whose blocks are allocated; one without blocks is where the segment begins."""
        before = self._end_before(segment)
        blocks = super().adopt(segment, held)
        if before is not None and blocks:
            before.after = blocks[0]
            blocks[0].before = before
        last = None
        end = segment.address
        if blocks:
            last = blocks[-1]
            end = last.address + last.size
        self._leave_unmapped(Block(end, _ENDLESS - end, segment.small, 0, before=last))
        return blocks

    def _end_before(self, segment: Segment) -> Block | None:
        """Let the unmapped addresses after what was adopted before end where a segment begins."""
        parts = self._unmapped[segment.small]
        if not parts:
            return None
        last = parts[-1]
        last.size = segment.address - last.address
        return last if last.size > 0 else parts.pop().before

    def _first(self, free: list[Entry], size: int) -> int:
        """Pass by a block that can grow as long as the next one is smaller than what it can grow to."""
        place = super()._first(free, size)
        while place + 1 < len(free) and self._room_of(free[place + 1]) < self._room_of(free[place]):
            place += 1
        return place

    def _room_of(self, entry: Entry) -> int:
        block = entry[3]
        if block.after is None or block.after.mapped:
            return block.size
        return block.size + block.after.size

    def _reserve(self, size: int, small: bool) -> Block:
        """Map the lowest addresses that have room, and join them to a free block before them."""
        if not self._grows_freely:
            self._count(needed=segment_size(size, small=small))
        if not self._unmapped[small]:
            self._leave_unmapped(Block(_ENDLESS * (2 - small), _ENDLESS, small, 0))
        block = next(filter(None, (_with_room(part, size) for part in self._unmapped[small])))
        if not block.mapped:
            block = self._map(block, size)
        while block.size < size:
            assert block.after is not None
            block = self._map(block.after, size - block.size)
        self._untrack(block)
        return block

    def _map(self, block: Block, size: int) -> Block:
        """Put memory behind the first ``size`` bytes of an unmapped block; return the free block they are in then."""
        size = min(block.size, rounded_up(size, SMALL_SEGMENT if block.small else LARGE_SEGMENT))
        self._unmapped[block.small].remove(block)
        if size < block.size:
            address = block.address + size
            rest = block.size - size
            self._leave_unmapped(Block(address, rest, block.small, 0, before=block, after=block.after))
        block.size = size
        block.mapped = True
        self._count(reserved=size)
        return self._join(block)

    def _leave_unmapped(self, block: Block) -> None:
        block.mapped = False
        insort(self._unmapped[block.small], block, key=lambda part: part.address)


def _with_room(part: Block, size: int) -> Block | None:
    """Return the block from which on ``size`` bytes are free or unmapped: the free one before ``part``, or itself."""
    first = part
    if part.before is not None and part.before.free:
        first = part.before
    room = 0
    block: Block | None = first
    while room < size and block is not None and (block.free or not block.mapped):
        room += block.size
        block = block.after
    return first if room >= size else None


def segments_of(rules: SegmentRules | None) -> Segments:
    """Return the empty books of an allocator with these settings."""
    if rules is None or not rules.expandable:
        return Segments()
    return ExpandableSegments(grows_freely=rules.grows_freely)


def replay_segments(sizes: Iterable[int], trace: MemoryTrace, rules: SegmentRules | None = None) -> Peaks:
    """Return the peaks of a stream with storages of these sizes, from an empty cache.

    If the segments before it are not known, what was alive before has segments of its own without holes.
    """
    held = list(sizes)
    segments = segments_of(rules)
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
