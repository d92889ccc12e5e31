"""What every rank is fed with, against the recipe's own loaders and a plain walk over the order."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from epoch_chunks import samples_after
from hypothesis import given
from hypothesis import strategies as st
from reference import StreamOf
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ga.errors import UserError
from lightning_ga.loading.recipe_batches import SourceSettings
from lightning_ga.loading.training_source import MicroBatchSource

SEED = 11
TOTALS = st.integers(1, 80)
BATCHES = st.integers(1, 12)
FACTORS = st.integers(1, 4)
WORLD_SIZES = st.integers(1, 4)
LIMITS = st.integers(1, 9)
TRAINER_LIMITS = st.just(1.0) | st.integers(1, 20) | st.sampled_from([0.25, 0.5, 0.9])


class Growing(BatchSampler):
    """Batches of 1, 2, 3, 1, 2, 3 … samples in order."""

    def __init__(self, size: int) -> None:
        super().__init__(SequentialSampler(range(size)), 1, drop_last=False)
        self.batches: list[list[int]] = []
        done = 0
        while done < size:
            count = min(len(self.batches) % 3 + 1, size - done)
            self.batches.append(list(range(done, done + count)))
            done += count

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def feeds(
    make: Callable[[int], DataLoader[Any]], world_size: int, factor: int = 1, **settings: Any
) -> list[MicroBatchSource]:
    """One feed per rank, each with a loader of its own."""
    return [
        MicroBatchSource(make(rank), SourceSettings(factor, world_size, rank, SEED, **settings))
        for rank in range(world_size)
    ]


def trained_on(ranks: list[MicroBatchSource]) -> list[list[int]]:
    """Samples behind each optimizer step: what the loaders really yield, stand-ins of weight 0 left out."""
    windows: dict[int, list[int]] = {}
    steps = set()
    for feed in ranks:
        assert feed.loader is not None
        first = feed.epoch_plan.done
        index = first - 1
        for index, batch in enumerate(feed.loader, start=first):
            chunk = feed.chunk(index)
            assert len(batch) == max(1, chunk.count)
            windows.setdefault(chunk.window, []).extend(batch.tolist() if chunk.count else [])
        assert feed.length is None or feed.length == index + 1 == len(feed.loader)
        steps.add(index)
    assert len(steps) == 1, "ranks that reduce gradients together do not run the same number of micro-batches"
    return [sorted(samples) for _window, samples in sorted(windows.items())]


def assert_fit(ranks: list[MicroBatchSource], limit: int) -> None:
    """Assert that no micro-batch to come is larger than fits."""
    counts = [feed.chunk(index).count for feed in ranks for index in range(feed.epoch_plan.done, feed.length or 0)]
    assert max(counts, default=0) <= limit


def mixed(feed: MicroBatchSource, batches: list[list[int]]) -> list[list[int]]:
    """Micro-batches with samples of more than one of the user's batches."""
    assert feed.loader is not None
    groups = [set(batch) for batch in batches]
    return [part.tolist() for part in feed.loader if not any(group >= set(part.tolist()) for group in groups)]


def cut(order: list[int], size: int, *, drop_last: bool = False) -> list[list[int]]:
    windows = [sorted(order[start : start + size]) for start in range(0, len(order), size)]
    return windows[:-1] if drop_last and len(windows[-1]) < size else windows


def permutation(size: int, epoch: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


def recipe_length(size: int, batch: int, world_size: int, limit: int | float, *, drop_last: bool = False) -> int:
    """Batches that stock Lightning trains on, on one rank: torch's own loader and sampler asked for their length."""
    dataset = range(size)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=0)
    length = len(DataLoader(dataset, batch, sampler=sampler, drop_last=drop_last))
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


