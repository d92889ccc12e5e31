"""The micro-batches of an epoch, against the list of samples that they must make up."""

from itertools import accumulate, pairwise

import pytest
from epoch_chunks import chunk_of, samples_after
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ga.plan.accumulation import cut_window, plan_accumulation, split_evenly
from lightning_ga.plan.windows import (
    Chunk,
    EpochPlan,
    FullChunks,
    GivenWindows,
    RegularWindows,
    Windows,
    WithinBatches,
    part,
)

SIZES = st.integers(1, 40)
LIMITS = st.integers(1, 20)
WORLD_SIZES = st.integers(1, 5)


def epoch_plan(windows: Windows, largest: int, limit: int, world_size: int) -> EpochPlan:
    factor = plan_accumulation(max(largest, world_size), micro_batch=limit, world_size=world_size).factor
    return EpochPlan(windows, limit, factor, world_size)


def chunks_of(plan: EpochPlan) -> list[list[Chunk]]:
    """The chunks of all ranks, one list for each step that the ranks take together."""
    assert plan.length is not None
    return [[chunk_of(plan, index, rank) for rank in range(plan.world_size)] for index in range(plan.done, plan.length)]


def windows_of(plan: EpochPlan) -> list[list[int]]:
    """The samples behind each optimizer step, sorted: window boundaries are where Lightning sees them."""
    windows: dict[int, list[int]] = {}
    assert plan.length is not None
    for index in range(plan.done, plan.length):
        for rank in range(plan.world_size):
            chunk = chunk_of(plan, index, rank)
            windows.setdefault(index // plan.factor, []).extend(range(chunk.start, chunk.start + chunk.count))
    return [sorted(samples) for samples in windows.values()]


def cut(samples: range, size: int, *, drop_last: bool = False) -> list[list[int]]:
    """The plain way: slices of the order."""
    windows = [list(samples[start : start + size]) for start in range(0, len(samples), size)]
    return windows[:-1] if drop_last and windows and len(windows[-1]) < size else windows


@settings(deadline=None)
@given(st.integers(0, 300), SIZES, LIMITS, WORLD_SIZES, st.booleans(), st.integers(0, 300))
def test_windows_hold_every_sample_once_on_any_hardware(
    total: int, size: int, limit: int, world_size: int, drop_last: bool, done: int
) -> None:
    """Window after window is a slice of the order, from ``samples_done`` on, whatever limit and ranks are."""
    done = min(done, total)
    windows = RegularWindows(total, size, drop_last, done)
    assert windows_of(epoch_plan(windows, size, limit, world_size)) == cut(
        range(done, total), size, drop_last=drop_last
    )


@settings(deadline=None)
@given(st.lists(SIZES, max_size=12), st.integers(1, 4), LIMITS, WORLD_SIZES)
def test_windows_of_given_batches_join_them_in_order(
    sizes: list[int], per_window: int, limit: int, world_size: int
) -> None:
    """Each window is the next batches of the user's own, the last with as many as are left."""
    windows = GivenWindows.of(sizes, per_window=per_window)
    ends = [0, *accumulate(sizes)]
    batches = [list(range(start, end)) for start, end in pairwise(ends)]
    oracle = [[i for batch in batches[k : k + per_window] for i in batch] for k in range(0, len(sizes), per_window)]
    assert windows_of(epoch_plan(windows, windows.largest, limit, world_size)) == oracle
    assert windows.largest == max(map(len, oracle), default=0)


@settings(deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(1, 4), LIMITS, WORLD_SIZES, st.data())
def test_given_windows_go_on_where_they_stopped(
    sizes: list[int], per_window: int, limit: int, world_size: int, data: st.DataObject
) -> None:
    """Wherever an earlier run stopped, on any number of ranks, each of the rest comes once and none again."""
    total = sum(sizes)
    done = data.draw(st.integers(0, total))
    windows = GivenWindows.of(sizes, per_window=per_window, samples_done=done)
    plan = epoch_plan(windows, windows.largest, limit, world_size)
    assert [i for window in windows_of(plan) for i in window] == list(range(done, total))
    if done in {0, *list(accumulate(sizes))[per_window - 1 :: per_window]}:
        whole = windows_of(epoch_plan(GivenWindows.of(sizes, per_window=per_window), windows.largest, limit, 1))
        assert windows_of(plan) == [window for window in whole if window[0] >= done]


@settings(deadline=None)
@given(st.integers(1, 300), SIZES, LIMITS, WORLD_SIZES, LIMITS, WORLD_SIZES, st.data())
def test_a_resume_on_other_hardware_yields_exactly_the_rest(
    total: int, size: int, limit: int, ranks: int, other_limit: int, other_ranks: int, data: st.DataObject
) -> None:
    """The windows of a run, interrupted after any of them, are those of a run in one go."""
    before = epoch_plan(RegularWindows(total, size), size, limit, ranks)
    whole = windows_of(before)
    stop = data.draw(st.integers(0, len(whole)))
    done = sum(map(len, whole[:stop]))
    after = epoch_plan(RegularWindows(total, size, samples_done=done), size, other_limit, other_ranks)
    assert whole[:stop] + windows_of(after) == whole
    assert after.windows.done == stop
    assert after.windows.count == len(whole)
    assert after.done == stop * after.factor if stop < len(whole) else after.done == after.length


@settings(deadline=None)
@given(st.integers(0, 300), SIZES, LIMITS, WORLD_SIZES, st.booleans())
def test_every_chunk_fits_and_ranks_keep_step(
    total: int, size: int, limit: int, world_size: int, drop_last: bool
) -> None:
    """A chunk is never above the limit; ranks and chunks of a window differ by as little as can be."""
    plan = epoch_plan(RegularWindows(total, size, drop_last), size, limit, world_size)
    for together in chunks_of(plan):
        counts = [chunk.count for chunk in together]
        assert max(counts) <= limit
        assert max(counts) - min(counts) <= 1
        assert len({(chunk.window, chunk.window_samples, chunk.window_end) for chunk in together}) == 1


@settings(deadline=None)
@given(st.integers(1, 300), SIZES, LIMITS, WORLD_SIZES)
def test_a_window_is_cut_as_the_plan_says(total: int, size: int, limit: int, world_size: int) -> None:
    """Full windows have the plan's chunks, the ragged one the fewest that hold its samples."""
    plan = epoch_plan(RegularWindows(total, size), size, limit, world_size)
    assert plan.length is not None
    for window, start in enumerate(range(0, total, size)):
        samples = min(size, total - start)
        chunks = cut_window(samples, micro_batch=limit, world_size=world_size)
        if samples == size and start + size < total:
            shares = split_evenly(size, world_size)
            chunks = tuple(split_evenly(share, plan.factor) for share in shares)
        first = plan.starts_at(window)
        ours = [
            [chunk_of(plan, first + i, rank).count for i in range(plan.factor_of(window))] for rank in range(world_size)
        ]
        assert [tuple(rank) for rank in ours] == list(chunks)


@settings(deadline=None)
@given(st.integers(0, 300), SIZES, LIMITS, WORLD_SIZES, st.booleans(), st.integers(0, 300))
def test_the_epoch_is_as_long_as_what_it_yields(
    total: int, size: int, limit: int, world_size: int, drop_last: bool, done: int
) -> None:
    """``length`` counts the micro-batches up to the end of the last window, and each window's end is right."""
    done = min(done, total)
    plan = epoch_plan(RegularWindows(total, size, drop_last, done), size, limit, world_size)
    assert plan.length is not None
    assert plan.windows.count is not None
    steps = chunks_of(plan)
    assert plan.length == plan.done + len(steps) == plan.starts_at(plan.windows.count)
    seen = done
    for together in steps:
        seen += sum(chunk.count for chunk in together)
        assert seen <= together[0].window_end
    assert not steps or seen == steps[-1][0].window_end


@settings(deadline=None)
@given(st.integers(1, 300), SIZES, LIMITS, WORLD_SIZES, st.integers(0, 300))
def test_samples_are_counted_after_each_micro_batch(
    total: int, size: int, limit: int, world_size: int, done: int
) -> None:
    """``samples_after`` is the number of samples that all ranks together have really done by then."""
    done = min(done, total)
    plan = epoch_plan(RegularWindows(total, size, samples_done=done), size, limit, world_size)
    running = done
    for index, together in enumerate(chunks_of(plan), start=plan.done):
        running += sum(chunk.count for chunk in together)
        assert samples_after(plan, index) == running


@settings(deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 5), st.data())
def test_batches_that_are_not_to_be_mixed_are_cut_each_by_itself(
    sizes: list[int], per_window: int, pieces: int, data: st.DataObject
) -> None:
    """Into as many near-equal pieces, wherever an earlier run has stopped."""
    ends = [0, *accumulate(sizes)]
    done = data.draw(st.sampled_from(ends))
    windows = GivenWindows.of(sizes, per_window=per_window, samples_done=done)
    plan = EpochPlan(windows, 1, per_window * pieces, 1, cut=WithinBatches(ends, pieces))
    assert plan.length is not None
    chunks = [chunk_of(plan, index, 0) for index in range(plan.done, plan.length)]
    left = [size for size, end in zip(sizes, ends[1:]) if end > done]
    assert [chunk.count for chunk in chunks] == [count for size in left for count in split_evenly(size, pieces)]
    assert [i for chunk in chunks for i in range(chunk.start, chunk.start + chunk.count)] == list(range(done, ends[-1]))
    waits = [*(not after.count for after in chunks[1:]), False]  # for an empty one, which completes the batch
    for index, (chunk, more) in enumerate(zip(chunks, waits), start=plan.done):
        assert samples_after(plan, index) == chunk.start + chunk.count - more
        assert windows.span(chunk.window)[0] <= chunk.start <= chunk.start + chunk.count <= chunk.window_end


