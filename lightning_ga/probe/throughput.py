"""Find the smallest micro-batch that trains as fast as the best one, from timed passes.

The largest micro-batch is often not the fastest: caches overflow. Past some size nothing is gained
either, and a smaller one leaves memory for other work. Pure: what is timed comes in as a function.
"""

from collections.abc import Callable

from lightning_ga.plan.records import Timing

SLOWER = 1.03  # times the best window: as fast
_HOPELESS = 1.5  # times the best window: what is smaller only gets slower
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
    while time(factor) <= _HOPELESS * _best(timings) and -(-rank_samples // (2 * factor)) >= 2:
        factor *= 2
    for _ in range(_REFINEMENTS):
        within = [f for f, timing in timings.items() if timing.seconds <= SLOWER * _best(timings)]
        low, high = max(within), min((f for f in timings if f > max(within)), default=max(within))
        if high - low < 2:
            break
        time((low + high) // 2)
    unique = {timing.micro_batch_size: timing for _, timing in sorted(timings.items(), reverse=True)}
    return tuple(sorted(unique.values(), key=lambda timing: timing.micro_batch_size))


def fastest(timings: tuple[Timing, ...]) -> int:
    """Return the smallest micro-batch whose window takes at most 3 % longer than the best."""
    best = min(timing.seconds for timing in timings)
    return min(timing.micro_batch_size for timing in timings if timing.seconds <= SLOWER * best)


def _best(timings: dict[int, Timing]) -> float:
    return min(timing.seconds for timing in timings.values())
