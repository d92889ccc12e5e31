"""What every rank is fed with, against the recipe's own loaders and a plain walk over the order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import StreamOf
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from lightning_ga.errors import UserError
from lightning_ga.loading.rebatch import SourceSettings
from lightning_ga.loading.source import LoaderSource, read_source
from lightning_ga.loading.step_source import StepSource
from lightning_ga.plan.accumulation import plan_accumulation
from lightning_ga.plan.batch_schedule import by_step, constant
from lightning_ga.plan.size_cuts import SizeLimits

SEED = 11
TOTALS = st.integers(1, 80)
BATCHES = st.integers(1, 12)
WORLD_SIZES = st.integers(1, 4)
LIMITS = st.integers(1, 9)
TRAINER_LIMITS = st.just(1.0) | st.integers(1, 20) | st.sampled_from([0.25, 0.5, 0.9])


def feeds(
    make: Callable[[int], DataLoader[Any]], world_size: int, factor: int = 1, *, size_of: Any = None, **given: Any
) -> list[LoaderSource]:
    """One source per rank, each with a loader of its own."""
    found = []
    for rank in range(world_size):
        source = read_source(make(rank), SourceSettings(factor, world_size, rank, SEED, **given), size_of=size_of)
        assert isinstance(source, LoaderSource)
        found.append(source)
    return found


def trained_on(ranks: list[LoaderSource]) -> list[list[int]]:
    """Samples behind each optimizer step: what the loaders really yield, stand-ins of weight 0 left out."""
    windows: dict[int, list[int]] = {}
    for feed in ranks:
        batches = iter(feed.loader)
        for index in range(feed.epoch_plan.done, feed.epoch_plan.count):
            for size in feed.window(index).sizes:
                batch = next(batches)
                assert len(batch) == max(1, size)
                windows.setdefault(index, []).extend(batch.tolist() if size else [])
        assert next(batches, None) is None
        assert len(feed.loader) == feed.epoch_plan.length == ranks[0].epoch_plan.length
    return [sorted(samples) for _, samples in sorted(windows.items())]


def cut(order: list[int], size: int) -> list[list[int]]:
    return [sorted(order[start : start + size]) for start in range(0, len(order), size)]


def assert_eight(batch: list[Any]) -> Any:
    assert len(batch) == 8
    return pad_sequence(batch)


def recipe_length(size: int, batch: int, world_size: int, limit: int | float, *, drop_last: bool = False) -> int:
    """Batches that stock Lightning trains on, on one rank: torch's own loader and sampler asked for their length."""
    dataset = range(size)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=0)  # type: ignore[arg-type]
    length = len(DataLoader(dataset, batch, sampler=sampler, drop_last=drop_last))  # type: ignore[arg-type]
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


@given(TOTALS, BATCHES, WORLD_SIZES, LIMITS, TRAINER_LIMITS, st.integers(4, 60), st.booleans())
def test_the_trainers_limit_counts_batches_of_the_recipe(
    total: int, batch: int, world_size: int, limit: int, trainer_limit: int | float, effective: int, drop_last: bool
) -> None:
    """Training uses the samples that stock Lightning's batches would hold, whatever they are cut into."""
    batches = recipe_length(total, batch, world_size, trainer_limit, drop_last=drop_last)
    unlimited = recipe_length(total, batch, world_size, 1.0, drop_last=drop_last)

    def make(rank: int) -> DataLoader[int]:
        return DataLoader(range(total), batch, drop_last=drop_last)  # type: ignore[arg-type]

    if not batches and unlimited:
        with pytest.raises(UserError, match=f"limit_train_batches={trainer_limit} of {unlimited} batches leaves none"):
            feeds(make, world_size, limit_batches=trainer_limit)
        return
    ranks = feeds(make, world_size, limit_batches=trainer_limit)
    used = min(total, batches * batch * world_size)
    assert (ranks[0].epoch(0).samples, ranks[0].epoch(0).batches) == (used, batches)
    expected = cut(list(range(used)), effective)
    for feed in ranks:
        plan = feed.arrange(0, constant(effective), limit)
        assert plan == plan_accumulation(effective, micro_batch=limit, world_size=world_size)
        assert plan.factor == feed.epoch_plan.factor
        assert feed.steps_of(0, constant(effective)) == (len(expected), sum(map(len, expected)))
    assert trained_on(ranks) == expected