@given(TOTALS, BATCHES, WORLD_SIZES, LIMITS, TRAINER_LIMITS, st.integers(4, 60), st.booleans())
def test_the_trainers_limit_counts_batches_of_the_recipe(
    total: int, batch: int, world_size: int, limit: int, trainer_limit: int | float, effective: int, drop_last: bool
) -> None:
    """Training uses the samples that stock Lightning's batches would hold, whatever they are cut into."""
    batches = recipe_length(total, batch, world_size, trainer_limit, drop_last=drop_last)
    unlimited = recipe_length(total, batch, world_size, 1.0, drop_last=drop_last)
    ranks = feeds(
        lambda rank: DataLoader(range(total), batch, drop_last=drop_last), world_size, limit_batches=trainer_limit
    )
    whole = batches == unlimited
    used = total if whole else min(total, batches * batch * world_size)
    if not batches and unlimited:
        with pytest.raises(UserError, match=f"limit_train_batches={trainer_limit} of {unlimited} batches leaves none"):
            ranks[0].recipe.total(0)
        return
    assert ranks[0].recipe.total(0) == used
    if drop_last and whole and used < effective:
        with pytest.raises(UserError, match="drop_last"):
            ranks[0].arrange(0, effective, limit)
        return
    expected = cut(list(range(used)), effective, drop_last=drop_last and whole)
    for feed in ranks:
        feed.arrange(0, effective, limit)
        assert feed.recipe.windows(0, effective).count == len(expected)
    assert trained_on(ranks) == expected


