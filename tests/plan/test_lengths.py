"""Cuts of windows by the sizes of their samples, against what they must hold."""

from array import array
from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_ga.plan.accumulation import plan_accumulation
from lightning_ga.plan.lengths import (
    SizedPlan,
    SizedShares,
    SizeLimits,
    chunks_needed,
    cut_by_size,
    piece_sizes,
    plan_by_size,
    token_windows,
)
from lightning_ga.plan.lengths import sample_order as order_of
from lightning_ga.plan.windows import EpochPlan, GrowingEpoch, RegularWindows

SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=80)
LIMITS = st.builds(SizeLimits, budget=st.integers(1, 300), samples=st.integers(1, 30))
WORLD_SIZES = st.integers(1, 4)


def cost(sizes: list[int], chunk: tuple[int, ...]) -> int:
    return len(chunk) * max((sizes[place] for place in chunk), default=0)


def planned(
    sizes: list[int], window: int, limits: SizeLimits, world_size: int = 1, done: int = 0
) -> tuple[SizedPlan, EpochPlan]:
    """An epoch in windows, cut by size."""
    effective = max(window, world_size)
    plan = plan_accumulation(effective, micro_batch=effective, world_size=world_size)
    windows = RegularWindows(len(sizes), effective, samples_done=done)
    epoch = EpochPlan(windows, plan.micro_batch_size, plan.factor, world_size)
    return plan_by_size(plan, epoch, SizedShares(array("q", sizes), limits))


