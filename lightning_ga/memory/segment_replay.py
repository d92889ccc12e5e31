"""Replay a recorded step in the books of a caching allocator. Pure."""

from collections.abc import Iterable

from lightning_ga.memory.expandable import ExpandableSegments
from lightning_ga.memory.segments import Block, Peaks, SegmentRules, Segments
from lightning_ga.memory.trace import MemoryTrace


def segments_of(rules: SegmentRules | None) -> Segments:
    """Return the empty books of an allocator with these settings."""
    return ExpandableSegments(rules) if rules is not None and rules.expandable else Segments(rules)


def replay_segments(sizes: Iterable[int], trace: MemoryTrace, rules: SegmentRules | None = None) -> Peaks:
    """Return the peaks of a stream with storages of these sizes, from an empty cache.

    If the segments before it are not known, what was alive before has segments of its own without holes.

    Examples:
        >>> from lightning_ga.memory.segments import MIB
        >>> replay_segments([0, 3 * MIB, 3 * MIB], MemoryTrace(1, (0, 1, 1), (0, 1, 2, ~1, ~2)))
        Peaks(allocated=6291456, reserved=20971520, needed=20971520)
    """
    held = list(sizes)
    segments = segments_of(rules)
    blocks: dict[int, Block] = {}
    for segment in trace.layout:
        # A storage that grows with the samples is elsewhere then, and its place is a hole.
        there = [n == 0 or (n > 0 and held[n] == trace.sizes[n]) for _, n in segment.blocks]
        adopted = segments.adopt(segment, there)
        blocks |= {n: block for (_, n), kept, block in zip(segment.blocks, there, adopted) if kept and n > 0}
    segments.reserve(held[0] - (trace.sizes[0] if trace.layout else 0))
    for event in trace.events:
        number = event if event >= 0 else ~event
        if number == 0 or held[number] == 0 or (event > 0 and number in blocks):
            continue
        if event > 0:
            blocks[number] = segments.allocate(held[number])
        else:
            segments.release(blocks.pop(number))
    return segments.peaks
