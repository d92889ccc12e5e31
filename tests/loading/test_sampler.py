"""Orders are functions of seed and epoch alone, and the window batch sampler cuts them."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_ga.loading.rebatch import read_loader
from lightning_ga.loading.sampler import (
    FromBatches,
    FromSampler,
    Order,
    Sequential,
    Shuffled,
    Stream,
    WindowBatchSampler,
    seeded,
)
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
    """Not on the random numbers used up, on other epochs drawn before, nor on the object that is asked."""
    spoil_random_numbers(1)
    first = list(ORDERS[way]().draw(3, seed=7)[0:SIZE])
    spoil_random_numbers(2)
    other = ORDERS[way]()
    other.draw(0, seed=7)
    assert list(other.draw(3, seed=7)[0:SIZE]) == first
    if way != "sequential":
        assert list(other.draw(4, seed=7)[0:SIZE]) != first


@pytest.mark.parametrize("way", ORDERS)
def test_drawing_an_order_uses_up_no_random_numbers(way: str) -> None:
    """Those of torch, NumPy and Python stay as they were."""
    spoil_random_numbers(1)
    before = [state() for state in GLOBAL]
    list(ORDERS[way]().draw(3, seed=7)[0:SIZE])
    for state, kept in zip(GLOBAL, before):
        assert np.array_equal(np.asarray(state(), dtype=object), np.asarray(kept, dtype=object))


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**64 - 1])
def test_any_seed_that_torch_gives_can_be_used(seed: int) -> None:
    """``torch.initial_seed()`` may be anything of 64 bits; NumPy takes 32 only."""
    for way in ORDERS.values():
        assert len(list(way().draw(2, seed=seed)[0:5])) == 5


def test_a_generator_of_the_users_own_is_kept() -> None:
    """Its seed decides and not the Trainer's; its state is put back; a shuffle follows it too."""
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    state = generator.get_state()
    order = FromSampler(weighted(generator), SIZE)
    assert order.draw(2, seed=1) == order.draw(2, seed=99)
    assert torch.equal(generator.get_state(), state)
    oracle = list(weighted(torch.Generator().manual_seed(5 + 2)))
    assert order.draw(2, seed=1) == oracle
    loader = DataLoader(range(SIZE), 2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    shuffled = read_loader(loader, world_size=1).order
    assert list(shuffled.draw(0, seed=1)[0:SIZE]) == list(shuffled.draw(0, seed=99)[0:SIZE])


def test_random_numbers_come_back_even_from_a_sampler_that_fails() -> None:
    """The state before is put back on any way out, also that of a generator that two samplers carry."""
    generator = torch.Generator().manual_seed(3)
    samplers = [RandomSampler(range(4), generator=generator) for _ in range(2)]
    before, own = torch.get_rng_state(), generator.get_state()
    with pytest.raises(ZeroDivisionError), seeded(1, 1, *samplers, None):
        torch.rand(3)
        torch.rand(3, generator=generator)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), own)


def test_a_custom_batch_sampler_is_drawn_once_an_epoch() -> None:
    """Its batches, joined, are the order; their sizes are known from the same drawing."""
    drawn = []

    class Own(BatchSampler):
        """Counts how often it is iterated."""

        def __iter__(self) -> Iterator[list[int]]:
            drawn.append(1)
            return super().__iter__()

    order = FromBatches(Own(RandomSampler(range(SIZE)), 5, drop_last=True))
    assert order.size == 0
    batches = order.batches(1, seed=4)
    assert order.draw(1, seed=4) == [index for batch in batches for index in batch]
    assert (order.size, len(drawn)) == (20, 1)
    order.draw(2, seed=4)
    assert len(drawn) == 2


def test_a_sampler_yields_nothing_until_it_is_armed() -> None:
    """And says its length from the moment it is planned; a stream without a length has none."""
    cut = WindowBatchSampler(Sequential(10), share=0, seed=1)
    with pytest.raises(TypeError, match="no len"):
        len(cut)
    plan = EpochPlan(RegularWindows(10, 4), 2, 2, 1)
    cut.arrange(0, plan, enabled=False)
    assert (len(cut), list(cut)) == (5, [])
    cut.arrange(0, plan, enabled=True)
    assert list(cut) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    stream = WindowBatchSampler(Stream(None), share=0, seed=1)
    stream.arrange(0, EpochPlan(RegularWindows(None, 4), 3, 2, 1), enabled=True)
    with pytest.raises(TypeError, match="unknown length"):
        len(stream)
    batches = iter(stream)
    assert [len(next(batches)) for _ in range(4)] == [2, 2, 2, 2]


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


def test_only_an_order_without_a_generator_of_its_own_draws_a_seed() -> None:
    """As torch's ``RandomSampler``: what training draws afterwards is what it would have drawn with that."""
    drawn = [order.draws_seed for order in (Shuffled(4), Shuffled(4, seed=1), Sequential(4), Stream(None))]
    assert drawn == [True, False, False, False]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        list(RandomSampler(range(4)))
        after = torch.get_rng_state()
        torch.manual_seed(0)
        cut = WindowBatchSampler(Shuffled(4), share=0, seed=1, draws=True)
        cut.arrange(0, EpochPlan(RegularWindows(4, 4), 2, 2, 1), enabled=True)
        list(cut)
        assert torch.equal(torch.get_rng_state(), after)


def test_the_samples_of_a_micro_batch_are_found_once_more() -> None:
    """Whatever has been iterated; of a stand-in too."""
    for share in range(2):
        cut = WindowBatchSampler(Shuffled(7), share=share, seed=1)
        cut.arrange(0, EpochPlan(RegularWindows(7, 4), 1, 2, 2), enabled=True)
        assert [cut.indices(index) for index in range(len(cut))] == list(cut)
        assert {type(index) for indices in cut for index in indices} == {int}  # datasets may look up in dictionaries
