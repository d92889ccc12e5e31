"""Prediction of peaks from two traces, whose blocks are paired by the tensors in them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams import CONSTANT_OR_GROWING, SQUARES, FakeDevice, streams

from lightning_ga.memory.trace import MemoryTrace
from lightning_ga.probe.peak_prediction import PeakPredictor, extrapolate, largest_fitting, paired


@given(streams(st.one_of(CONSTANT_OR_GROWING, SQUARES)), st.integers(1, 6), st.integers(1, 6), st.integers(1, 300))
def test_prediction_is_exact_for_constant_affine_and_quadratic_storages(stream, low, apart, samples):
    device = FakeDevice(stream, 0)
    prediction = extrapolate(device.trace(low), device.trace(low + apart))
    assert prediction is not None
    assert prediction(samples) == device.trace(samples).peak()


def test_streams_that_differ_are_not_extrapolated() -> None:
    assert extrapolate(MemoryTrace(2, (1,), (0,)), MemoryTrace(4, (1, 1), (0, 1))) is None
    assert extrapolate(MemoryTrace(2, (1, 1), (0, 1, ~0)), MemoryTrace(4, (1, 1), (0, 1, ~1))) is None
    assert extrapolate(MemoryTrace(2, (1,), (0,)), MemoryTrace(2, (1,), (0,))) is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 1500))
def test_largest_fitting_is_what_a_scan_finds(steps: list[int], budget: int) -> None:
    peaks = [sum(steps[: i + 1]) for i in range(len(steps))]
    found = largest_fitting(lambda b: peaks[b - 1], 1, len(peaks), budget)
    assert found == sum(peak <= budget for peak in peaks)


class Recorder:
    """Records a step twice: all blocks, and those that tensors hold."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.sizes: list[list[int]] = [[100], [100]]
        self.places: list[list[int]] = [[0], [0]]
        self.events: list[list[int]] = [[0], [0]]
        self.handed_out = [0]

    def take(self, size: int, *, tensor: bool = True) -> tuple[int, ...]:
        """Allocate; the numbers in both recordings."""
        numbers, address = [], len(self.sizes[0])
        for sizes, places, events in list(zip(self.sizes, self.places, self.events))[: 1 + tensor]:
            numbers.append(len(sizes))
            events.append(len(sizes))
            places.append(address)
            sizes.append(size)
        self.handed_out += [address] * tensor
        return tuple(numbers)

    def free(self, numbers: tuple[int, ...]) -> None:
        """Release."""
        for events, number in zip(self.events, numbers):
            events.append(~number)

    def traces(self) -> tuple[MemoryTrace, MemoryTrace]:
        """The blocks, then the tensors."""
        made = [
            MemoryTrace(self.samples, tuple(sizes), tuple(events), addresses=tuple(places))
            for sizes, events, places in zip(self.sizes, self.events, self.places)
        ]
        return made[0], replace(made[1], handed_out=tuple(self.handed_out))


def step(samples: int, *, workspaces: int, constant: int = 64) -> tuple[MemoryTrace, MemoryTrace]:
    """Two layers; kernels take workspaces, as many as are said."""
    record = Recorder(samples)
    kept = record.take(10 * samples)
    for _ in range(workspaces):
        record.free(record.take(constant, tensor=False))
    other = record.take(20 * samples)
    record.free(kept)
    record.free(other)
    return record.traces()


def predicted(small: tuple[MemoryTrace, ...], large: tuple[MemoryTrace, ...]) -> PeakPredictor:
    """The prediction from two steps whose blocks are paired."""
    both = paired(small, large)
    assert both is not None
    predictor = extrapolate(*both)
    assert predictor is not None
    return predictor


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 300))
def test_tensors_are_paired_whatever_is_between_them(few: int, many: int, constant: int) -> None:
    steps = step(4, workspaces=few, constant=constant), step(8, workspaces=many, constant=constant)
    sizes = predicted(*steps).sizes(100)
    assert (sizes[1], sizes[-1]) == (1000, 2000)
    assert len(sizes) == 3 + many


@pytest.mark.parametrize(
    ("before", "after", "at_100"),
    [(50, 100, 1250), (64, 64, 64), (90, 100, 100), (10, 40, 6250)],
    ids=["in proportion", "constant", "as large as the device makes it", "square"],
)
def test_temporaries_that_are_there_in_both_steps_grow_as_they_did(before: int, after: int, at_100: int) -> None:
    small, large = step(4, workspaces=1, constant=before), step(8, workspaces=1, constant=after)
    assert predicted(small, large).sizes(100)[2] == at_100


def test_what_an_operation_makes_is_found_in_any_order() -> None:
    """An operation allocates its outputs as it needs them; they are noted when it ends. Others hold no block at all."""
    steps = []
    for samples in (4, 8):
        record = Recorder(samples)
        for _ in range(20):
            one, other = record.take(samples, tensor=False), record.take(10 * samples, tensor=False)
            numbers = []
            for address, size in ((other[0], 10 * samples), (one[0], samples)):
                numbers.append(len(record.sizes[1]))
                record.places[1].append(address)
                record.sizes[1].append(size)
                record.events[1].append(numbers[-1])
                record.handed_out.append(other[0])
            record.free((one[0], numbers[1]))
            record.free((other[0], numbers[0]))
        steps.append(record.traces())
    both = paired(*steps)
    assert both is not None
    assert both[0].sizes == (100, *[4, 40] * 20)
    assert not both[2], "no block is a temporary"


def test_tensors_that_do_not_align_or_are_not_found_are_not_paired() -> None:
    small, large = step(4, workspaces=1), step(8, workspaces=2)
    assert paired(small[:1], large[:1]) is None
    assert paired(small, (large[0], replace(large[1], events=large[1].events[:-1]))) is None
    elsewhere = replace(large[1], addresses=(0, *[1] * (len(large[1].sizes) - 1)))
    assert paired(small, (large[0], elsewhere)) is None