def test_full_chunks_leave_the_rest_to_the_last() -> None:
    """As the recipe's own batches are, on one rank."""
    plan = EpochPlan(RegularWindows(10, 10), micro_batch=4, factor=3, world_size=1, cut=FullChunks())
    assert [(chunk.start, chunk.count, chunk.done) for chunk in plan.chunks(0, 0)] == [(0, 4, 4), (4, 4, 8), (8, 2, 10)]
    assert GivenWindows((0, 8, 10)).batches([0, 3, 8, 10]) == [[3, 5], [2]]


@settings(deadline=None)
@given(SIZES, LIMITS, WORLD_SIZES, st.integers(0, 100))
def test_a_stream_has_full_windows_without_end(size: int, limit: int, world_size: int, index: int) -> None:
    """Of a stream of unknown length nothing is known but that windows follow one another."""
    plan = epoch_plan(RegularWindows(None, size), size, limit, world_size)
    assert (plan.length, plan.windows.count) == (None, None)
    counts = [chunk_of(plan, index, rank).count for rank in range(world_size)]
    window, position = divmod(index, plan.factor)
    shares = split_evenly(max(size, 0), world_size)
    assert counts == [split_evenly(share, plan.factor)[position] for share in shares]
    assert chunk_of(plan, index, 0).window_end == (window + 1) * size


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 50))
def test_one_part_is_found_without_the_others(total: int, parts: int) -> None:
    """``part`` gives start and size of what ``split_evenly`` lists."""
    sizes = split_evenly(total, parts)
    starts = [0, *accumulate(sizes)]
    assert [part(total, parts, index) for index in range(parts)] == list(zip(starts, sizes))


@pytest.mark.parametrize("samples_done", [3, 10, 12])
def test_an_epoch_that_was_finished_yields_nothing_more(samples_done: int) -> None:
    """Even where the earlier run used other windows, or more samples than there are now."""
    total = min(samples_done, 10)
    for windows in (
        RegularWindows(total, 4, samples_done=samples_done),
        GivenWindows.of([total], per_window=2, samples_done=samples_done),
    ):
        plan = epoch_plan(windows, 4, 2, 1)
        assert plan.done == plan.length
