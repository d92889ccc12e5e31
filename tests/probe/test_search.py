"""The search, on fake devices whose limit is known."""

from collections.abc import Callable
from dataclasses import replace
from math import isqrt
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import CONSTANT_OR_GROWING, SQUARES, UNFORESEEN, FakeDevice, Size, linear, streams

from lightning_ga.memory.segments import MIB, SegmentRules
from lightning_ga.memory.trace import MemoryTrace, canonical
from lightning_ga.plan.records import Trial
from lightning_ga.probe.curve import Step, fit_curve
from lightning_ga.probe.search import MOST_TRIALS, Search
from lightning_ga.probe.trace_sizes import Task, affordable_samples, trace_sizes

EXAMPLES = settings().max_examples


def step(trial: Trial, trace: MemoryTrace | None) -> Step:
    return Step(trial, () if trace is None else (trace,))


def run(device: Callable[[int], tuple[Trial, MemoryTrace | None]], search: Search) -> Search:
    while (size := search.propose()) != search.limit:
        assert size < search.ceiling
        search.record(step(*device(size)))
    return search


@settings(deadline=None, max_examples=3 * EXAMPLES)
@given(streams(CONSTANT_OR_GROWING), st.integers(8, 400), st.data())
def test_aligned_streams_take_three_steps(stream: tuple[list[Size], list[int]], high: int, data: st.DataObject) -> None:
    """Two traces and one trial, which is the limit; nothing that does not fit is ever run."""
    device = FakeDevice(stream, 0)
    device.budget = data.draw(st.integers(device.trace(8).peak(), device.trace(high + 20).peak() + 1))
    search = run(device, Search(Task(high, device.budget)))
    assert search.limit == device.limit(high)
    assert device.tried[:2] == [4, 8]
    assert len(device.tried) <= 3
    assert search.ceiling == high + 1


def foresees_a_failure(search: Search, device: FakeDevice) -> bool:
    """Whether the limit fits, and the replay of what was recorded says that one more sample does not."""
    fits = device.trace(search.limit).peak() <= device.budget if search.limit else True
    return fits and search.method == "replay" and search.predict(search.limit + 1) > device.budget


@settings(deadline=None, max_examples=4 * EXAMPLES)
@given(
    streams(st.one_of(CONSTANT_OR_GROWING, SQUARES, UNFORESEEN)),
    st.integers(1, 600),
    st.booleans(),
    st.sampled_from([(4, 8), (2, 4), (2, 3)]),
    st.data(),
)
def test_the_limit_is_always_found(
    stream: tuple[list[Size], list[int]],
    high: int,
    traced: bool,
    sizes: tuple[int, int],
    data: st.DataObject,
) -> None:
    """Aligned or not, foreseen or not: the limit was tried and fits, and one more sample does not fit.

    Or it is foreseen not to, by a curve that was right to the byte so far: a storage may hide below the peak.
    """
    device = FakeDevice(stream, 0, traced=traced)
    device.budget = data.draw(st.integers(0, device.trace(high + 20).peak() + 1))
    search = run(device, Search(Task(high, device.budget), sizes if high > 3 else trace_sizes(high, 10**9)))
    assert search.limit == device.limit(high) or foresees_a_failure(search, device)
    assert not search.limit or search.limit in device.tried
    assert len(device.tried) == len(set(device.tried)) <= 25


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=400), st.integers(0, 10**6))
def test_any_rising_peaks_without_traces(peaks: list[int], budget: int) -> None:
    peaks = sorted(peaks)
    tried = []

    def device(samples: int) -> tuple[Trial, None]:
        tried.append(samples)
        return Trial(samples, peaks[samples - 1], peaks[samples - 1] <= budget, 0.0), None

    search = run(device, Search(Task(len(peaks), budget), trace_sizes(len(peaks), 10**9)))
    assert search.limit == sum(peak <= budget for peak in peaks)
    assert search.method == "bracket"
    assert len(tried) <= 25


