"""Orders are functions of seed and epoch alone, and the window batch sampler cuts them."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_ga.errors import UserError
from lightning_ga.loading.sampler import FromBatches, FromSampler, Order, Sequential, Shuffled, WindowBatchSampler
from lightning_ga.plan.windows import EpochPlan, RegularWindows

SIZE = 24
GLOBAL = (torch.get_rng_state, lambda: np.random.get_state()[1], random.getstate)


class NumpySampler:
    """A sampler of the user's own that draws from NumPy and Python."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(SIZE).tolist()
        random.shuffle(order)
        return iter(order)


class ByEpoch(NumpySampler):
    """One that wants to be told the epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(place + self.epoch) % SIZE for place in range(SIZE)])


class Changing(NumpySampler):
    """One that has another length in each epoch."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.epoch = lengths, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.lengths[self.epoch]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


def weighted(generator: torch.Generator | None = None) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i for i in range(SIZE)], SIZE, generator=generator)


ORDERS: dict[str, Callable[[], Order]] = {
    "sequential": lambda: Sequential(SIZE),
    "shuffled": lambda: Shuffled(SIZE),
    "weighted": lambda: FromSampler(weighted(), SIZE),
    "weighted, own generator": lambda: FromSampler(weighted(torch.Generator().manual_seed(5)), SIZE),
    "subset": lambda: FromSampler(SubsetRandomSampler(range(0, SIZE, 2)), SIZE // 2),
    "replacement": lambda: FromSampler(RandomSampler(range(SIZE), replacement=True), SIZE),
    "numpy": lambda: FromSampler(NumpySampler(), SIZE),
    "by epoch": lambda: FromSampler(ByEpoch(), SIZE),
    "batches": lambda: FromBatches(BatchSampler(NumpySampler(), 5, drop_last=False)),
    "batches, own generator": lambda: FromBatches(
        BatchSampler(weighted(torch.Generator().manual_seed(5)), 5, drop_last=False)
    ),
}


def spoil_random_numbers(by: int) -> None:
    torch.manual_seed(by)
    np.random.seed(by)
    random.seed(by)


@pytest.mark.parametrize("way", ORDERS)
def test_an_order_depends_on_seed_and_epoch_alone(way: str) -> None:
    """Not on the random numbers used up, on other epochs drawn before, nor on the object that is asked; any seed."""
    spoil_random_numbers(1)
    first = list(ORDERS[way]().draw(3, seed=7)[0:SIZE])
    spoil_random_numbers(2)
    other = ORDERS[way]()
    other.draw(0, seed=7)
    assert list(other.draw(3, seed=7)[0:SIZE]) == first
    if way != "sequential":
        assert list(other.draw(4, seed=7)[0:SIZE]) != first
    for seed in (0, 2**63 - 1, 2**64 - 1):
        assert len(list(other.draw(2, seed=seed)[0:5])) == 5


@pytest.mark.parametrize("way", ORDERS)
def test_drawing_an_order_uses_up_no_random_numbers(way: str) -> None:
    spoil_random_numbers(1)
    before = [state() for state in GLOBAL]
    list(ORDERS[way]().draw(3, seed=7)[0:SIZE])
    for state, kept in zip(GLOBAL, before):
        assert np.array_equal(np.asarray(state(), dtype=object), np.asarray(kept, dtype=object))


@pytest.mark.parametrize("own", [False, True])
def test_seeds_of_data_workers_are_drawn_once_for_each_iteration(own: bool) -> None:
    """From the loader's generator or the global one; an iteration that yielded nothing gives its seed back."""
    generator = torch.Generator() if own else None
    cut = WindowBatchSampler(Sequential(4), share=0, seed=1, generator=generator)
    assert cut.take_seed_back() is None

    def seed(drawn_from: torch.Generator | None) -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=drawn_from).item())

    with torch.random.fork_rng():
        assert list(cut) == []
        first = seed(generator)
        assert list(cut) == []
        assert seed(generator) != first
        again = cut.take_seed_back()
        assert seed(again) == first
        assert cut.take_seed_back() is None
        cut.arrange(0, EpochPlan(RegularWindows(4, 4), 2, 2, 1), enabled=True)
        assert list(cut) == [[0, 1], [2, 3]]
        assert cut.take_seed_back() is None


def test_a_sampler_that_changes_its_length_is_told() -> None:
    """Epochs are cut for the length that it had at first."""
    order = FromSampler(Changing(20, 24, 16), 20)
    assert list(order.begin(0, 0)) == list(range(20))
    with pytest.warns(UserWarning, match="has 24 samples in epoch 1, and had 20"):
        assert list(order.begin(1, 0)) == list(range(20))
    with pytest.raises(UserError, match="yields 16 samples in epoch 2, and its len.. was 20"):
        order.begin(2, 0)


def test_samplers_of_torch_say_what_they_draw_from() -> None:
    """Without drawing: with replacement an epoch meets some of these only."""
    assert FromSampler(RandomSampler(range(9), replacement=True, num_samples=4), 4).pool(0, 0) == range(9)
    assert FromSampler(WeightedRandomSampler([0.0, 1.0, 2.0], 8), 8).pool(0, 0) == [1, 2]
