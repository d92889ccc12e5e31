"""The search, on fake devices whose limit is known."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from streams import CONSTANT_OR_GROWING, SQUARES, UNFORESEEN, FakeDevice, Size, streams

from lightning_ga.memory.allocator_segments import MIB
from lightning_ga.memory.trace import MemoryTrace
from lightning_ga.plan.records import Trial
from lightning_ga.probe.curve import Step, fit_curve
from lightning_ga.probe.search import MOST_TRIALS, Search
from lightning_ga.probe.steps_to_record import Task, most_bytes, trace_sizes

EXAMPLES = settings().max_examples


def step(trial: Trial, trace: MemoryTrace | None) -> Step:
    return Step(trial, () if trace is None else (trace,))


def run(device: Callable[[int], tuple[Trial, MemoryTrace | None]], search: Search) -> Search:
    while (size := search.propose()[0]) != search.limit:
        assert size < search.ceiling
        search.record(step(*device(size)))
    return search


def foresees_a_failure(search: Search, device: FakeDevice) -> bool:
    """Whether the limit fits, and the replay of what was recorded says that one more sample does not."""
    fits = device.trace(search.limit).peak() <= device.budget if search.limit else True
    return fits and search.method == "replay" and search.predict(search.limit + 1) > device.budget


@settings(max_examples=2 * EXAMPLES)
@given(
    streams(st.one_of(CONSTANT_OR_GROWING, SQUARES, UNFORESEEN)),
    st.integers(1, 600),
    st.booleans(),
    st.sampled_from([(4, 8), (2, 4), (2, 3)]),
    st.data(),
)
def test_the_limit_is_always_found(stream, high, traced, sizes, data):
    """Aligned or not, foreseen or not: the limit was tried and fits, and one more sample does not fit."""
    device = FakeDevice(stream, 0, traced=traced)
    device.budget = data.draw(st.integers(0, device.trace(high + 20).peak() + 1))
    search = run(device, Search(Task(high, device.budget), sizes if high > 3 else trace_sizes(high, 10**9)))
    assert search.limit == device.limit(high) or foresees_a_failure(search, device)
    assert not search.limit or search.limit in device.tried
    assert len(device.tried) == len(set(device.tried)) <= 25


def test_a_first_step_that_is_as_later_ones_is_one_of_two_traces():
    assert trace_sizes(100, 100, traced=True) == (2, 4)
    assert trace_sizes(100, 3, traced=True) == (2, 3)


def test_traces_lie_apart_as_far_as_there_is_room():
    assert trace_sizes(100, 100) == (4, 8)
    assert trace_sizes(100, 7) == trace_sizes(4, 100) == (2, 4)
    assert trace_sizes(100, 3) == trace_sizes(3, 100) == (2, 3)


class Allocator(FakeDevice):
    """Reserves more than it hands out, by ``holes`` at every size; the budget bounds what it reserves."""

    def __init__(self, stream: tuple[list[Size], list[int]], budget: int, holes: Callable[[int], float]) -> None:
        super().__init__(stream, budget)
        self.holes = holes

    def reserved(self, samples: int) -> int:
        return int(self.trace(samples).peak(512) * (1 + self.holes(samples)))

    def search(self, high: int, sizes: tuple[int, ...] = (4, 8)) -> Search:
        search = Search(Task(high, self.budget, rounding=512), sizes)
        while (proposal := search.propose())[0] != search.limit:
            size, record = proposal
            self.tried.append(size)
            fits, trace = self.reserved(size) <= self.budget, self.trace(size)
            traces = [trace] if record and fits else []
            peak = min(trace.peak(512), self.reserved(size))  # a large step may take less than small ones lead to
            trial = Trial(size, peak if fits else self.budget + 1, fits, 0.0)
            search.record(Step(trial, tuple(traces), self.reserved(size) if fits else None))
        return search

    def failed(self) -> int:
        return sum(self.reserved(size) > self.budget for size in self.tried)


@settings(max_examples=2 * EXAMPLES)
@given(
    streams(st.one_of(CONSTANT_OR_GROWING, SQUARES, UNFORESEEN)),
    st.integers(8, 2000),
    st.lists(st.floats(-0.2, 1.0), min_size=1, max_size=20),
    st.sampled_from([(2, 3), (4, 8), (30, 60)]),
    st.data(),
)
def test_where_sizes_are_not_exact_the_search_is_bounded(stream, high, holes, sizes, data):
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
    while (proposal := search.propose())[0] != search.limit:
        size, wants = proposal
        tried.append(size)
        blocks, tensors = device(size)
        peak = blocks.peak(512)
        recorded += [size] if wants else []
        search.record(Step(Trial(size, peak, peak <= budget, 0.0), (blocks, tensors) if wants else ()))
    assert recorded == tried[:3]
    assert tried[:2] == [60, 90]
    assert 650 <= tried[2] <= 663
    assert len(tried) == 4
    assert 0.99 * 995 <= search.limit <= 995
    assert search.ceiling == 10**6 + 1


def test_a_first_trace_that_does_not_fit_is_followed_by_small_ones() -> None:
    device = Allocator(([lambda b: 10**6 + 100 * b, lambda b: 1000 * b * b], [0, 1, ~1]), 10**9, lambda samples: 0.0)
    search = device.search(10**6, sizes=(5000, 10_000))
    assert device.tried[:4] == [5000, 35, 70, 996]
    assert 1 + len(device.tried) <= 6
    assert 0.98 * 999 <= search.limit <= 999
    assert device.failed() == 1


@given(streams(st.one_of(CONSTANT_OR_GROWING, SQUARES)), st.integers(8, 400), st.data())
def test_what_is_approached_from_below_never_runs_out_of_memory(stream, high, data):
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
    search = run(device, Search(Task(high, device.budget, is_cautious=True), (4, 8)))
    assert search.ceiling == high + 1
    assert search.predicted <= device.limit(high)


def test_a_step_that_took_hardly_less_than_foreseen_leaves_the_curve_as_it_is() -> None:
    """Where a curve is nearly flat, a percent of the bytes would be many samples; one that took much less counts."""
    traces = [MemoryTrace(size, (0, 30 * MIB * size), (0, 1, ~1)) for size in (2, 4)]
    steps = [Step(Trial(trace.samples, trace.peak(512), True, 0.0), (trace,)) for trace in traces]
    curve = fit_curve(steps, 512, in_segments=True)
    assert curve is not None
    assert curve.needs(10) == 300 * MIB
    for reserved, needed in ((300, 360), (297, 360), (240, 300), (360, 440)):
        through = curve.through(Step(Trial(10, reserved * MIB, True, 0.0), (), reserved * MIB))
        assert through.needs(12) // MIB == needed


@given(
    st.lists(st.tuples(*[st.integers(0, 200)] * 3, st.booleans()), min_size=1, max_size=8),
    st.integers(2, 60),
    st.integers(0, 500),
)
def test_the_bound_of_a_small_step_is_above_the_peak_of_a_large_one(
    storages: list[tuple[int, int, int, bool]], samples: int, update: int
) -> None:
    """Whatever grows as the square of the samples, in proportion or not at all, kept or released."""

    def step(samples: int) -> MemoryTrace:
        made = range(1, len(storages) + 1)
        sizes = [1000, *(square * samples**2 + line * samples + fixed for square, line, fixed, _ in storages), update]
        released = tuple(~number for number in made if not storages[number - 1][3])
        events = (0, *made, *released, len(made) + 1, ~(len(made) + 1))
        return MemoryTrace(samples, tuple(sizes), events, marks=(0, 1 + len(made) + len(released)))

    small, large = step(2), step(samples)
    assert most_bytes(small, samples, peak=small.peak(), owned=1000, gradients=0) >= large.peak()


def test_the_most_that_is_of_use_is_no_size_that_failed() -> None:
    """After many trials, nearly as much as failed is enough; nearly as much as is asked about is not."""
    search = Search(Task(100, 10**9, rounding=512), (4, 8))
    for samples in (4, 8, 16, 60, 96):
        search.record(Step(Trial(samples, 512 * samples, True, 0.0), ()))
    assert search.propose()[0] == 100
