"""The windows of an epoch and their micro-batches, against the list of samples that they must make up."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_ga.plan.accumulation import ceil_div
from lightning_ga.plan.windows import EpochPlan, GrowingWindows, RegularWindows

TOTALS = st.integers(0, 90)
SIZES = st.integers(1, 40)
WORLD_SIZES = st.integers(1, 4)


def plain(total: int, sizes: list[int], done: int) -> list[list[int]]:
    """The plain way: slices of the order, from where an earlier run has ended; sizes are repeated."""
    windows, start = [], min(done, total)
    while start < total:
        size = sizes[len(windows) % len(sizes)]
        windows.append(list(range(start, min(start + size, total))))
        start += size
    return windows


def check(plan: EpochPlan, expected: list[list[int]]) -> None:
    """Each sample is in one micro-batch of its window, ranks step together, and no micro-batch is too large."""
    assert plan.count - plan.done == len(expected)
    passes = plan.done * plan.factor  # the loop counts windows that are done with the factor of now
    for number, samples in enumerate(expected, start=plan.done):
        windows = [plan.window(number, rank) for rank in range(plan.world_size)]
        assert {(each.index, each.start, each.samples, each.end) for each in windows} == {
            (number, samples[0], len(samples), samples[-1] + 1)
        }
        assert {len(each.sizes) for each in windows} == {plan.factor_of(number)}
        shares = [sum(each.sizes) for each in windows]
        assert max(shares) - min(shares) <= 1
        assert all(max(each.sizes) - min(each.sizes) <= 1 for each in windows)
        assert max(map(max, (each.sizes for each in windows))) <= plan.micro_batch
        assert (plan.factor_of(number) - 1) * plan.micro_batch < max(shares)  # the fewest
        found = [
            place
            for each in windows
            for position, size in enumerate(each.sizes)
            for place in plan.places(each, position)
            if size
        ]
        assert found == samples
        passes += len(windows[0].sizes)
    assert plan.length == passes


@given(TOTALS, SIZES, st.integers(1, 9), WORLD_SIZES, TOTALS, st.integers(0, 5))
def test_windows_of_one_size(total, size, micro_batch, world_size, done, windows_done):
    """From any place on, on any hardware; only the last is smaller, and has as many micro-batches as it needs."""
    done = min(done, total)
    windows = RegularWindows(total, size, done, windows_done)
    plan = EpochPlan(windows, micro_batch, world_size)
    expected = plain(total, [size], done)
    check(plan, expected)
    assert all(plan.factor_of(window) == plan.factor for window in range(plan.done, plan.count - 1))
    assert not expected or plan.factor_of(plan.count - 1) <= plan.factor


@given(TOTALS, st.lists(SIZES, min_size=1, max_size=5), st.integers(1, 9), WORLD_SIZES, TOTALS)
def test_windows_that_a_schedule_sizes(total, sizes, micro_batch, world_size, done):
    """Each has its own number of micro-batches; the schedule is asked by windows and samples of the epoch."""
    done, asked = min(done, total), []

    def size_at(window: int, start: int) -> int:
        asked.append((window, start))
        return sizes[(window - 2) % len(sizes)]

    windows = GrowingWindows(total, size_at, done, 2)
    plan = EpochPlan(windows, micro_batch, world_size)
    expected = plain(total, sizes, done)
    check(plan, expected)
    assert asked[: len(expected)] == [(2 + number, samples[0]) for number, samples in enumerate(expected)]
    assert plan.factor >= max((plan.factor_of(2 + k) for k in range(len(expected))), default=1)


def test_a_rank_without_a_sample_gets_a_stand_in() -> None:
    """The last sample of the window, with a size of 0: a weight of 0."""
    plan = EpochPlan(RegularWindows(10, 8), micro_batch=2, world_size=4)
    windows = [plan.window(1, rank) for rank in range(4)]
    assert [each.sizes for each in windows] == [(1,), (1,), (0,), (0,)]
    assert [list(plan.places(each, 0)) for each in windows] == [[8], [9], [9], [9]]


@given(st.integers(1, 90), SIZES, st.integers(1, 30), WORLD_SIZES, st.integers(1, 9))
def test_micro_batches_are_multiples_if_the_window_allows(total, size, micro_batch, world_size, multiple):
    """All but the last of a window; each sample is in one, none is too large, and they are the fewest."""
    plan = EpochPlan(RegularWindows(total, size), micro_batch, world_size, multiple)
    most = micro_batch - micro_batch % multiple if micro_batch >= multiple else micro_batch
    for number in range(plan.count):
        windows = [plan.window(number, rank) for rank in range(world_size)]
        sizes = [each for window in windows for each in window.sizes]
        places = [
            place for each in windows for at, size in enumerate(each.sizes) if size for place in plan.places(each, at)
        ]
        assert places == list(range(windows[0].start, windows[0].end))
        assert max(sizes) <= most
        assert (plan.factor_of(number) - 1) * most < max(sum(each.sizes) for each in windows)
        many = ceil_div(windows[0].samples, multiple)  # multiples in the window
        if micro_batch >= multiple and many >= world_size:
            odd = [each for each in sizes if each % multiple]
            assert len(odd) == (windows[0].samples % multiple > 0)
            full = [each for each in sizes if each]  # others are stand-ins
            assert max(full) - min(full) < 3 * multiple


@given(TOTALS, SIZES, st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 3))
def test_unequal_shares_are_in_proportion(total, size, limits, multiple):
    """Each sample is in one micro-batch within its rank's limit; a share is off by less than two multiples."""
    limits = tuple(limits)
    ranks = range(len(limits))
    plans = [
        EpochPlan(RegularWindows(total, size), limits[rank], len(limits), multiple, limits, rank) for rank in ranks
    ]
    for number in range(plans[0].count):
        windows = [plan.window(number, rank) for rank, plan in enumerate(plans)]
        places = []
        for plan, window, limit in zip(plans, windows, limits):
            assert max(window.sizes) <= limit
            assert len(window.sizes) == plan.factor_of(number)
            ideal = window.samples * limit / sum(limits)
            assert abs(sum(window.sizes) - ideal) < 2 * multiple
            places += [place for at, some in enumerate(window.sizes) if some for place in plan.places(window, at)]
        assert places == list(range(windows[0].start, windows[0].end))
