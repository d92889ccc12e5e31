"""Segments that grow; beside PyTorch's allocator they are run in ``tests/simulated_cuda``."""

from dataclasses import replace

from lightning_ga.memory.expandable import ExpandableSegments
from lightning_ga.memory.segments import MIB, SegmentRules
from lightning_ga.memory.trace import Segment

RULES = SegmentRules(expandable=True)


def test_a_segment_grows_by_pages_behind_what_is_free() -> None:
    """17 free MiB and a page of 20 hold 30; a budget must leave what a segment of its own would take."""
    segments = ExpandableSegments(RULES)
    blocks = [segments.allocate(3 * MIB), segments.allocate(30 * MIB)]
    assert segments.peaks == (33 * MIB, 40 * MIB, 50 * MIB)
    for block in blocks:
        segments.release(block)
    segments.allocate(38 * MIB)
    assert segments.reserved == 40 * MIB


def test_a_segment_grows_as_far_as_there_is_memory_where_no_share_of_it_was_set() -> None:
    segments = ExpandableSegments(replace(RULES, grows_freely=True))
    segments.allocate(3 * MIB)
    segments.allocate(30 * MIB)
    assert segments.peaks == (33 * MIB, 40 * MIB, 40 * MIB)


def test_small_blocks_have_a_segment_of_their_own() -> None:
    segments = ExpandableSegments(RULES)
    for _ in range(3):
        segments.allocate(MIB)
    assert segments.peaks == (3 * MIB, 4 * MIB, 4 * MIB)


def test_the_lowest_addresses_with_room_are_mapped() -> None:
    """Between two parts that were there before lie 20 MiB without memory: enough for one request, not for the other."""
    segments = ExpandableSegments(RULES)
    parts = [Segment(False, start * MIB, ((20 * MIB, 0),)) for start in (1000, 1040)]
    adopted = [segments.adopt(part, [True])[0].address for part in parts]
    found = [segments.allocate(size * MIB).address // MIB for size in (30, 15)]
    assert adopted == [1000 * MIB, 1040 * MIB]
    assert found == [1060, 1020]
