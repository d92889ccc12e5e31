"""A loader of any make is read and copied with other batches, and is itself left alone."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from reference import SizedStreamOf, StreamOf
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ga.loading.orders import Sequential
from lightning_ga.loading.rebatch import SourceSettings, read_order, rebatch, why_in_step
from lightning_ga.loading.sampler import WindowBatchSampler
from lightning_ga.plan.windows import EpochPlan, RegularWindows

SIZE = 11


class AtOnce(list[int]):
    """Fetches all samples of a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return list(indices)


class FixedArguments(DataLoader[int]):
    """A constructor that takes nothing of what DataLoader takes."""

    def __init__(self, flavour: str) -> None:
        super().__init__(range(SIZE), batch_size=3, shuffle=False)
        self.flavour = flavour


class Doubling(DataLoader[int]):
    """Changes what it yields, and computes its length in its own way."""

    def __iter__(self) -> Any:
        return (batch * 2 for batch in super().__iter__())

    def __len__(self) -> int:
        return 1000


class OwnBatches(BatchSampler):
    """A batch sampler of the user's own."""


def collate(samples: list[int]) -> dict[str, torch.Tensor]:
    return {"n": torch.tensor(samples)}


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "keywords": lambda: DataLoader(range(SIZE), batch_size=3),
    "positions": lambda: DataLoader(range(SIZE), 3, False, None, None, 0, collate),
    "fetched at once": lambda: DataLoader(AtOnce(range(SIZE)), 3),
    "subclass with arguments of its own": lambda: FixedArguments("sour"),
    "sampler": lambda: DataLoader(range(SIZE), 3, sampler=list(range(SIZE))),
    "persistent workers": lambda: DataLoader(range(SIZE), 3, num_workers=1, persistent_workers=True, prefetch_factor=4),
}


def settings_of(world_size: int = 1, **settings: Any) -> SourceSettings:
    return SourceSettings(1, world_size, 0, 7, **settings)


def armed(loader: DataLoader[Any], *, start: int = 0) -> WindowBatchSampler:
    """Windows of 4 in micro-batches of 2, of the order that was read off the loader."""
    order = read_order(loader, settings_of())
    assert order is not None
    cut = WindowBatchSampler(order, rank=0)
    cut.arrange(0, EpochPlan(RegularWindows(SIZE, 4), 2), start=start, enabled=True)
    return cut


def numbers(batches: Any) -> list[list[int]]:
    return [(batch["n"] if isinstance(batch, dict) else batch).tolist() for batch in batches]


@pytest.mark.parametrize("way", LOADERS)
def test_any_loader_is_cut_anew_and_left_alone(way: str) -> None:
    """Its copy yields the micro-batches, made in its own way; the user's loader is what it was."""
    loader = LOADERS[way]()
    before, kind = dict(vars(loader)), type(loader)
    whole = numbers(LOADERS[way]())
    copied = rebatch(loader, sampler := armed(loader))
    expected = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    assert len(copied) == 6
    assert numbers(copied) == expected
    assert sampler.plan is not None
    sampler.arrange(0, sampler.plan, start=1, enabled=True)  # data workers go on, or begin again
    assert numbers(copied) == expected[2:]
    running = iter(copied)
    assert next(running) is not None
    sampler.arrange(0, replace(sampler.plan, micro_batch=1), start=2, enabled=True)  # in the middle, as after an error
    assert numbers(copied) == [[8], [9], [10]]
    assert isinstance(copied, kind)
    assert type(loader) is kind
    assert vars(loader).keys() == before.keys()
    assert all(vars(loader)[name] is value for name, value in before.items() if not name.startswith("__pl_"))
    assert numbers(loader) == whole


class LastFirst(Dataset[int]):
    """The first sample waits until another worker has made a batch, and has begun the next."""

    def __init__(self) -> None:
        self.is_read = torch.multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 6:
            self.is_read.set()
        assert index or self.is_read.wait(60)
        return index