def test_an_order_that_is_too_long_to_be_drawn_is_left_to_the_loader() -> None:
    """As of a sampler with replacement that lasts for the whole training: stock Lightning reads it bit by bit."""
    sampler = RandomSampler(range(8), replacement=True, num_samples=2**40)
    source = read_source(DataLoader(range(8), 4, sampler=sampler), SourceSettings(1, 1, 0, SEED))  # type: ignore[arg-type]
    assert isinstance(source, StepSource)
    assert source.why == "a sampler of 1,099,511,627,776 samples"


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_distributed_sampler_is_never_sharded_twice(world_size: int, shard: bool) -> None:
    """Its ranks share its one order, whether or not the Trainer may add a sampler of its own."""

    def make(rank: int) -> DataLoader[int]:
        dataset: Any = range(23)
        sampler: DistributedSampler[int] = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=3)
        return DataLoader(dataset, 2, sampler=sampler)

    ranks = feeds(make, world_size, 2, shard=shard)
    assert ranks[0].recipe.effective == 4 * world_size
    for feed in ranks:
        feed.arrange(4, constant(feed.recipe.effective), 2)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(3 + 4)).tolist()
    assert trained_on(ranks) == cut(order, 4 * world_size)


def test_data_that_cannot_be_cut_in_the_loader_are_left_alone() -> None:
    """Each with its reason; with ``size_of`` they are refused."""
    stream, own = DataLoader(StreamOf(range(9)), 3), DataLoader(range(9), 3)  # type: ignore[arg-type]
    settings_ = SourceSettings(1, 2, 0, SEED, shard=False)
    for loader, why in ((stream, "an iterable dataset"), (own, "an order of samples of its own on each rank")):
        source = read_source(loader, settings_)
        assert isinstance(source, StepSource)
        assert (source.loader, source.why) == (loader, why)
        with pytest.raises(UserError, match=rf"cannot be cut in the loader \({why}\): leave"):
            read_source(loader, settings_, size_of="auto")
    chosen = read_source(own, SourceSettings(1, 1, 0, SEED), why="LBFGS")
    assert chosen.why == "LBFGS"


class Lists(Dataset[Any]):
    """Of its list, every sample has a value that ``change`` makes of the list and the index."""

    def __init__(self, change: Callable[[list[int], int], float]) -> None:
        self.change = change

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> Any:
        return [torch.tensor([self.change(indices, index)]) for index in indices if index != 23]


def ten_numbers(samples: list[torch.Tensor]) -> torch.Tensor:
    """Join as many samples as have ten numbers together."""
    taken: list[torch.Tensor] = []
    for sample in samples:
        if sum(map(len, taken)) + len(sample) <= 10:
            taken.append(sample)
    return torch.cat(taken)


