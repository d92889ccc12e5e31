"""Choose what trains fastest within the limit, from timings.

The largest micro-batch is often not the fastest: caches overflow. Past some size nothing is gained either, and a
smaller one leaves memory for other work. Pure: timings come in as a function.
"""

from collections.abc import Callable, Iterable

from lightning_ga.plan.accumulation import ceil_div, micro_batch_sizes, split_share, usable_multiple
from lightning_ga.plan.records import Timing

SLOWER = 1.03  # times the best window: as fast
_HOPELESS = 1.5  # times the best window: smaller micro-batches are even slower
_REFINEMENTS = 3


def time_windows(
    pass_seconds: Callable[[int], float], step_seconds: float, *, rank_samples: int, limit: int, multiple: int = 1
) -> tuple[Timing, ...]:
    """Time a window at several micro-batches up to the limit, in rising order; they are multiples if so many fit.

    Halves the micro-batch from the limit on until windows take half as long again as the best, then
    looks between the smallest that is as fast as the best and the next smaller one.
    """
    timings: dict[int, Timing] = {}

    def time(factor: int) -> float:
        if factor not in timings:
            size = split_share(rank_samples, factor, multiple)[0]
            timings[factor] = Timing(size, factor, factor * pass_seconds(size) + step_seconds)
        return timings[factor].seconds

    multiple = usable_multiple(multiple, limit)
    factor = len(micro_batch_sizes(rank_samples, limit, multiple))
    least = max(2, multiple)
    while time(factor) <= _HOPELESS * _best(timings.values()) and ceil_div(rank_samples, 2 * factor) >= least:
        factor *= 2
    for _ in range(_REFINEMENTS):
        fast = SLOWER * _best(timings.values())
        low = max(factor for factor, timing in timings.items() if timing.seconds <= fast)
        high = min((factor for factor in timings if factor > low), default=low)
        if high - low < 2:
            break
        time((low + high) // 2)
    falling = [timings[factor] for factor in sorted(timings, reverse=True)]
    by_size = {timing.micro_batch_size: timing for timing in falling}  # of several, that with the fewest passes
    return tuple(by_size.values())


def fastest(timings: tuple[Timing, ...]) -> int:
    """Return the smallest micro-batch whose window takes at most 3 % longer than the best."""
    return min(timing.micro_batch_size for timing in timings if timing.seconds <= SLOWER * _best(timings))


def _best(timings: Iterable[Timing]) -> float:
    return min(timing.seconds for timing in timings)