def test_micro_batches_come_in_the_order_of_the_plan() -> None:
    """Also with ``in_order=False``: their weights and windows are planned in this order."""
    loader = DataLoader(LastFirst(), 2, num_workers=2, in_order=False, multiprocessing_context="fork")
    order = read_order(loader, settings_of())
    assert order is not None
    cut = WindowBatchSampler(order, rank=0)
    cut.arrange(0, EpochPlan(RegularWindows(8, 4), 2), start=0, enabled=True)
    assert numbers(rebatch(loader, cut)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("own", [False, True])
def test_what_ranks_share_is_shuffled_as_by_lightning(own: bool) -> None:
    """Its samplers of ranks take turns in one order, of the dataset or of a sampler of the user's own."""
    given = range(SIZE - 1, -1, -1) if own else SequentialSampler(range(SIZE))
    order = read_order(DataLoader(range(SIZE), 3, sampler=given), settings_of(2, must_shuffle=True))  # type: ignore[arg-type]
    assert order is not None
    of_rank = partial(DistributedSamplerWrapper if own else DistributedSampler, given if own else range(SIZE))
    shares = [of_rank(num_replicas=2, rank=rank, shuffle=True, seed=7) for rank in range(2)]
    for share in shares:
        share.set_epoch(3)
    theirs = [index for turn in zip(*shares, strict=True) for index in turn]
    assert [int(index) for index in order.draw(3)] == theirs[:SIZE]


@pytest.mark.parametrize(
    ("make", "settings", "multiple"),
    [
        (lambda data: DataLoader(data, 3), {}, 1),
        (lambda data: DataLoader(data, 3), {"world_size": 2, "must_shuffle": True}, 1),
        (lambda data: DataLoader(data, 3, shuffle=True), {}, 1),
        (lambda data: DataLoader(data, 3, shuffle=True, drop_last=True), {}, 1),
        (lambda data: DataLoader(data, 3, shuffle=True), {"may_shuffle": False}, 1),
        (lambda data: DataLoader(data, 3, sampler=DistributedSampler(data, 2, 0)), {"world_size": 2}, 1),
        (lambda data: DataLoader(data, 3, sampler=DistributedSampler(data, 2, 1, shuffle=False)), {"world_size": 2}, 1),
        (
            lambda data: DataLoader(data, 3, sampler=DistributedSampler(data, 2, 0, drop_last=True)),
            {"world_size": 2},
            2,
        ),
    ],
)
def test_an_order_follows_the_length_of_its_dataset(make: Any, settings: dict[str, Any], multiple: int) -> None:
    """A shorter epoch ends earlier, and a longer one shows the new samples."""
    data = [*range(SIZE)]
    order = read_order(make(data), settings_of(**settings))
    assert order is not None
    for epoch, length in enumerate((SIZE, 7, 20, 1, 12)):
        data[:] = range(length)
        assert order.size(epoch) == length - length % multiple
        assert sorted(map(int, order.pool(epoch))) == [*range(length)]
        assert sorted(map(int, order.begin(epoch))) == [*range(length)]


class Drawing:
    """Shuffles with a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(SIZE))
        self.generator.shuffle(numbers)
        return iter(numbers)


def of_torch(kind: Callable[..., Any]) -> Callable[[int], Any]:
    return lambda seed: kind(range(SIZE), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "make",
    [
        of_torch(RandomSampler),
        of_torch(SubsetRandomSampler),
        lambda seed: Drawing(random.Random(seed)),
        lambda seed: Drawing(np.random.RandomState(seed)),
        lambda seed: Drawing(np.random.default_rng(seed)),
    ],
)
def test_the_seed_of_a_samplers_own_generator_counts(make: Callable[[int], Any]) -> None:
    """Members of an ensemble have orders of their own; ranks have that of the first, however theirs were seeded."""
    of_first: list[Any] = []

    def order(seed: int, of_first_rank: Any, ranks: int = 1) -> list[int]:
        found = read_order(
            DataLoader(range(SIZE), 3, sampler=make(seed)),  # type: ignore[arg-type]
            settings_of(ranks, of_first_rank=of_first_rank),
        )
        assert found is not None
        return [int(index) for index in found.draw(1)]

    def kept(value: Any) -> Any:
        of_first.append(value)
        return value

    alone = order(3, lambda value: value)
    assert sorted(alone) == [*range(SIZE)]
    assert order(3, lambda value: value) == alone
    assert order(4, lambda value: value) != alone
    assert order(3, kept, 2) == order(4, lambda _: of_first.pop(), 2) == alone


class Endless:
    """A sampler of indices, or of batches, without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield [0]


class Stateful(DataLoader[int]):
    """Saves its place."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        ([1, 2], "several loaders"),
        ({"a": DataLoader(range(SIZE))}, "several loaders"),
        (iter([1]), "a list_iterator that is no DataLoader"),
        (DataLoader(range(SIZE), batch_size=None), "batch_size=None"),
        (DataLoader(StreamOf(range(SIZE)), 3), "an iterable dataset"),
        (DataLoader(SizedStreamOf(range(SIZE)), 3), "an iterable dataset"),
        (Doubling(range(SIZE), 3), "a DataLoader with an __iter__ or __len__ of its own (Doubling)"),
        (Stateful(range(SIZE), 3), "a loader that saves its place"),
        (
            DataLoader(range(SIZE), batch_sampler=OwnBatches(SequentialSampler(range(SIZE)), 3, False)),
            "a batch sampler of its own (OwnBatches)",
        ),
        (DataLoader(range(SIZE), batch_sampler=[[0, 1], [2]]), "a batch sampler of its own (list)"),
        (DataLoader(range(SIZE), 3, sampler=Endless()), "a sampler without len() (Endless)"),
        (DataLoader(range(SIZE), 3, sampler=[0, 1, 2]), ""),
        (FixedArguments("sour"), ""),
    ],
)
def test_what_is_cut_in_the_step(loader: Any, why: str) -> None:
    """With the reason in words."""
    assert why_in_step(loader) == why


def test_ranks_with_orders_of_their_own_share_none() -> None:
    """But torch's own sampler for exactly these ranks, which takes turns in one order, does."""
    theirs = DistributedSampler(range(SIZE), 2, 0, shuffle=False)
    shared = read_order(DataLoader(range(SIZE), 3, sampler=theirs), settings_of(2, shard=False))
    assert isinstance(shared, Sequential)
    assert read_order(DataLoader(range(SIZE), 3, sampler=theirs), settings_of(3)) is None
    assert read_order(DataLoader(range(SIZE), 3), settings_of(2, shard=False)) is None
    assert read_order(DataLoader(range(SIZE), 3), settings_of(2)) is not None


class Backwards(SequentialSampler):
    """Counts down."""

    def __iter__(self) -> Any:
        return iter(range(len(self.data_source) - 1, -1, -1))


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Backwards(range(12)), [*range(11, -1, -1)]),
        (SequentialSampler(range(5)), [*range(5)]),
        (RandomSampler(range(12)), [*range(12)]),
    ],
)
def test_lightning_keeps_a_sequential_sampler_that_is_not_to_shuffle(sampler: Any, expected: list[int]) -> None:
    """Under ``overfit_batches``: others it replaces by the order of the dataset."""
    loader = DataLoader(range(12), 3, sampler=sampler)  # type: ignore[arg-type]
    for ranks in (1, 2):
        order = read_order(loader, SourceSettings(1, ranks, 0, 7, may_shuffle=False, must_shuffle=ranks > 1))
        assert order is not None
        assert [*order.draw(0)] == expected
