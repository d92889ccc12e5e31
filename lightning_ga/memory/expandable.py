"""Segments that grow, as CUDA's allocator has them with ``expandable_segments:True``. Pure.

There is one segment for small and one for large blocks. Parts of its addresses have memory behind them, in pages
of 2 or 20 MiB; the others are unmapped, and a request that finds no free block has the lowest of them mapped
(``CUDACachingAllocator.cpp``, as of torch 2.11).
"""

from bisect import insort
from collections.abc import Iterable
from itertools import repeat

from lightning_ga.memory.segments import LARGE_SEGMENT, SMALL_SEGMENT, Block, SegmentRules, Segments, segment_size
from lightning_ga.memory.trace import Segment, rounded_up

_ENDLESS = 1 << 90  # addresses of a segment: sizes that are only predicted may be any


class ExpandableSegments(Segments):
    """Both segments: what is adopted are their mapped parts, by rising address."""

    def __init__(self, rules: SegmentRules) -> None:
        super().__init__(rules)
        self._ages = repeat(0)
        self._unmapped: dict[bool, list[Block]] = {True: [], False: []}  # by address

    def adopt(self, segment: Segment, held: Iterable[bool]) -> list[Block]:
        """Add a mapped part, some of whose blocks are allocated; one without blocks is where the segment begins."""
        before = self._end_before(segment)
        blocks = super().adopt(segment, held)
        if before is not None and blocks:
            before.after, blocks[0].before = blocks[0], before
        end = segment.address + sum(block.size for block in blocks)
        last = blocks[-1] if blocks else None
        self._leave_unmapped(Block(end, _ENDLESS - end, segment.small, 0, before=last))
        return blocks

    def _end_before(self, segment: Segment) -> Block | None:
        """Let the unmapped addresses after what was adopted before end where a segment begins."""
        parts = self._unmapped[segment.small]
        if not parts:
            return None
        parts[-1].size = segment.address - parts[-1].address
        return parts[-1] if parts[-1].size > 0 else parts.pop().before

    def _first(self, free: list[tuple[int, int, int]], size: int) -> int:
        """Pass by a block that can grow as long as the next one is smaller than what it can grow to."""
        place = super()._first(free, size)
        while place + 1 < len(free) and self._room_of(free[place + 1]) < self._room_of(free[place]):
            place += 1
        return place

    def _room_of(self, entry: tuple[int, int, int]) -> int:
        block = self._blocks[entry[2]]
        return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)

    def _reserve(self, size: int, small: bool) -> Block:
        """Map the lowest addresses that have room, and join them to a free block before them."""
        if not self._rules.grows_freely:
            self._count(needed=segment_size(size, small=small))
        if not self._unmapped[small]:
            self._leave_unmapped(Block(_ENDLESS * (1 if small else 2), _ENDLESS, small, 0))
        block = next(first for part in self._unmapped[small] if (first := _with_room(part, size)) is not None)
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
            address, rest = block.address + size, block.size - size
            self._leave_unmapped(Block(address, rest, block.small, 0, before=block, after=block.after))
        block.size, block.mapped = size, True
        self._count(reserved=size)
        return self._join(block)

    def _leave_unmapped(self, block: Block) -> None:
        block.mapped = False
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        insort(self._unmapped[block.small], block, key=lambda part: part.address)


def _with_room(part: Block, size: int) -> Block | None:
    """Return the block from which on ``size`` bytes are free or unmapped: the free one before ``part``, or itself."""
    first = part.before if part.before is not None and part.before.free else part
    room = 0
    block: Block | None = first
    while room < size and block is not None and (block.free or not block.mapped):
        room, block = room + block.size, block.after
    return first if room >= size else None