@pytest.mark.parametrize(
    ("slope", "budget", "traced", "high", "tried", "limit", "method"),
    [
        pytest.param(10, 1005, True, 512, [4, 8, 90], 90, "replay", id="aligned"),
        pytest.param(10, 1005, True, 64, [4, 8, 64], 64, "replay", id="all fits"),
        pytest.param(10, 185, True, 512, [4, 8, 6], 8, "replay", id="limit is a traced size"),
        pytest.param(10, 1005, False, 512, [4, 8, 90, 91], 90, "bracket", id="not aligned"),
        pytest.param(10, 165, True, 512, [4, 8, 6, 5], 6, "replay", id="second trace too large"),
        pytest.param(10, 135, True, 512, [4, 2, 3], 3, "bracket", id="first trace too large"),
        pytest.param(10, 115, True, 512, [4, 2, 1], 1, "bracket", id="one sample"),
        pytest.param(10, 105, True, 512, [4, 2, 1], 0, "bracket", id="nothing fits"),
    ],
)
def test_sequence_of_trials(
    slope: int, budget: int, traced: bool, high: int, tried: list[int], limit: int, method: str
) -> None:
    device = FakeDevice(linear(100, slope), budget, traced=traced)
    search = run(device, Search(Task(high, budget)))
    assert (device.tried, search.limit, search.method) == (tried, limit, method)


def test_a_device_that_holds_back_memory_is_approached_from_above_in_small_steps() -> None:
    """Fragmentation: the allocator gives out 5 % less than the budget that the prediction aims at."""
    device = FakeDevice(linear(0, 10), 9500)
    search = run(device, Search(Task(5000, 10_000)))
    assert search.limit == 950
    assert device.tried[:5] == [4, 8, 1000, 980, 960]
    assert len(device.tried) <= 11


class Allocator(FakeDevice):
    """Reserves more than it hands out, by ``holes`` at every size; the budget bounds what it reserves."""

    def __init__(self, stream: tuple[list[Size], list[int]], budget: int, holes: Callable[[int], float]) -> None:
        super().__init__(stream, budget)
        self.holes = holes

    def reserved(self, samples: int) -> int:
        return int(self.trace(samples).peak(512) * (1 + self.holes(samples)))

    def search(self, high: int, sizes: tuple[int, ...] = (4, 8)) -> Search:
        search = Search(Task(high, self.budget, rounding=512), sizes)
        while (size := search.propose()) != search.limit:
            self.tried.append(size)
            fits, trace = self.reserved(size) <= self.budget, self.trace(size)
            traces = [trace] if search.wants_trace and fits else []
            peak = min(trace.peak(512), self.reserved(size))  # a large step may take less than small ones lead to
            trial = Trial(size, peak if fits else self.budget + 1, fits, 0.0)
            search.record(Step(trial, tuple(traces), self.reserved(size) if fits else None))
        return search

    def failed(self) -> int:
        return sum(self.reserved(size) > self.budget for size in self.tried)


@pytest.mark.parametrize("budget", [10**7, 3 * 10**8, 5 * 10**9])
@pytest.mark.parametrize("holes", [-0.1, -0.03, 0.0, 0.01, 0.03, 0.06])
def test_what_an_allocator_reserved_for_a_large_step_corrects_the_prediction(holes: float, budget: int) -> None:
    """Small steps say nothing of it: with the warm-up, six steps at most, and a step on the way tells in time."""
    device = Allocator(linear(10**6, 10**4), budget, lambda samples: holes if samples > 16 else 0.0)
    search = device.search(10**7)
    limit = int((budget / (1 + holes) - 10**6) / 10**4)
    assert 0.98 * limit <= search.limit <= limit + 1
    assert search.limit in device.tried
    assert 1 + len(device.tried) <= 6
    assert device.failed() == 0


