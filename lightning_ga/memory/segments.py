"""Compute what a caching allocator reserves from the device for a stream of blocks: more than it allocates. Pure.

The limit of a device holds for what is reserved. Blocks are cut out of segments, and a segment is returned only when it
is free as a whole, so holes between blocks count too. The rules are those of the native allocators of CUDA and XPU
(``CUDACachingAllocator.cpp``, read in torch 2.11), for one stream. Of free blocks of one size the allocator takes the
one whose segment is the oldest, then the one with the lowest address (seen in torch 2.15). Segments from before the
stream are taken to be as old as their addresses are low, and a new one to lie in the lowest gap that is large enough.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from lightning_ga.memory.trace import Segment, rounded_up

KIB, MIB = 2**10, 2**20
ROUNDING = 512  # bytes that every block is rounded up to
SMALL = MIB  # blocks up to here come from segments of their own
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
LARGE = 10 * MIB  # blocks from here on have a segment each
SEGMENT_ROUNDING = 2 * MIB


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """Settings by which an allocator cuts blocks out of segments; the defaults are its own."""

    # Blocks of so many bytes and more are given out whole, to requests that are about as large, and returned to the
    # device if memory is short; ``None`` splits all.
    max_split_size: int | None = None
    # Into how many equal steps the sizes between two powers of two are rounded up (``roundup_power2_divisions``):
    # below 2 MiB, 4 MiB, and so on, the last for all above; 0 for 512 bytes.
    divisions: tuple[int, ...] = ()
    expandable: bool = False  # whether segments grow (``expandable_segments``)
    # Share of ``budget`` above which blocks that have long been free are returned (``garbage_collection_threshold``).
    collection: float = 0.0
    budget: int | None = None  # bytes that all segments may take
    # Whether a segment grows as far as there is memory. If the process may reserve a share of the device only, it does
    # not: it grows only if a whole new one would fit, too.
    grows_freely: bool = False

    def rounded(self, size: int) -> int:
        """Return the bytes of a block for a request.

        Examples:
            >>> SegmentRules(divisions=(4,)).rounded(1200 * KIB) // KIB
            1280
        """
        floor = size.bit_length() - 1
        steps = self.divisions[min(max(floor - 20, 0), len(self.divisions) - 1)] if self.divisions else 0
        if steps > 1 and size > ROUNDING * steps:
            return rounded_up(size, max(1, 2**floor >> (steps.bit_length() - 1)))
        return max(ROUNDING, rounded_up(size, ROUNDING))

    def may_split(self, size: int, rest: int, *, small: bool) -> bool:
        """Return whether a request of ``size`` bytes is cut out of a block, of which ``rest`` bytes remain."""
        if small or self.expandable:
            return rest >= ROUNDING
        return rest > SMALL and (self.max_split_size is None or size < self.max_split_size)

    def may_take(self, size: int, free: int) -> bool:
        """Return whether a free block of ``free`` bytes may serve a request of ``size``."""
        if self.max_split_size is None:
            return True
        if size < self.max_split_size:
            return free < self.max_split_size
        return free < size + LARGE_SEGMENT  # ``max_non_split_rounding_mb``


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
    """A part of a segment, and its neighbours there; ``freed`` counts the requests before it was last released."""

    address: int
    size: int
    small: bool
    age: int
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False
    mapped: bool = True
    freed: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is a segment by itself."""
        return self.before is None and self.after is None