@settings(deadline=None)
@given(SIZES, LIMITS, WORLD_SIZES, st.integers(0, 3))
def test_every_sample_is_in_one_chunk_within_the_limits(sizes, limits, world_size, more):
    """On all ranks as many chunks, none above the limits but of one sample, also if there are more than needed."""
    factor = -(-chunks_needed(sizes, limits) // world_size) + more
    ranks = cut_by_size(sizes, limits, factor=factor, world_size=world_size)
    assert [len(chunks) for chunks in ranks] == [factor] * world_size
    chunks = [chunk for chunks in ranks for chunk in chunks]
    assert sorted(place for chunk in chunks for place in chunk) == list(range(len(sizes)))
    for chunk in chunks:
        assert len(chunk) <= 1 or (cost(sizes, chunk) <= limits.budget and len(chunk) <= limits.samples)
    # None is empty while another holds several.
    assert sum(map(bool, chunks)) == min(len(sizes), factor * world_size)


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
    assert chunks_needed(sizes, limits) == fewest[-1]


@settings(deadline=None)
@given(SIZES, LIMITS, WORLD_SIZES)
def test_the_costs_of_ranks_differ_by_a_micro_batch_at_most(sizes, limits, world_size):
    factor = -(-chunks_needed(sizes, limits) // world_size)
    ranks = cut_by_size(sizes, limits, factor=factor, world_size=world_size)
    totals = [sum(cost(sizes, chunk) for chunk in chunks) for chunks in ranks]
    assert max(totals) - min(totals) <= max(cost(sizes, chunk) for chunks in ranks for chunk in chunks)


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


def check_windows(epoch: EpochPlan, expected: list[list[int]], sizes: list[int], limits: SizeLimits) -> None:
    """Windows hold their samples, each in one chunk within the limits, and ranks step together."""
    assert epoch.windows.count == len(expected)
    assert epoch.length == sum(map(epoch.factor_of, range(len(expected))))
    for number in range(epoch.windows.done, len(expected)):
        start, samples = epoch.windows.span(number)
        assert [*range(start, start + samples)] == expected[number]
        order = order_of(epoch, number)
        assert order is not None
        assert sorted(order) == list(range(samples))
        ranks = [epoch.chunks(number, rank) for rank in range(epoch.world_size)]
        assert {len(chunks) for chunks in ranks} == {epoch.factor_of(number)}
        taken = [range(chunk.start, chunk.start + chunk.count) for chunks in ranks for chunk in chunks]
        assert [place for places in taken for place in places] == expected[number]
        ends = list(accumulate(sum(chunk.count for chunk in chunks) for chunks in zip(*ranks)))
        assert all([chunk.done - start for chunk in chunks] == ends for chunks in ranks)
        for chunk in (chunk for chunks in ranks for chunk in chunks if chunk.count > 1):
            held = [sizes[start + place] for place in order[chunk.start - start : chunk.start - start + chunk.count]]
            assert len(held) <= limits.samples
            assert len(held) * max(held) <= limits.budget


@settings(deadline=None)
@given(SIZES, st.integers(1, 40), LIMITS, WORLD_SIZES, st.integers(0, 60))
def test_windows_keep_their_samples_on_any_hardware(sizes, window, limits, world_size, done):
    """Each window holds a slice of the order, after a resume too; ranks step together, and all samples are done."""
    _, epoch = planned(sizes, window, limits, world_size, min(done, len(sizes)))
    begin, size = min(done, len(sizes)), max(window, world_size)
    places = list(range(len(sizes)))
    before = [places[start : min(start + size, begin)] for start in range(0, begin, size)]
    expected = [*before, *(places[start : start + size] for start in range(begin, len(sizes), size))]
    check_windows(epoch, expected, sizes, limits)


@settings(deadline=None)
@given(SIZES, st.integers(1, 40), LIMITS)
def test_the_plan_counts_padding(sizes: list[int], window: int, limits: SizeLimits) -> None:
    """The share of padded batches that is padding; as drawn, each window is one batch here."""
    plan, epoch = planned(sizes, window, limits)
    padded, drawn = 0, 0
    for number in range(epoch.windows.count or 0):
        start, samples = epoch.windows.span(number)
        order = order_of(epoch, number) or []
        held = [sizes[start + place] for place in order]
        for chunk in epoch.chunks(number, 0):
            first = chunk.start - start
            padded += chunk.count * max(held[first : first + chunk.count], default=0)
            assert plan.fewest_samples <= chunk.count <= plan.micro_batch_size or not chunk.count
        drawn += samples * max(held)
    assert plan.padding == pytest.approx(1 - sum(sizes) / padded if padded else 0)
    assert plan.padding_as_drawn == pytest.approx(1 - sum(sizes) / drawn if drawn else 0)


def test_the_plan_in_words() -> None:
    plan, _ = planned([9, 1, 1, 8, 2, 2, 1, 1], 8, SizeLimits(budget=18, samples=6))
    assert str(plan) == (
        "window 8 in 2 micro-batches of 2 to 6 samples, at most 18 padded tokens each; padding 17 % (was 65 %)"
    )
    assert (plan.samples_at_most, plan.size_budget, plan.factor) == (6, 18, 2)
    one, _ = planned([9], 1, SizeLimits(budget=18, samples=6))
    assert str(one).startswith("window 1 in 1 micro-batch of 1 sample, at most 9 padded tokens each;")


def test_fewer_of_the_longest_lower_both_limits() -> None:
    limits = SizeLimits(budget=800, samples=64)
    assert limits.lowered(8, of=8) == limits
    assert limits.lowered(6, of=8) == SizeLimits(budget=600, samples=48)
    assert limits.lowered(1, of=1000) == SizeLimits(budget=1, samples=1)


@settings(deadline=None)
@given(SIZES, st.integers(1, 40), LIMITS, WORLD_SIZES)
def test_more_micro_batches_than_needed_are_worth_the_padding_that_they_save(sizes, window, limits, world_size):
    """None where a pass costs more than any padding; the padding falls as passes cost less."""
    dear, _ = planned(sizes, window, replace(limits, pass_cost=10**9), world_size)
    free, _ = planned(sizes, window, replace(limits, pass_cost=0), world_size)
    effective = max(window, world_size)
    windows = [sizes[start : start + effective] for start in range(0, len(sizes), effective)]
    assert dear.factor == max(-(-chunks_needed(each, limits) // world_size) for each in windows)
    assert free.factor >= dear.factor
    if len(windows) <= 16:
        assert free.padding <= dear.padding + 1e-12


@settings(deadline=None)
@given(SIZES, LIMITS, st.integers(0, 100))
def test_a_batch_is_cut_further_while_that_saves_what_a_pass_costs(sizes, limits, pass_cost):
    """Within the limits and in order, into no fewer than needed; passes and padding cost no more than then."""
    ordered = sorted(sizes, reverse=True)

    def total(pieces: list[int]) -> int:
        starts = accumulate(pieces, initial=0)
        return sum(count * ordered[start] for start, count in zip(starts, pieces)) + pass_cost * len(pieces)

    fewest, found = piece_sizes(ordered, limits), piece_sizes(ordered, replace(limits, pass_cost=pass_cost))
    assert sum(found) == len(sizes)
    assert len(found) >= len(fewest)
    assert total(found) <= total(fewest)
    assert piece_sizes(ordered, limits, len(found)) == found
    start = 0
    for count in found:
        assert count == 1 or (count <= limits.samples and count * ordered[start] <= limits.budget)
        start += count


@settings(deadline=None)
@given(SIZES, st.integers(1, 80), LIMITS, WORLD_SIZES)
def test_padding_costs_few_passes_or_a_third_of_them_if_a_pass_is_not_measured(sizes, window, limits, world_size):
    effective = max(window, world_size)
    plan = plan_accumulation(effective, micro_batch=1, world_size=world_size)  # as drawn, each sample alone
    epoch = EpochPlan(RegularWindows(len(sizes), effective), 1, plan.factor, world_size)
    shares = SizedShares(array("q", sizes), limits)
    found, _ = plan_by_size(plan, epoch, shares)
    least, _ = plan_by_size(plan, epoch, replace(shares, limits=replace(limits, pass_cost=10**9)))
    assert least.factor <= found.factor <= max(least.factor, 8, plan.factor // 3)


def plain_cut(sizes: list[int], tokens: int) -> list[list[int]]:
    """Sample by sample, a new window where the next does not fit."""
    windows: list[list[int]] = []
    for place, size in enumerate(sizes):
        if not windows or sum(sizes[each] for each in windows[-1]) + size > tokens:
            windows.append([])
        windows[-1].append(place)
    return windows


@settings(deadline=None)
@given(SIZES, st.integers(1, 200), LIMITS, WORLD_SIZES, st.data())
def test_windows_by_tokens_are_the_same_on_any_hardware_and_after_a_resume(sizes, tokens, limits, world_size, data):
    """Those of the plain way; each is cut into as many micro-batches on every rank, within the limits."""
    expected = plain_cut(sizes, tokens)
    done = data.draw(st.integers(0, len(expected)))
    windows = token_windows(array("q", sizes), tokens, samples_done=sum(map(len, expected[:done])))
    largest = max(world_size, *map(len, expected))
    whole = plan_accumulation(largest, micro_batch=largest, world_size=world_size)
    epoch = GrowingEpoch(windows, largest, whole.factor, world_size)
    plan, epoch = plan_by_size(whole, epoch, SizedShares(array("q", sizes), limits), tokens=tokens)
    assert windows.done == done
    assert epoch.done == sum(map(epoch.factor_of, range(done)))
    check_windows(epoch, expected, sizes, limits)
    for window in range(done, len(expected)):
        assert plan.fewest_chunks <= epoch.factor_of(window) <= plan.factor
        assert max(chunk.count for chunk in epoch.chunks(window, 0)) <= plan.micro_batch_size


@given(SIZES, st.integers(1, 200))
def test_only_a_last_window_with_room_left_is_dropped(sizes: list[int], tokens: int) -> None:
    expected = plain_cut(sizes, tokens)
    is_ragged = sum(sizes[place] for place in expected[-1]) < tokens
    assert token_windows(sizes, tokens, drop_last=True).count == len(expected) - is_ragged
