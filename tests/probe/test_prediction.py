"""Prediction of peaks from two traces."""

from hypothesis import given, settings
from hypothesis import strategies as st
from streams import CONSTANT_OR_GROWING, SQUARES, FakeDevice, Size, streams

from lightning_ga.memory.trace import MemoryTrace, canonical, replay
from lightning_ga.probe.prediction import extrapolate, largest_fitting


def test_the_peak_may_move_between_operations() -> None:
    """The optimizer's temporaries lead for small batches, the activations for large ones."""

    def trace(b: int) -> MemoryTrace:
        return MemoryTrace(b, (100, 10 * b, 80), (0, 1, ~1, 2, ~2))

    prediction = extrapolate(trace(2), trace(4))
    assert prediction is not None
    assert [prediction(b) for b in (2, 4, 8, 9, 100)] == [180, 180, 180, 190, 1100]


@settings(deadline=None)
@given(streams(st.one_of(CONSTANT_OR_GROWING, SQUARES)), st.integers(1, 6), st.integers(1, 6), st.integers(1, 300))
def test_prediction_is_exact_for_constant_affine_and_quadratic_storages(
    stream: tuple[list[Size], list[int]], low: int, apart: int, samples: int
) -> None:
    device = FakeDevice(stream, 0)
    prediction = extrapolate(device.trace(low + apart), device.trace(low))
    assert prediction is not None
    assert prediction(samples) == device.trace(samples).peak()


def test_a_storage_that_shrinks_keeps_its_larger_size() -> None:
    prediction = extrapolate(MemoryTrace(2, (50, 4), (0, 1)), MemoryTrace(4, (40, 8), (0, 1)))
    assert prediction is not None
    assert prediction.sizes(8) == [50, 16]


def test_streams_that_differ_are_not_extrapolated() -> None:
    assert extrapolate(MemoryTrace(2, (1,), (0,)), MemoryTrace(4, (1, 1), (0, 1))) is None
    assert extrapolate(MemoryTrace(2, (1, 1), (0, 1, ~0)), MemoryTrace(4, (1, 1), (0, 1, ~1))) is None
    assert extrapolate(MemoryTrace(2, (1,), (0,)), MemoryTrace(2, (1,), (0,))) is None


def test_the_order_of_releases_in_a_row_does_not_matter() -> None:
    assert canonical([0, 1, ~0, ~1, 2, ~2]) == canonical([0, 1, ~1, ~0, 2, ~2])


def test_a_third_trace_checks_the_prediction() -> None:
    """Experts routed by a mask have the same stream, but sizes that no rule foresees."""
    traces = [MemoryTrace(b, (size,), (0,)) for b, size in ((4, 10), (8, 30), (16, 50))]
    prediction = extrapolate(traces[0], traces[1])
    assert prediction is not None
    assert not prediction.confirms(traces[2])
    assert prediction.confirms(MemoryTrace(16, (100,), (0,)))


def test_sizes_are_rounded_as_the_allocator_does() -> None:
    """Rounding comes after extrapolation, or slopes of small storages would be lost."""
    prediction = extrapolate(MemoryTrace(2, (8,), (0,)), MemoryTrace(4, (16,), (0,)), rounding=512)
    assert prediction is not None
    assert [prediction(b) for b in (2, 128, 129)] == [512, 512, 1024]
    assert replay((0, 1), (0, 1), rounding=512) == 512


def test_transient_peak_leaves_out_what_outlives_the_step() -> None:
    assert MemoryTrace(2, (100, 30, 7), (0, 1, 2, ~2)).transient_peak() == 7


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 1500))
def test_largest_fitting_is_what_a_scan_finds(steps: list[int], budget: int) -> None:
    peaks = [sum(steps[: i + 1]) for i in range(len(steps))]
    found = largest_fitting(lambda b: peaks[b - 1], 1, len(peaks), budget)
    assert found == sum(peak <= budget for peak in peaks)