@settings(deadline=None, max_examples=3 * EXAMPLES)
@given(
    streams(st.one_of(CONSTANT_OR_GROWING, SQUARES, UNFORESEEN)),
    st.integers(8, 2000),
    st.lists(st.floats(-0.2, 1.0), min_size=1, max_size=20),
    st.sampled_from([(2, 3), (4, 8), (30, 60)]),
    st.data(),
)
def test_where_sizes_are_not_exact_the_search_is_bounded(
    stream: tuple[list[Size], list[int]],
    high: int,
    holes: list[float],
    sizes: tuple[int, int],
    data: st.DataObject,
) -> None:
    """Whatever is reserved: few trials, none twice, and the answer is one that was tried and fits."""
    device = Allocator(stream, 0, lambda samples: holes[samples % len(holes)])
    device.budget = data.draw(st.integers(0, device.trace(high + 20).peak(512) + 1))
    search = device.search(high, sizes if high >= 60 else (2, 3))
    assert len(device.tried) == len(set(device.tried))
    fitting = [size for size in device.tried if device.reserved(size) <= device.budget]
    assert search.limit == max(fitting, default=0)
    assert device.failed() <= MOST_TRIALS
    assert len(device.tried) <= (MOST_TRIALS if fitting else 1 + high.bit_length())


def test_where_temporaries_may_have_ended_growing_a_step_near_the_limit_is_recorded() -> None:
    """It tells that they have, where two small ones lead to two thirds of what fits."""
    budget, tried, recorded = 2 * 10**8, [], []

    def device(samples: int) -> tuple[MemoryTrace, MemoryTrace]:
        sizes = (10**6, 10**5 * samples, min(2 * 10**5 * samples, 2 * 10**7), 10**5 * samples)
        blocks = MemoryTrace(samples, sizes, (0, 1, 2, ~2, 3, ~1, ~3), addresses=(0, 1, 2, 3))
        tensors = MemoryTrace(samples, sizes[:2] + sizes[3:], (0, 1, 2, ~1, ~2), addresses=(0, 1, 3))
        return blocks, replace(tensors, handed_out=(0, 1, 3))

    search = Search(Task(10**6, budget, rounding=512), (60, 90))
    while (size := search.propose()) != search.limit:
        tried.append(size)
        blocks, tensors = device(size)
        peak = blocks.peak(512)
        wants = search.wants_trace
        recorded += [size] if wants else []
        search.record(Step(Trial(size, peak, peak <= budget, 0.0), (blocks, tensors) if wants else ()))
    assert recorded == tried[:3]
    assert tried[:2] == [60, 90]
    assert 650 <= tried[2] <= 663
    assert len(tried) == 4
    assert 0.99 * 995 <= search.limit <= 995
    assert search.ceiling == 10**6 + 1


def test_a_first_trace_that_does_not_fit_is_followed_by_small_ones() -> None:
    """Squares that no warm-up shows: one failure, then sizes that fit for sure, yet show the squares."""
    device = Allocator(([lambda b: 10**6 + 100 * b, lambda b: 1000 * b * b], [0, 1, ~1]), 10**9, lambda samples: 0.0)
    search = device.search(10**6, sizes=(5000, 10_000))
    assert device.tried[:4] == [5000, 35, 70, 503]
    assert 1 + len(device.tried) <= 6
    assert 0.98 * 999 <= search.limit <= 999
    assert device.failed() == 1


def test_curves_that_nothing_foresees_are_not_walked_along() -> None:
    """Exact to the byte, but flat where the last two steps lead on to one sample more again and again."""
    tried: list[int] = []

    def device(samples: int) -> tuple[Trial, None]:
        tried.append(samples)
        peak = 900 + isqrt(samples) // 8
        return Trial(samples, peak, peak <= 1000, 0.0), None

    search = run(device, Search(Task(10**7, 1000)))
    assert search.limit == 808**2 - 1
    assert len(tried) <= 60


@pytest.mark.parametrize(
    ("affordable", "high", "sizes"),
    [
        pytest.param(10**6, 10**6, (125_000, 250_000), id="a quarter of what may fit"),
        pytest.param(10**6, 100, (25, 50), id="half of what is of use"),
        pytest.param(40, 10**6, (5, 10), id="little memory"),
        pytest.param(35, 10**6, (4, 8), id="as on a CPU"),
        pytest.param(5, 10**6, (2, 4), id="very little memory"),
        pytest.param(0, 10**6, (2, 3), id="hardly any"),
        pytest.param(10**6, 3, (2, 3), id="hardly any use"),
    ],
)
def test_traces_of_an_accelerator_are_large_where_that_is_safe(
    affordable: int, high: int, sizes: tuple[int, ...]
) -> None:
    assert trace_sizes(high, affordable, kernels_vary=True) == sizes


