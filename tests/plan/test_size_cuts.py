"""Cuts of windows by the sizes of their samples, against what they must hold."""

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_ga.plan.accumulation import plan_accumulation
from lightning_ga.plan.size_cuts import SizedEpoch, SizedPlan, SizeLimits, cut_by_size, plan_by_size
from lightning_ga.plan.windows import EpochPlan, RegularWindows

SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=80)
LIMITS = st.builds(SizeLimits, budget=st.integers(1, 300), samples=st.integers(1, 30))
WORLD_SIZES = st.integers(1, 4)


def cost(sizes: list[int], chunk: tuple[int, ...]) -> int:
    return len(chunk) * max((sizes[place] for place in chunk), default=0)


def needed(sizes: list[int], limits: SizeLimits, world_size: int = 1) -> int:
    """The micro-batches that one window of these samples is cut into on each rank."""
    return SizedEpoch(RegularWindows(len(sizes), len(sizes)), len(sizes), world_size, sizes=sizes, limits=limits).factor


def planned(
    sizes: list[int], window: int, limits: SizeLimits, world_size: int = 1, micro_batch: int | None = None
) -> tuple[SizedPlan, SizedEpoch]:
    """An epoch in windows, cut by size; as drawn, in micro-batches of so many samples, or a window each."""
    effective = max(window, world_size)
    plan = plan_accumulation(effective, micro_batch=micro_batch or effective, world_size=world_size)
    windows = RegularWindows(len(sizes), effective)
    return plan_by_size(plan, EpochPlan(windows, micro_batch or effective, world_size), sizes, limits)


@settings(deadline=None)
@given(SIZES, LIMITS, WORLD_SIZES, st.integers(0, 3))
def test_every_sample_is_in_one_chunk_within_the_limits(sizes, limits, world_size, more):
    """On all ranks as many chunks, none above the limits but of one sample, also if there are more than needed."""
    factor = needed(sizes, limits, world_size) + more
    ranks = cut_by_size(sizes, limits, factor=factor, world_size=world_size)
    assert [len(chunks) for chunks in ranks] == [factor] * world_size
    chunks = [chunk for chunks in ranks for chunk in chunks]
    assert sorted(place for chunk in chunks for place in chunk) == list(range(len(sizes)))
    for chunk in chunks:
        assert len(chunk) <= 1 or (cost(sizes, chunk) <= limits.budget and len(chunk) <= limits.samples)
    assert sum(map(bool, chunks)) == min(len(sizes), factor * world_size), "none is empty while another holds several"
    lower = cut_by_size(sizes, limits.lowered(1, of=2), factor=2 * len(sizes), world_size=world_size)
    of_rank = [[sorted(place for chunk in chunks for place in chunk) for chunks in cut] for cut in (ranks, lower)]
    assert of_rank[0] == of_rank[1], "a rank that cuts smaller takes a sample of another"
    totals = [sum(cost(sizes, chunk) for chunk in chunks) for chunks in ranks]
    assert more or max(totals) - min(totals) <= max(cost(sizes, chunk) for chunk in chunks)


@settings(deadline=None)
@given(SIZES, LIMITS)
@example([0, 0], SizeLimits(budget=1, samples=2))
def test_no_cut_of_sorted_samples_needs_fewer_chunks(sizes: list[int], limits: SizeLimits) -> None:
    """Against the fewest of all cuts of the sorted samples, found by trying each."""
    ordered = sorted(sizes, reverse=True)
    fewest = [0]
    for end in range(1, len(ordered) + 1):
        starts = [
            start
            for start in range(end)
            if end - start == 1 or (end - start <= limits.samples and (end - start) * ordered[start] <= limits.budget)
        ]
        fewest.append(1 + min(fewest[start] for start in starts))
    assert needed(sizes, limits) == fewest[-1]


@pytest.mark.parametrize("factor", [7, 9, 12, 20])
def test_padding_is_near_the_least(factor: int) -> None:
    """Of all cuts of the sorted samples into as many micro-batches within the budget, found by trying each."""
    generator = Random(0)
    sizes = [1 + int(400 * generator.random() ** 3) for _ in range(128)]
    ordered, budget = sorted(sizes, reverse=True), 4 * max(sizes)
    least = [0.0, *[float("inf")] * len(ordered)]
    for _ in range(factor):
        least = [0.0] + [
            min(
                least[start] + (end - start) * ordered[start]
                for start in range(end)
                if end - start == 1 or (end - start) * ordered[start] <= budget
            )
            for end in range(1, len(ordered) + 1)
        ]
    (chunks,) = cut_by_size(sizes, SizeLimits(budget, 128), factor=factor)
    assert sum(cost(sizes, chunk) for chunk in chunks) <= 1.03 * least[-1]


@settings(deadline=None)
@given(SIZES, st.integers(1, 40), LIMITS)
def test_the_plan_counts_padding(sizes: list[int], window: int, limits: SizeLimits) -> None:
    """The share of padded batches that is padding; as drawn, each window is one batch here."""
    plan, epoch = planned(sizes, window, limits)
    padded, drawn = 0, 0
    for number in range(epoch.count):
        window = epoch.window(number)
        for position, size in enumerate(window.sizes):
            padded += size * max(sizes[place] for place in epoch.places(window, position))
            assert plan.fewest_samples <= size <= plan.micro_batch_size or not size
        drawn += window.samples * max(sizes[window.start : window.end])
    assert plan.padding == pytest.approx(1 - sum(sizes) / padded if padded else 0)
    assert plan.padding_as_drawn == pytest.approx(1 - sum(sizes) / drawn if drawn else 0)


def test_the_plan_in_words() -> None:
    plan, _ = planned([9, 1, 1, 8, 2, 2, 1, 1], 8, SizeLimits(budget=18, samples=6))
    assert str(plan) == (
        "window 8 in 2 micro-batches of 2 to 6 samples, at most 18 tokens each if padded; padding 17 % (was 65 %)"
    )
    assert (plan.samples_at_most, plan.size_budget, plan.factor) == (6, 18, 2)
    one, _ = planned([9], 1, SizeLimits(budget=18, samples=6))
    assert str(one).startswith("window 1 in 1 micro-batch of 1 sample, at most 9 tokens each if padded;")


@settings(deadline=None)
@given(SIZES, st.integers(1, 80), LIMITS, WORLD_SIZES)
def test_more_micro_batches_than_needed_save_padding(sizes, window, limits, world_size):
    """No more than eight, or a third of those as drawn: a pass costs something, too."""
    effective = max(window, world_size)
    plan, epoch = planned(sizes, window, limits, world_size, micro_batch=1)  # as drawn, each sample alone
    windows = [sizes[start : start + effective] for start in range(0, len(sizes), effective)]
    least = max(needed(each, limits, world_size) for each in windows)
    drawn = plan_accumulation(effective, micro_batch=1, world_size=world_size).factor
    assert least <= plan.factor == epoch.factor <= max(least, 8, drawn // 3)
