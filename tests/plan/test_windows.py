"""The micro-batches of an epoch, against the list of samples that they must make up."""

from dataclasses import replace
from itertools import accumulate

from epoch_chunks import chunk_of, samples_after
from hypothesis import given
from hypothesis import strategies as st

from lightning_ga.plan.accumulation import split_evenly
from lightning_ga.plan.windows import EpochPlan, GivenWindows, GrowingEpoch, GrowingWindows, WithinBatches

SIZES = st.integers(1, 40)


def cut(samples: range, size: int, *, drop_last: bool = False) -> list[list[int]]:
    """The plain way: slices of the order."""
    windows = [list(samples[start : start + size]) for start in range(0, len(samples), size)]
    return windows[:-1] if drop_last and windows and len(windows[-1]) < size else windows


@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 5), st.data())
def test_batches_that_are_not_to_be_mixed_are_cut_each_by_itself(sizes, per_window, pieces, data):
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


def test_another_cut_of_growing_windows_counts_its_own_micro_batches() -> None:
    """A copy shares no count with the plan that it is made of."""
    plan = GrowingEpoch(GrowingWindows(20, lambda window, start: 8), micro_batch=4, factor=2, world_size=1)
    assert [plan.starts_at(window) for window in range(4)] == [0, 2, 4, 5]
    other = replace(plan, micro_batch=2, factor=4)
    assert [other.starts_at(window) for window in range(4)] == [0, 4, 8, 10]
    assert [plan.starts_at(window) for window in range(4)] == [0, 2, 4, 5]
