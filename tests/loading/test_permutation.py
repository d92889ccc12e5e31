"""The computed order: every number once, and as random as one that is drawn."""

from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ga.loading import sampler
from lightning_ga.loading.permutation import Permutation
from lightning_ga.loading.sampler import Shuffled, WindowBatchSampler
from lightning_ga.plan.windows import EpochPlan, RegularWindows
from lightning_ga.testing import limit_memory

LARGE = [10**9, 2**30, 10**12 + 39, 2**62 - 1]


def surprise(counts: torch.Tensor) -> float:
    """How far a chi-square statistic of equally likely cells lies from its mean, in standard deviations."""
    expected = counts.sum().double() / counts.numel()
    freedom = counts.numel() - 1
    return float(((counts - expected).square().sum() / expected - freedom) / (2 * freedom) ** 0.5)


def cells(numbers: Sequence[int], size: int, count: int) -> torch.Tensor:
    """In which of ``count`` equal parts of the data set each number lies."""
    return torch.tensor([number * count // size for number in numbers])


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0))
def test_every_number_comes_once(size: int, seed: int, epoch: int) -> None:
    """Whatever the size."""
    assert sorted(Permutation(size, seed=seed, epoch=epoch)[:]) == list(range(size))


def test_every_number_comes_once_at_sizes_on_the_edge() -> None:
    """All small sizes; squares, rectangles, primes, powers of two and their neighbours."""
    for size in [*range(1, 150), 2**16 - 1, 2**16, 2**16 + 1, 255**2, 256 * 257, 100_003]:
        assert sorted(Permutation(size, seed=3, epoch=1)[:]) == list(range(size))


@pytest.mark.parametrize("size", LARGE)
def test_large_orders_repeat_no_number(size: int) -> None:
    """As far as one can look."""
    order = Permutation(size, seed=3, epoch=1)
    assert len(order) == size
    numbers = order[:100_000] + order[size - 100_000 :]
    assert len(set(numbers)) == 200_000
    assert 0 <= min(numbers) <= max(numbers) < size


@pytest.mark.parametrize("size", [0, -1, 2**62])
def test_a_size_that_cannot_be_computed_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"size={size} must be at least 1 and below"):
        Permutation(size, seed=0, epoch=0)


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 60), cut=st.slices(70), place=st.integers(-70, 70))
def test_it_is_read_like_a_list(size: int, cut: slice, place: int) -> None:
    """Slices, single places, places from the end; all of them Python integers."""
    order = Permutation(size, seed=1, epoch=2)
    written = [order[i] for i in range(size)]
    assert order[cut] == written[cut]
    assert list(order) == written
    assert {type(number) for number in (*order[cut], order[0])} == {int}
    if -size <= place < size:
        assert order[place] == written[place]
    else:
        with pytest.raises(IndexError):
            order[place]


@pytest.mark.parametrize("size", [1000, *LARGE])
def test_every_seed_and_every_epoch_has_an_order_of_its_own(size: int) -> None:
    """Also seeds and epochs of the same sum, negative and very large seeds."""
    keys = [(1, 1), (2, 0), (0, 2), (1, 11), (11, 1), (-1, 1), (2**63, 0), (2**64, 0), (10**30, 1)]
    orders = [Permutation(size, seed=seed, epoch=epoch)[:20] for seed, epoch in keys]
    assert orders == [Permutation(size, seed=seed, epoch=epoch)[:20] for seed, epoch in keys]
    assert len(set(map(tuple, orders))) == len(keys)


def test_the_order_is_for_ever() -> None:
    """A checkpoint of today resumes on the same samples tomorrow, on any machine."""
    assert Permutation(10**9, seed=3, epoch=1)[:4] == [218984143, 432865336, 75690443, 467515672]


@pytest.mark.parametrize("size", [2, 3, 10, 13, 64])
def test_every_number_is_equally_likely_at_every_place(size: int) -> None:
    """Over seeds and over epochs."""
    for orders in (
        [Permutation(size, seed=seed, epoch=0)[:] for seed in range(1000)],
        [Permutation(size, seed=0, epoch=epoch)[:] for epoch in range(1000)],
    ):
        for numbers in zip(*orders):
            assert surprise(torch.bincount(torch.tensor(numbers), minlength=size)) < 5