class Segments:
    """The blocks and segments of an allocator, simulated; ``allocated`` and ``reserved`` are their bytes now."""

    def __init__(self, rules: SegmentRules | None = None) -> None:
        self._rules = rules or SegmentRules()
        self.allocated = self.reserved = 0
        self.peaks = Peaks(0, 0, 0)
        # Free blocks by (size, age of the segment, address): the first that is large enough is taken.
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self._ages: Iterator[int] = count()  # of segments
        self._requests = {True: 0, False: 0}
        self._blocks: dict[int, Block] = {}  # the free ones, by address
        self._spans: list[tuple[int, int]] = []  # of all segments: first address, and first after it

    def allocate(self, size: int) -> Block:
        """Allocate a block of at least ``size`` bytes."""
        size = self._rules.rounded(size)
        small = size <= SMALL
        block = self._taken(size, small) or self._reserve(size, small)
        if self._rules.may_split(size, block.size - size, small=small):
            self._split(block, size)
        self._count(allocated=block.size)
        return block

    def adopt(self, segment: Segment, held: Iterable[bool]) -> list[Block]:
        """Add an existing segment, some of whose blocks are allocated."""
        blocks: list[Block] = []
        address, age = segment.address, next(self._ages)
        for (size, _), is_held in zip(segment.blocks, held):
            block = Block(address, size, segment.small, age, before=blocks[-1] if blocks else None)
            if block.before is not None:
                block.before.after = block
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
        """Change what is taken; ``needed`` are bytes that the device had to have beside what was reserved before."""
        needed += self.reserved
        self.allocated += allocated
        self.reserved += reserved
        most = self.peaks
        self.peaks = Peaks(
            max(most.allocated, self.allocated),
            max(most.reserved, self.reserved),
            max(most.needed, self.reserved, needed),
        )

    def _taken(self, size: int, small: bool) -> Block | None:
        self._requests[small] += 1
        free = self._free[small]
        place = self._first(free, size)
        if place == len(free) or not self._rules.may_take(size, free[place][0]):
            return None
        block = self._blocks[free[place][2]]
        self._untrack(block)
        return block

    def _first(self, free: list[tuple[int, int, int]], size: int) -> int:
        """Return the place of the free block that is looked at for a request."""
        return bisect_left(free, (size, -1))

    def _reserve(self, size: int, small: bool) -> Block:
        taken = segment_size(size, small=small)
        self._collect()
        self._return_oversize(size, taken, small)
        block = Block(self._gap(taken), taken, small, next(self._ages))
        insort(self._spans, (block.address, block.address + taken))
        self._count(reserved=taken)
        return block

    def _gap(self, size: int) -> int:
        """Return the lowest address with so much room behind it."""
        place = self._spans[0][0] if self._spans else 0
        for start, end in self._spans:
            if start - place >= size:
                break
            place = end
        return place

    def _collect(self) -> None:
        """Return whole segments that were free for longer than the others (``garbage_collection_threshold``)."""
        budget, share = self._rules.budget, self._rules.collection
        surplus = self.reserved - int(share * budget) if share and budget is not None else 0
        if surplus <= 0:
            return
        whole = [block for *_, address in self._free[False] if (block := self._blocks[address]).is_whole]
        while surplus > 0 and whole:
            ages = {block.address: self._requests[False] - block.freed for block in whole}
            mean = sum(ages.values()) / len(ages)
            for block in whole:
                if ages[block.address] >= mean:
                    surplus -= block.size
                    self._return(block)
            whole = [block for block in whole if block.free]

    def _return_oversize(self, size: int, taken: int, small: bool) -> None:
        """Return free blocks that are given out whole, where the budget has no room left."""
        least, budget = self._rules.max_split_size, self._rules.budget
        if least is None or budget is None or self.reserved + taken <= budget:
            return
        wanted, free = max(size, least), self._free[small]
        place = bisect_left(free, (wanted, -1))
        if place < len(free):
            self._return(self._blocks[free[place][2]])
            return
        for each, _, address in reversed(free[bisect_left(free, (least, -1)) :]):
            if wanted > 0:
                wanted -= each
                self._return(self._blocks[address])
        if wanted > 0:  # the allocator does not look whether that was enough, and empties its cache
            self._count(needed=budget + 1 - self.reserved)

    def _return(self, block: Block) -> None:
        self._untrack(block)
        self._spans.remove((block.address, block.address + block.size))
        self._count(reserved=-block.size)

    def _join(self, block: Block) -> Block:
        """Make a block free; free neighbours are joined to it."""
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
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, block.age, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        self._track(rest)

    def _track(self, block: Block) -> None:
        block.free, block.freed = True, self._requests[block.small]
        self._blocks[block.address] = block
        insort(self._free[block.small], (block.size, block.age, block.address))

    def _untrack(self, block: Block) -> None:
        del self._blocks[block.address]
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.age, block.address))]
        block.free = False
