"""The smallest micro-batch that is as fast as the best, on made-up clocks."""

from collections.abc import Callable

import pytest

from lightning_ga.probe.throughput import fastest, time_windows


def found(seconds: Callable[[int], float], *, share: int, limit: int, step: float = 0.0) -> tuple[int, list[int]]:
    calls: list[int] = []

    def clock(samples: int) -> float:
        calls.append(samples)
        return seconds(samples)

    timings = time_windows(clock, step, rank_samples=share, limit=limit)
    assert [timing.micro_batch_size for timing in timings] == sorted(set(calls))
    assert all(timing.micro_batch_size == -(-share // timing.factor) for timing in timings)
    assert all(timing.seconds == timing.factor * seconds(timing.micro_batch_size) + step for timing in timings)
    return fastest(timings), calls


@pytest.mark.parametrize(
    ("seconds", "share", "limit", "step", "best", "most_calls"),
    [
        pytest.param(lambda n: 1 + 0.1 * n, 64, 64, 0.0, (64, 64), 4, id="larger is always faster"),
        pytest.param(lambda n: max(1.0, 0.1 * n), 1000, 100, 0.0, (10, 17), 9, id="nothing is gained beyond 10"),
        pytest.param(lambda n: 0.5 + 0.1 * n * (1 if n <= 64 else 1.4), 1024, 1024, 0.0, (50, 64), 11, id="caches"),
        pytest.param(lambda n: 1 + 0.1 * n, 64, 64, 100.0, (1, 63), 9, id="a slow optimizer step favours neither"),
    ],
)
def test_the_smallest_size_that_is_as_fast_as_the_best_is_taken(seconds, share, limit, step, best, most_calls):
    size, calls = found(seconds, share=share, limit=limit, step=step)
    assert best[0] <= size <= best[1]
    assert len(calls) == len(set(calls)) <= most_calls