@given(TOTALS, FACTORS, WORLD_SIZES, LIMITS, TRAINER_LIMITS)
def test_batches_of_a_custom_batch_sampler_are_joined(total, factor, world_size, limit, trainer_limit):
    """A window is the next factor × ranks of the user's batches, cut anew into micro-batches that fit."""
    batches = Growing(total).batches
    length = -(-len(batches) // world_size)
    used = min(length, trainer_limit) if isinstance(trainer_limit, int) else int(length * trainer_limit)
    batches = batches[: used * world_size]
    per_window = factor * world_size
    windows = [sum(batches[k : k + per_window], []) for k in range(0, len(batches), per_window)]
    ranks = feeds(
        lambda rank: DataLoader(range(total), batch_sampler=Growing(total)),
        world_size,
        factor,
        limit_batches=trainer_limit,
    )
    if not used or max(map(len, windows)) < world_size:
        with pytest.raises(UserError, match=r"leaves none|below the number of ranks"):
            ranks[0].arrange(0, None, limit)
        return
    for feed in ranks:
        plan = feed.arrange(0, None, limit)
        assert plan.effective_batch_size == feed.recipe.effective(0) == max(map(len, windows))
        assert feed.recipe.total(0) == sum(map(len, batches))
    assert trained_on(ranks) == windows
    assert_fit(ranks, limit)
    assert world_size > 1 or not mixed(ranks[0], batches)
    counts = [feed.recipe_batches(samples_after(feed.epoch_plan, index)) for index in range(feed.length or 0)]
    ends = list(accumulate(map(len, batches)))[world_size - 1 :: world_size]
    for index, count in enumerate(counts[:-1]):
        assert count == sum(end <= samples_after(feed.epoch_plan, index) for end in ends)
    assert counts[-1] == used


@given(TOTALS, WORLD_SIZES, LIMITS, WORLD_SIZES, LIMITS, st.integers(4, 30), st.booleans(), st.data())
def test_an_interrupted_epoch_goes_on_anywhere(total, before, limit, after, other, effective, custom, data):
    """Interrupted after any window and resumed on other ranks with another limit, every sample comes once."""

    def make(rank: int) -> DataLoader[Any]:
        if custom:
            return DataLoader(range(total), batch_sampler=Growing(total))
        return DataLoader(range(total), 3, shuffle=True)

    asked = None if custom else effective  # batches of several sizes make up no given number
    try:
        first, second = feeds(make, before, 2), feeds(make, after, 2)
        for feed in first:
            feed.arrange(1, asked, limit)
        windows = trained_on(first)
        stop = data.draw(st.integers(0, len(windows)))
        done = sum(map(len, windows[:stop]))
        for feed in second:
            plan = feed.arrange(1, asked, other, samples_done=done)
            assert plan.micro_batch_size <= other
            assert_fit([feed], other)
    except UserError as error:
        assert "below the number of ranks" in str(error)  # noqa: PT017
        return
    rest = trained_on(second)
    assert sorted(sum(windows[:stop] + rest, [])) == list(range(total))
    if asked:
        assert windows[:stop] + rest == windows


class Own(BatchSampler):
    """A batch sampler of the user's own."""


def grouped(total: int, batch: int, *, drop_last: bool = False) -> DataLoader[int]:
    return DataLoader(range(total), batch_sampler=Own(SequentialSampler(range(total)), batch, drop_last))


@pytest.mark.parametrize(
    ("make", "effective", "message"),
    [
        (
            lambda rank: grouped(20, 4),
            6,
            r"=6 is no whole number of batches of 4 samples, .* Own .*use a multiple of 4\.",
        ),
        (lambda rank: grouped(20, 4), 3, r"=3 is no whole number of batches of 4 .*use a multiple of 4\."),
        (
            lambda rank: DataLoader(range(12), batch_sampler=Growing(12)),
            6,
            r"=6 is no whole number of batches of 1 to 3 samples, .* Growing .*Trainer\(accumulate_grad_batches=…\)",
        ),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_effective_batch_that_would_mix_batches_of_a_batch_sampler_is_refused(make, effective, message, world_size):
    for feed in feeds(make, world_size):
        with pytest.raises(UserError, match=rf"effective_batch_size{message}"):
            feed.arrange(0, effective, 2)


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_distributed_sampler_is_never_sharded_twice(world_size: int, shard: bool) -> None:
    """Its ranks share its one order, whether or not the Trainer may add a sampler of its own."""

    def make(rank: int) -> DataLoader[int]:
        dataset = range(23)
        sampler: DistributedSampler[int] = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=3)
        return DataLoader(dataset, 2, sampler=sampler)

    ranks = feeds(make, world_size, 2, shard=shard)
    for feed in ranks:
        feed.arrange(4, None, 2)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(3 + 4)).tolist()
    assert trained_on(ranks) == cut(order, 4 * world_size)


@pytest.mark.parametrize("shard", [True, False])
def test_a_batch_sampler_over_a_distributed_sampler_is_each_ranks_own(shard: bool) -> None:
    """Every rank's batches are already its share: all samples come, none twice."""

    def make(rank: int) -> DataLoader[int]:
        sampler: DistributedSampler[int] = DistributedSampler(range(24), 2, rank, shuffle=False)
        return DataLoader(range(24), batch_sampler=Own(sampler, 4, drop_last=False))

    ranks = feeds(make, 2, shard=shard)
    for feed in ranks:
        assert feed.arrange(0, None, 3).effective_batch_size == 8
        assert feed.sharded_ranks == 2
    assert trained_on(ranks) == cut(list(range(24)), 8)


def test_ranks_with_orders_of_their_own_share_windows_evenly() -> None:
    ranks = feeds(lambda rank: DataLoader(range(10), 2), 2, shard=False)
    for feed in ranks:
        feed.arrange(0, 8, 3)
    assert trained_on(ranks) == [sorted(window * 2) for window in cut(list(range(10)), 4)]
    with pytest.raises(UserError, match=r"effective_batch_size=9 is not a multiple of the 2 ranks.*use 8\."):
        ranks[0].arrange(0, 9, 3)


def test_a_fraction_of_a_stream_without_a_length_is_refused() -> None:
    (feed,) = feeds(lambda rank: DataLoader(StreamOf(range(9)), 2), 1, limit_batches=0.5)
    with pytest.raises(UserError, match=r"limit_train_batches=0.5 is a fraction.*whole number of batches"):
        feed.arrange(0, None, 2)


def test_a_window_that_is_dropped_alone_is_refused() -> None:
    (feed,) = feeds(lambda rank: DataLoader(range(30), 4, drop_last=True), 1, 2)
    with pytest.raises(UserError, match=r"effective_batch_size=31.*30 samples.*drop_last=False"):
        feed.arrange(0, 31, 3)