@pytest.mark.parametrize(
    ("data", "collate", "why"),
    [
        ([torch.zeros(1 + n // 8) for n in range(24)], None, "samples of different shapes, which are collated only"),
        ([torch.zeros(1 + n // 8) for n in range(24)], pad_sequence, ""),
        ([("a" * n, [0] * 3) for n in range(24)], None, ""),
        ([torch.zeros(1 + n // 8) for n in range(24)], assert_eight, ""),
        (Lists(lambda indices, index: float(index)), None, ""),
        (
            Subset(Lists(lambda indices, index: float(index)), range(23, 9, -1)),
            None,
            "a dataset whose __getitems__ lets",
        ),
        (Lists(lambda indices, index: float(sum(indices))), None, "a dataset whose __getitems__ lets"),
        (Lists(lambda indices, index: torch.rand(()).item()), None, ""),
        (torch.arange(24), lambda batch: torch.stack(batch[:6]), "a collate function that takes only so many"),
        (torch.arange(24), lambda batch: torch.stack(batch[:3]), "a collate function that takes only so many"),
        (torch.arange(24), lambda batch: torch.stack(batch[:2]), "a collate function that takes only so many"),
        ([torch.zeros(1 + n // 4) for n in range(24)], ten_numbers, "a collate function that takes only so many"),
        (torch.arange(24), lambda batch: torch.stack(batch[:8]), ""),
        (torch.arange(24), lambda batch: torch.stack(batch[: len(batch) // 2 * 2]), ""),
        (torch.arange(24), lambda batch: torch.ones(len(batch), len(batch)), ""),
    ],
)
def test_data_of_which_only_the_loaders_batches_are_right_are_cut_in_the_step(data, collate, why):
    """As far as the few samples show that are read before training; others are cut in the loader."""
    source = read_source(DataLoader(data, 8, collate_fn=collate), SourceSettings(1, 1, 0, SEED))
    assert isinstance(source, StepSource) == bool(why)
    assert not why or source.why.startswith(why)


def test_the_first_rank_decides_where_data_are_cut() -> None:
    """Reading may be so slow on another that it has seen no samples that differ."""
    alike = DataLoader([torch.zeros(2)] * 24, 8)  # type: ignore[arg-type]
    source = read_source(alike, SourceSettings(1, 2, 1, SEED, of_first_rank=lambda _: "samples of different shapes"))
    assert isinstance(source, StepSource)
    assert source.why.startswith("samples of different shapes")


@pytest.mark.parametrize("says", [False, True])
def test_the_first_rank_decides_whether_batches_are_joined(says: bool) -> None:
    """Another may have read other samples, and must cut windows into as many micro-batches."""
    loader = DataLoader(torch.arange(24), 8, collate_fn=torch.stack)  # type: ignore[arg-type]
    settings = SourceSettings(1, 2, 1, SEED, of_first_rank=lambda value: says if isinstance(value, bool) else value)
    source = read_source(loader, settings)
    assert isinstance(source, LoaderSource)
    assert source.within_collatable(16) == (16 if says else 8)


def test_the_plan_of_unequal_shares_is_cut_by_the_limit_that_an_error_has_left() -> None:
    """Ranks tell their limits as an epoch begins; this one's has fallen since."""
    (_, source) = feeds(lambda rank: DataLoader(range(64), 8), 2)  # type: ignore[arg-type]
    plan = source.arrange(0, constant(16), 4, limits=(8, 8), ratio=(8, 8))
    assert (plan.micro_batch_size, plan.factor) == (4, 2)
    assert source.window(0).sizes == (4, 4)


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=40), st.integers(2, 12), WORLD_SIZES, st.booleans())
def test_windows_are_cut_by_the_sizes_of_samples(sizes, window, world_size, shuffle):
    """Once the limits are known: the same samples in each window, none above the limits but alone."""
    limits, effective = SizeLimits(budget=60, samples=4), max(window, world_size)
    ranks = feeds(
        lambda rank: DataLoader(range(len(sizes)), 2, shuffle=shuffle),  # type: ignore[arg-type]
        world_size,
        size_of=lambda dataset, index: sizes[index],
    )
    for feed in ranks:
        plain = feed.arrange(0, constant(effective), 2)
        assert plain.size_budget is None
        assert feed.sizes is not None
        assert feed.sizes.largest == max(sizes)
        feed.sizes.set_limits(2, limits)
        plan = feed.arrange(0, constant(effective), 2)
        assert plan.size_budget == limits.budget
    order = list(range(len(sizes)))
    if shuffle:
        order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(SEED)).tolist()
    assert trained_on(ranks) == cut(order, effective)
    for feed in ranks:
        batches = iter(feed.loader)
        for each in map(feed.window, range(feed.epoch_plan.count)):
            for size in each.sizes:
                held = [sizes[index] for index in next(batches).tolist()]
                assert size <= 1 or (size <= limits.samples and size * max(held) <= limits.budget)


@pytest.mark.parametrize("unequal", [{}, {"limits": (4, 2), "ratio": (1, 1)}])
def test_an_epoch_that_is_done_has_a_plan_and_no_batch(unequal: Any) -> None:
    """As after a checkpoint of its end, where windows grow; the loader has a batch size all the same."""
    for feed in feeds(lambda rank: DataLoader(range(16), 2), 2):  # type: ignore[arg-type]
        plan = feed.arrange(0, by_step({0: 4, 2: 8}), 2, samples_done=16, windows_done=3, **unequal)
        assert feed.loader.batch_size == plan.micro_batch_size == 1
        assert [*feed.loader] == []