def test_what_is_affordable_is_bounded_by_all_that_was_seen() -> None:
    """Only what passes allocate and release grows; the optimizer's and the allocator's own part comes once."""
    live = MemoryTrace(2, (100, 8, 16), (0, 1, ~1, 2, ~2), marks=(3,))
    whole = MemoryTrace(2, (100, 8, 20), (0, 1, 2, ~1, ~2))
    assert affordable_samples([live], 116) == 25
    assert affordable_samples([whole, live], 128) == 25
    assert affordable_samples([whole, live], 150, taken=50) == 25
    assert affordable_samples([replace(live, marks=())], 116) == 12
    assert affordable_samples([MemoryTrace(2, (100,), (0,))], 150, taken=50) == 4


def test_memory_that_the_traces_do_not_see_is_added() -> None:
    """A workspace outside tensors: the measured peaks are above the replayed ones."""
    inner = FakeDevice(linear(100, 10), 10**9)

    def device(samples: int) -> tuple[Trial, MemoryTrace | None]:
        trial, trace = inner(samples)
        peak = trial.peak_bytes + 50 + 2 * samples
        return Trial(samples, peak, peak <= 1350, 0.0), trace if peak <= 1350 else None

    search = run(device, Search(Task(512, 1350)))
    assert (inner.tried, search.limit, search.method) == ([4, 8, 100], 100, "replay")


@settings(deadline=None, max_examples=2 * EXAMPLES)
@given(
    st.lists(streams(st.one_of(CONSTANT_OR_GROWING, UNFORESEEN)), min_size=2, max_size=3),
    st.integers(4, 300),
    st.data(),
)
def test_ranks_run_the_same_sizes_and_end_at_the_smallest_limit(
    ranks: list[tuple[list[Size], list[int]]], high: int, data: st.DataObject
) -> None:
    devices = [FakeDevice(stream, 0) for stream in ranks]
    for device in devices:
        device.budget = data.draw(st.integers(device.trace(1).peak(), device.trace(high).peak() + 1))
    draw_sizes = st.sampled_from([(4, 8), (2, 3)])
    searches = [Search(Task(high, device.budget), data.draw(draw_sizes)) for device in devices]
    while (size := min(search.propose() for search in searches)) != searches[0].limit:
        outcomes = [device(size) for device in devices]
        fits = all(trial.fits for trial, _ in outcomes)
        for search, (trial, trace) in zip(searches, outcomes):
            search.record(step(Trial(size, trial.peak_bytes, fits, 0.0), trace if fits else None))
    (limit,) = {search.limit for search in searches}
    foreseen = any(foresees_a_failure(*pair) for pair in zip(searches, devices))
    assert limit == min(device.limit(high) for device in devices) or foreseen


@pytest.mark.parametrize(
    ("stream", "tried", "limit"),
    [(linear(100, 10), [4, 8], 100), (([lambda b: b * b], [0]), [4, 8, 16], 104)],
    ids=["affine", "a square, which a third trace checks"],
)
def test_predict_only_tries_small_sizes_and_nothing_else(stream: Any, tried: list[int], limit: int) -> None:
    device = FakeDevice(stream, 10_900 if len(tried) > 2 else 1105)
    search = run(device, Search(Task(512, device.budget, closest=1.0)))
    assert (device.tried, search.predicted, search.method) == (tried, limit, "prediction")


def test_squares_are_checked_with_a_third_trace_before_the_limit_is_tried() -> None:
    """Two traces cannot tell a similarity matrix from sizes that vary."""
    squares = FakeDevice(([lambda b: b * b], [0]), 10_050)
    assert run(squares, Search(Task(512, 10_050))).limit == 100
    assert squares.tried == [4, 8, 16, 100]
    varying = FakeDevice(([lambda b: 16 if b < 8 else 40 * b - 256], [0]), 10_050)  # at 4 and 8 also b * b
    search = run(varying, Search(Task(5000, 10_050)))
    assert (search.limit, search.ceiling) == (257, 258)
    assert varying.tried[:3] == [4, 8, 16]


