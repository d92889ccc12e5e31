"""The rules by which a caching allocator of CUDA or XPU cuts blocks out of segments. Pure."""

from dataclasses import dataclass

from lightning_ga.memory.trace import rounded_up

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
    # Whether a segment grows as far as there is memory; if not, only if a whole new one would fit, too.
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
