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


def test_where_larger_is_always_faster_the_limit_is_taken() -> None:
    best, calls = found(lambda samples: 1 + 0.1 * samples, share=64, limit=64)
    assert (best, calls) == (64, [64, 32, 16, 8])


def test_where_nothing_is_gained_any_more_a_smaller_one_is_taken() -> None:
    """A pass takes a second up to 10 samples and grows in proportion from there on."""
    best, calls = found(lambda samples: max(1.0, 0.1 * samples), share=1000, limit=100)
    assert 10 <= best <= 17
    assert len(calls) == len(set(calls)) <= 9


def test_where_caches_overflow_the_limit_is_not_the_best() -> None:
    best, _ = found(lambda samples: 0.5 + 0.1 * samples * (1 if samples <= 64 else 1.4), share=1024, limit=1024)
    assert 50 <= best <= 64  # 57 takes 2 % longer


def test_a_slow_optimizer_step_favours_neither() -> None:
    """It is taken once a window, whatever the factor: sizes within 3 % of the whole window count as fast."""
    best, _ = found(lambda samples: 1 + 0.1 * samples, share=64, limit=64, step=100.0)
    assert best < 64


@pytest.mark.parametrize(("share", "limit"), [(1, 1), (1, 8), (2, 2), (3, 2), (5, 4), (7, 100), (64, 1)])
def test_small_windows(share: int, limit: int) -> None:
    best, calls = found(lambda samples: 1.0, share=share, limit=limit)
    assert 1 <= best <= min(share, limit)
    assert max(calls) <= limit
    assert min(calls) >= min(2, limit, share)