def test_the_curve_is_predicted_beyond_the_limit() -> None:
    """For a plot: rising, with the limit and one more, below and above the budget."""
    search = run(FakeDevice(linear(100, 10), 1005), Search(Task(512, 1005)))
    curve = search.curve(search.limit)
    assert curve[0] == (1, 110)
    assert {(90, 1000), (91, 1010)} < set(curve)
    assert curve[-1][0] == 112
    assert list(curve) == sorted(set(curve))
    assert run(FakeDevice(linear(100, 10), 1005, traced=False), Search(Task(512, 1005))).curve(90) == ()


def test_predict_only_without_alignment_stays_far_below_the_budget() -> None:
    """Twice the samples could take four times the memory, so steps become smaller and smaller."""
    device = FakeDevice(linear(0, 10), 10_000, traced=False)
    search = run(device, Search(Task(5000, 10_000, closest=1.0)))
    assert device.tried[:7] == [4, 8, 16, 32, 64, 128, 256]
    assert (search.predicted, search.method) == (device.tried[-1], "below")
    assert 900 <= search.predicted <= 1000
    assert len(device.tried) <= 12
    careful = FakeDevice(linear(0, 10), 10_000, traced=False)
    search = run(careful, Search(Task(5000, 10_000, closest=0.25)))
    assert 220 <= search.predicted <= 250


@settings(deadline=None, max_examples=3 * EXAMPLES)
@given(streams(st.one_of(CONSTANT_OR_GROWING, SQUARES)), st.integers(8, 400), st.data())
def test_what_is_approached_from_below_never_runs_out_of_memory(
    stream: tuple[list[Size], list[int]], high: int, data: st.DataObject
) -> None:
    """Streams that never align: every step is safe as long as nothing grows faster than the square."""

    class Unaligned(FakeDevice):
        def trace(self, samples: int) -> MemoryTrace:
            plain = super().trace(samples)
            return MemoryTrace(
                samples,
                (*plain.sizes, *[0] * samples),
                (*plain.events, *range(len(plain.sizes), len(plain.sizes) + samples)),
            )

    device = Unaligned(stream, 0)
    device.budget = data.draw(st.integers(device.trace(8).peak(), device.trace(high + 20).peak() + 1))
    search = run(device, Search(Task(high, device.budget, closest=1.0)))
    assert search.ceiling == high + 1
    assert search.predicted <= device.limit(high)


def test_peaks_by_phase_where_streams_do_not_align() -> None:
    """One sample at a time, under an optimizer that leads for small batches: each phase has its own line."""
    tried = []

    def device(samples: int) -> tuple[Trial, MemoryTrace | None]:
        tried.append(samples)
        sizes = (100, *[10] * samples, 1000)
        loop = range(1, samples + 1)
        events = (0, *loop, *(~n for n in reversed(loop)), samples + 1, ~(samples + 1))
        trace = MemoryTrace(samples, sizes, canonical(events), marks=(2 * samples + 1,))
        return Trial(samples, trace.peak(), trace.peak() <= 2000, 0.0), trace

    search = run(device, Search(Task(1000, 2000)))
    assert (tried, search.limit, search.method) == ([4, 8, 190, 191], 190, "phases")


def test_a_step_that_took_hardly_less_than_foreseen_leaves_the_curve_as_it_is() -> None:
    """Where a curve is nearly flat, a percent of the bytes would be many samples; one that took much less counts."""
    traces = [MemoryTrace(size, (0, 30 * MIB * size), (0, 1, ~1)) for size in (2, 4)]
    steps = [Step(Trial(trace.samples, trace.peak(512), True, 0.0), (trace,)) for trace in traces]
    curve = fit_curve(steps, 512, rules=SegmentRules())
    assert curve is not None
    assert curve.needs(10) == 300 * MIB
    for reserved, needed in ((300, 360), (297, 360), (240, 300), (360, 440)):
        through = curve.through(Step(Trial(10, reserved * MIB, True, 0.0), (), reserved * MIB))
        assert through.needs(12) // MIB == needed
