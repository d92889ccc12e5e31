"""Choose within the limit, from trials: what trains fastest, and the limits of micro-batches of unequal samples.

The largest micro-batch is often not the fastest: caches overflow. Past some size nothing is gained either, and a
smaller one leaves memory for other work.

The memory of ``b`` padded samples of size ``l`` is c + b·(γ + αl + βl²): activations, and attention matrices. Along
b·l = budget it is c + budget·(γ/l + α + βl), largest at an end: at the longest size, whose limit is known, or at a
shorter size, at which the samples that this budget allows are tried. Micro-batches of even shorter samples get no more
samples. If fewer fit at the shorter size, the memory of a sample, convex in ``l``, is bounded by the chord through both
limits: size + offset. Pure: trials and timings come in as functions.
"""

from collections.abc import Callable, Iterable, Sequence

from lightning_ga.plan.lengths import SizeLimits
from lightning_ga.plan.records import Timing

SLOWER = 1.03  # times the best window: as fast
_HOPELESS = 1.5  # times the best window: smaller micro-batches are even slower
_REFINEMENTS = 3


def time_windows(
    pass_seconds: Callable[[int], float], step_seconds: float, *, rank_samples: int, limit: int
) -> tuple[Timing, ...]:
    """Time a window at several micro-batches up to the limit, in rising order.

    Halves the micro-batch from the limit on until windows take half as long again as the best, then
    looks between the smallest that is as fast as the best and the next smaller one.
    """
    timings: dict[int, Timing] = {}

    def time(factor: int) -> float:
        if factor not in timings:
            size = -(-rank_samples // factor)
            timings[factor] = Timing(size, factor, factor * pass_seconds(size) + step_seconds)
        return timings[factor].seconds

    factor = -(-rank_samples // limit)
    while time(factor) <= _HOPELESS * _best(timings.values()) and -(-rank_samples // (2 * factor)) >= 2:
        factor *= 2
    for _ in range(_REFINEMENTS):
        within = [f for f, timing in timings.items() if timing.seconds <= SLOWER * _best(timings.values())]
        low = max(within)
        high = min((f for f in timings if f > max(within)), default=max(within))
        if high - low < 2:
            break
        time((low + high) // 2)
    unique = {timing.micro_batch_size: timing for _, timing in sorted(timings.items(), reverse=True)}
    return tuple(sorted(unique.values(), key=lambda timing: timing.micro_batch_size))


def fastest(timings: tuple[Timing, ...]) -> int:
    """Return the smallest micro-batch whose window takes at most 3 % longer than the best."""
    return min(timing.micro_batch_size for timing in timings if timing.seconds <= SLOWER * _best(timings))


def _best(timings: Iterable[Timing]) -> float:
    return min(timing.seconds for timing in timings)


_SHARES = (1.0, 0.75, 0.5)  # of the samples that the budget allows at the shorter size, tried in turn


def limits_by_size(
    confirm: Callable[[Sequence[int]], tuple[int, int]], limit: int, *, longest: int, shorter: int, high: int
) -> tuple[SizeLimits, int]:
    """Return the limits for micro-batches, of which ``limit`` samples fit at the longest, and the steps run so far.

    ``confirm`` returns the first of some numbers of samples of the shorter size that fits, or 0, and those steps;
    ``high`` is the most samples that are of use.

    Examples:
        >>> limits_by_size(lambda sizes: (sizes[1], 6), 8, longest=400, shorter=50, high=256)
        (SizeLimits(budget=3360, samples=48, offset=20), 6)
    """
    most = min(high, -(-limit * longest // shorter))
    fits, steps = (most, 0) if most <= limit else confirm([int(share * most) for share in _SHARES])
    fits = max(limit, fits)
    offset = 0
    if limit < fits < most:
        offset = max(0, -(-(limit * longest - fits * shorter) // (fits - limit)))
    return SizeLimits(limit * (longest + offset), fits, offset), steps
