"""The computed order: every number once, and as random as one that is drawn."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ga.loading import sampler
from lightning_ga.loading.sampler import Permutation, Shuffled
from lightning_ga.testing import limit_memory

LARGE = [2**30, 10**9 + 7, 10**11 + 39]


def numbers(size: int, seed: int, start: int = 0, stop: int | None = None) -> list[int]:
    found: list[int] = Permutation(size, seed=seed)[start : size if stop is None else stop].tolist()
    return found


def surprise(cells: torch.Tensor, count: int) -> float:
    """How far a chi-square statistic of equally likely cells lies from its mean, in standard deviations."""
    counts, freedom = torch.bincount(cells, minlength=count), count - 1
    expected = counts.sum().double() / count
    return float(((counts - expected).square().sum() / expected - freedom) / (2 * freedom) ** 0.5)


@given(size=st.integers(1, 3000) | st.sampled_from([2**16, 255**2, 256 * 257, 100_003]), seed=st.integers(0, 2**62))
def test_every_number_comes_once(size: int, seed: int) -> None:
    """Whatever the size: squares, rectangles, primes and powers of two, too."""
    assert sorted(numbers(size, seed)) == list(range(size))


@pytest.mark.parametrize("size", LARGE)
def test_large_orders_repeat_no_number(size: int) -> None:
    found = numbers(size, 4, 0, 100_000) + numbers(size, 4, size - 100_000)
    assert len(set(found)) == 200_000
    assert 0 <= min(found) <= max(found) < size


@settings(max_examples=50)
@given(size=st.integers(1, 60), cut=st.slices(70))
def test_slices_are_those_of_a_list(size: int, cut: slice) -> None:
    assert Permutation(size, seed=3)[cut].tolist() == numbers(size, 3)[cut]


@pytest.mark.parametrize("size", [2, 3, 10, 13, 64])
def test_every_number_is_equally_likely_at_every_place(size: int) -> None:
    for place in zip(*(numbers(size, seed) for seed in range(1000))):
        assert surprise(torch.tensor(place), size) < 5


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("lag", [1, 2, 256, "width"])
def test_neighbours_tell_nothing_of_each_other(size: int, lag: int | str) -> None:
    apart = int(size**0.5) + 1 if lag == "width" else int(lag)
    order = Permutation(size, seed=1)
    first, second = order[:50_000], order[apart : 50_000 + apart]
    assert abs(float(torch.corrcoef(torch.stack([first, second]).double())[0, 1])) * 50_000**0.5 < 4
    assert abs(surprise(first * 20 // size * 20 + second * 20 // size, 400)) < 5
    assert abs(surprise((first - second) % size * 400 // size, 400)) < 5


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("read", [lambda found, size: found * 16 // size, lambda found, size: found % 16])
def test_every_window_comes_from_all_over_the_data_set(size: int, read: Callable[..., torch.Tensor]) -> None:
    order = Permutation(size, seed=2)
    found = [surprise(read(order[w * 2048 : (w + 1) * 2048], size), 16) for w in range(200)]
    assert max(found) < 8  # about the 1e-6 tail of chi-square with 15 degrees of freedom
    assert abs(sum(found)) / 200**0.5 < 4


def test_a_permutation_holds_little_memory() -> None:
    with limit_memory("3 MiB"):
        assert len(Permutation(10**9, seed=0)[10**8 : 10**8 + 256]) == 256


def test_only_orders_too_large_to_write_down_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LARGEST_WRITTEN_ORDER", 100)
    drawn = torch.randperm(100, generator=torch.Generator().manual_seed(9)).tolist()
    assert Shuffled(100).draw(2, 7)[0:100].tolist() == drawn
    assert Shuffled(101).draw(2, 7)[0:101].tolist() == numbers(101, 9)
    assert Shuffled(101, seed=5).draw(2, 7)[0:101].tolist() == numbers(101, 7)
