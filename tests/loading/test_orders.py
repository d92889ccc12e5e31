"""Orders are functions of seed and epoch alone, and the window batch sampler cuts them."""

import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_ga.loading import orders
from lightning_ga.loading.orders import FromSampler, Order, Sequential, Shuffled
from lightning_ga.loading.sampler import listed
from lightning_ga.snapshot.user_objects import borrowed

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


class Changing:
    """One that counts its epochs as they end, yields another number than its len() says, and holds a generator."""

    def __init__(self, size: int, yields: int, *, copies: bool) -> None:
        self.size, self.yields, self.ended, self.log = size, yields, 0, [0]
        self.generator = np.random.default_rng(3)
        self.source = None if copies else (number for number in range(3))  # which cannot be copied

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.log = [*self.log, self.ended]
        yield from (self.generator.permutation(100) + 100 * self.ended).tolist()[: self.yields]
        self.ended += 1


def weighted(generator: torch.Generator | None = None) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i for i in range(SIZE)], SIZE, generator=generator)


ORDERS: dict[str, Callable[[int], Order]] = {
    "sequential": lambda seed: Sequential(SIZE),
    "shuffled": lambda seed: Shuffled(SIZE, seed),
    "weighted": lambda seed: FromSampler(weighted(), SIZE, seed=seed),
    "weighted, own generator": lambda seed: FromSampler(weighted(torch.Generator().manual_seed(5)), SIZE, seed=seed),
    "subset": lambda seed: FromSampler(SubsetRandomSampler(range(0, SIZE, 2)), SIZE // 2, seed=seed),
    "replacement": lambda seed: FromSampler(RandomSampler(range(SIZE), replacement=True), SIZE, seed=seed),
    "numpy": lambda seed: FromSampler(NumpySampler(), SIZE, seed=seed),
    "by epoch": lambda seed: FromSampler(ByEpoch(), SIZE, seed=seed),
}


def spoil_random_numbers(by: int) -> None:
    torch.manual_seed(by)
    np.random.seed(by)
    random.seed(by)


@pytest.mark.parametrize("way", ORDERS)
def test_an_order_depends_on_seed_and_epoch_alone(way: str) -> None:
    """Not on the random numbers used up, on other epochs drawn before, nor on the object that is asked; any seed.

    None are used up, either.
    """
    spoil_random_numbers(1)
    before = [state() for state in GLOBAL]
    first = list(ORDERS[way](7).draw(3)[0:SIZE])
    for state, kept in zip(GLOBAL, before):
        assert np.array_equal(np.asarray(state(), dtype=object), np.asarray(kept, dtype=object))
    spoil_random_numbers(2)
    other = ORDERS[way](7)
    other.draw(0)
    assert list(other.draw(3)[0:SIZE]) == first
    if way != "sequential":
        assert list(other.draw(4)[0:SIZE]) != first
    for seed in (0, 2**63 - 1, 2**64 - 1):
        assert len(list(ORDERS[way](seed).draw(2)[0:5])) == 5


@pytest.mark.parametrize("copies", [True, False])
def test_looking_at_an_epoch_leaves_a_sampler_as_it_was(copies: bool) -> None:
    """In a copy, or put back where there is none; training draws from the sampler itself, which then moves on."""
    sampler = Changing(20, 20, copies=copies)
    order, drawn = FromSampler(sampler, seed=7), sampler.generator.bit_generator.state
    first = order.draw(0)
    assert (sampler.ended, sampler.log) == (0, [0])
    assert order.begin(0) == first
    assert sampler.ended == 1
    assert order.begin(0) == order.draw(0) == first  # also when the epoch goes on after an error
    assert sampler.ended == 1
    assert [number // 100 for number in order.begin(1)] == [1] * 20
    assert (sampler.ended, sampler.log) == (2, [0, 0, 1])
    assert sampler.generator.bit_generator.state == drawn


@pytest.mark.parametrize(
    ("size", "yields", "batch", "samples"), [(20, 17, 1, 17), (20, 24, 1, 20), (20, 30, 8, 24), (20, 22, 8, 22)]
)
def test_a_sampler_that_yields_another_number_than_its_length(size: int, yields: int, batch: int, samples: int) -> None:
    """As in stock Lightning, which counts batches by the length: what is there is trained on, up to that many."""
    order = FromSampler(Changing(size, yields, copies=True), seed=7, batch=batch)
    assert order.size(0) == len(order.draw(0)) == samples


def orders_that_change() -> dict[str, tuple[Any, Order]]:
    """What has a length that changes, and the order of it."""
    changing, shuffled, doubled, sampler = [*range(8)], [*range(8)], [*range(8)], Changing(8, 100, copies=True)
    return {
        "sequential": (changing, Sequential(changing.__len__)),
        "shuffled": (shuffled, Shuffled(shuffled.__len__, seed=3)),
        "multiple": (doubled, Shuffled(doubled.__len__, 7, multiple=2)),
        "sampler": (sampler, FromSampler(sampler, seed=7)),
    }


def resize(data: Any, length: int) -> None:
    if isinstance(data, Changing):
        data.size = length
    else:
        data[:] = range(length)


@pytest.mark.parametrize("kind", orders_that_change())
@pytest.mark.parametrize("lengths", [(8, 5, 11), (8, 13, 4)])
def test_an_epoch_has_the_samples_that_are_there_as_it_begins(kind: str, lengths: tuple[int, ...]) -> None:
    """Later changes wait for the next epoch, also if the epoch begins again after an error; others may be asked for."""
    data, order = orders_that_change()[kind]
    order.size(2)  # as for the number of optimizer steps
    for epoch, length in enumerate(lengths):
        resize(data, length)
        expected = length - length % 2 if kind == "multiple" else length
        assert order.size(epoch) == expected
        begun = listed(order.begin(epoch))
        if kind != "sampler":
            assert sorted(begun) == [*range(length)]
        for other in (length + 3, length - 3, length):
            resize(data, other)
            assert order.size(len(lengths)) == (other - other % 2 if kind == "multiple" else other)
            assert order.size(epoch) == expected
            assert listed(order.draw(epoch)) == listed(order.begin(epoch)) == begun


def test_the_length_is_not_asked_for_each_sample() -> None:
    """It may take a query of a database."""
    asked: list[int] = []

    def length() -> int:
        asked.append(1000)
        return 1000

    for order in (Sequential(length), Shuffled(length, 7)):
        drawn = order.begin(0)
        assert len([int(drawn[place]) for place in range(1000)]) == 1000
        order.begin(0)
        order.size(0)
        assert len(asked) == 1
        asked.clear()


@pytest.mark.parametrize("copies", [True, False])
def test_a_look_at_other_epochs_leaves_the_epoch_that_runs(copies: bool) -> None:
    """``optimizer_steps()`` may be asked in mid-epoch, and then memory runs out: the epoch goes on in its order."""
    sampler = Changing(20, 20, copies=copies)
    order = FromSampler(sampler, seed=7)
    for epoch in range(2):
        begun = [*order.begin(epoch)]
        for other in range(4):
            assert order.size(other) == 20
        assert order.draw(epoch) == order.begin(epoch) == begun
        assert sampler.ended == epoch + 1
        assert [*order.draw(epoch + 1)] != begun


def test_datasets_that_a_sampler_holds_are_not_copied() -> None:
    class Data(Dataset[int]):
        def __deepcopy__(self, memo: Any) -> Any:
            raise MemoryError

    class OfData(NumpySampler):
        def __init__(self) -> None:
            self.data, self.rows = Data(), listed

    listed = [Data()]
    sampler = OfData()
    with borrowed(sampler, listed) as lent:
        assert lent is not sampler
        assert lent.data is sampler.data
        assert lent.rows is listed


class Locked(NumpySampler):
    """Cannot be copied, and counts its epochs in a dictionary and in the dataset."""

    def __init__(self, data: Any) -> None:
        self.lock, self.state, self.data = threading.Lock(), {"epoch": 0}, data


def test_what_cannot_be_copied_or_is_shared_is_put_back() -> None:
    data = SimpleNamespace(epoch=0)
    sampler = Locked(data)
    with borrowed(sampler, data) as lent:
        assert lent is sampler
        sampler.state["epoch"] += 1
        data.epoch += 1
    assert (sampler.state, data.epoch) == ({"epoch": 0}, 0)


def test_indices_in_tensors_are_plain_numbers() -> None:
    """Samples are known by them: two tensors of one number are not the same."""
    assert listed(iter(torch.tensor([2, 0, 1]))) == [2, 0, 1]
    assert {*map(type, listed(iter(torch.tensor([2, 0, 1]))))} == {int}
    assert listed(["a", (1, 2)]) == ["a", (1, 2)]


class Hashed:
    """Yields keys of 64 bits, in another order each time."""

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        keys = [2**63 + number for number in range(32)]
        random.SystemRandom().shuffle(keys)
        return iter(keys)


def test_an_order_of_keys_that_are_too_large_is_not_kept() -> None:
    order = FromSampler(Hashed(), seed=0)
    order.begin(0)
    assert order.changes(1)
    assert order.kept() is None


class Unseeded(NumpySampler):
    """Holds a generator of the operating system, which has no state."""

    def __init__(self) -> None:
        super().__init__()
        self.source = random.SystemRandom()


def test_a_generator_without_a_state_is_left_alone() -> None:
    assert sorted(FromSampler(Unseeded(), seed=0).draw(0)) == sorted(NumpySampler())


def test_long_lists_of_numbers_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, in Python, a million takes seconds in each epoch."""
    monkeypatch.setattr(orders, "same_values", lambda *_: pytest.fail("they are compared one by one"))
    order = FromSampler(SubsetRandomSampler(range(0, 2000, 2)), seed=0)
    assert not order.changes(0)
    monkeypatch.undo()
    arrays = FromSampler([np.arange(2), np.arange(3)], seed=0)
    assert not arrays.changes(0)