def test_every_order_of_four_is_equally_likely() -> None:
    """Not only every place."""
    all_orders = {order: index for index, order in enumerate(permutations(range(4)))}
    seen = torch.tensor([all_orders[tuple(Permutation(4, seed=seed, epoch=0))] for seed in range(2000)])
    assert surprise(torch.bincount(seen, minlength=24)) < 5


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("lag", [1, 2, 256, "width"])
def test_neighbours_tell_nothing_of_each_other(size: int, lag: int | str) -> None:
    """Neither by correlation, nor in a table of pairs, nor by their distance."""
    order = Permutation(size, seed=1, epoch=0)
    apart = int(size**0.5) + 1 if lag == "width" else int(lag)
    first, second = order[:50_000], order[apart : 50_000 + apart]
    pairs = torch.stack([cells(first, size, 1 << 20), cells(second, size, 1 << 20)]).double()
    assert abs(float(torch.corrcoef(pairs)[0, 1])) * 50_000**0.5 < 4
    table = cells(first, size, 20) * 20 + cells(second, size, 20)
    assert abs(surprise(torch.bincount(table, minlength=400))) < 5
    distances = [(a - b) % size for a, b in zip(first, second)]
    assert abs(surprise(torch.bincount(cells(distances, size, 400), minlength=400))) < 5


@pytest.mark.parametrize("size", LARGE)
def test_every_window_comes_from_all_over_the_data_set(size: int) -> None:
    """Windows of 2048 samples: in 16 parts of the data set, and in 16 residues, as a drawn order has them."""
    order = Permutation(size, seed=2, epoch=5)
    for read in (lambda numbers: cells(numbers, size, 16), lambda numbers: torch.tensor(numbers) % 16):
        found = [surprise(torch.bincount(read(order[w * 2048 : (w + 1) * 2048]), minlength=16)) for w in range(200)]
        assert max(found) < 8  # about the 1e-6 tail of chi-square with 15 degrees of freedom
        assert abs(sum(found)) / 200**0.5 < 4


def test_a_permutation_holds_no_memory() -> None:
    """A trillion samples: only the slice that is read."""
    with limit_memory("64 kB"):
        numbers = Shuffled(10**12).draw(0, 0)[10**11 : 10**11 + 256]
    assert len(numbers) == 256


def test_only_orders_too_large_to_write_down_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the bound an order is that of torch's ``DistributedSampler``."""
    monkeypatch.setattr(sampler, "LARGEST_WRITTEN_ORDER", 100)
    drawn = torch.randperm(100, generator=torch.Generator().manual_seed(9)).tolist()
    assert list(Shuffled(100).draw(2, 7)[0:100]) == drawn
    assert Shuffled(101).draw(2, 7)[0:101] == Permutation(101, seed=7, epoch=2)[:]
    assert Shuffled(101, seed=5).draw(2, 7)[0:101] == Permutation(101, seed=5, epoch=2)[:]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_window_sampler_cuts_it_like_any_order(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of Python integers; the ranks together yield the whole order."""
    monkeypatch.setattr(sampler, "LARGEST_WRITTEN_ORDER", 0)
    batches = []
    for rank in range(ranks):
        mine = WindowBatchSampler(Shuffled(1000), share=rank, seed=7)
        mine.plan, mine.enabled = (
            EpochPlan(RegularWindows(1000, 48), 5, factor=-(-48 // (5 * ranks)), world_size=ranks),
            True,
        )
        mine.set_epoch(4)
        batches += list(mine)
    assert all(type(batch) is list and all(type(index) is int for index in batch) for batch in batches)
    assert sorted(index for batch in batches for index in batch) == list(range(1000))
    assert batches[0] == Permutation(1000, seed=7, epoch=4)[: len(batches[0])]
