"""Random programs, run by PyTorch's allocator on the simulated device and in ``Segments``: byte for byte the same."""

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import device_counters
import pytest
import torch
from forks import forked

from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.allocator_segments import MIB, SEGMENT_ROUNDING, Segments, replay_segments

pytestmark = pytest.mark.skipif(
    not device_counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"
)
Sizes = Callable[[random.Random], int]
SIZES: dict[str, Sizes] = {
    "any": lambda r: 1 + r.randrange(r.choice((2000, 3 * MIB, 64 * MIB))),
    "of layers": lambda r: r.choice((3, 5, 7, 12, 26, 26, 26, 33, 64)) * MIB + r.choice((0, 0, 512, 4096)),
    "equal": lambda r: r.choice((2, 3, 4)) * MIB,
    "small": lambda r: r.choice((512, 1024, 2048, 4096, 65536, 262144, 524288, MIB)),
    "mixed": lambda r: r.choice((512, 65536, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 15 * MIB, 26 * MIB, 26 * MIB, 100 * MIB)),
}
MOST = 60  # blocks held at once
BUDGET = 400 * MIB


def random_steps(
    choices: random.Random, sizes: Sizes, held: list[Any], take: Callable[[int], Any], number: int
) -> None:
    """Allocate and release."""
    for _ in range(number):
        if held and (choices.random() < 0.5 or len(held) > MOST):
            del held[choices.randrange(len(held))]
        else:
            held.append(take(sizes(choices)))


class Both:
    """A block in both allocators."""

    def __init__(self, segments: Segments, size: int) -> None:
        self.segments, self.block = segments, segments.allocate(size)
        self.tensor = on_device(size)

    def __del__(self) -> None:
        self.segments.release(self.block)


def on_device(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def each_program(programs: int) -> Iterator[tuple[str, Sizes, int]]:
    """Yield the name of each mix of sizes, what draws them, and a seed, with an empty cache."""
    for name, sizes in SIZES.items():
        for seed in range(programs):
            torch.cuda.empty_cache()
            yield name, sizes, seed


def same_replay(programs: int) -> None:
    """A recorded step is replayed to the peaks that the allocator reports, whatever was there before it."""
    meter = AllocatorMeter(torch.device("cuda", 0))
    assert meter.cuts_segments
    for name, sizes, seed in each_program(programs):
        choices, held = random.Random(seed), []
        random_steps(choices, sizes, held, on_device, 120)
        meter.start(record=True)
        random_steps(random.Random(-seed), sizes, held, on_device, 300)
        peak, undisturbed = meter.finish()
        trace = meter.trace(1)
        assert undisturbed
        assert trace is not None
        assert replay_segments(trace.sizes, trace) == (peak, meter.reserved_peak()), (name, seed)
        held.clear()


def test_a_recorded_step_is_replayed_to_the_byte(tmp_path: Path) -> None:
    ended = forked(same_replay, 40, folder=tmp_path)
    assert ended.code == 0, ended.output


def same_under_pressure(programs: int, others: bool) -> None:
    """The books are the same up to the first request that finds no room, and that is foreseen.

    Whether others take the rest of the memory, of which PyTorch's allocator does not know, or a set fraction.
    """
    if others:
        rest = torch.cuda.mem_get_info()[0] - BUDGET
        taken = ctypes.c_size_t(rest - rest % SEGMENT_ROUNDING)
        assert ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), taken) == 0
    else:
        torch.cuda.set_per_process_memory_fraction((BUDGET + 0.5) / torch.cuda.mem_get_info()[1])
    meter, ended = AllocatorMeter(torch.device("cuda", 0)), 0
    for name, sizes, seed in each_program(programs):
        assert torch.cuda.memory_reserved() == 0
        choices, segments, held = random.Random(seed), Segments(), []
        before = meter.troubles()
        for step in range(400):
            with suppress(torch.OutOfMemoryError):
                random_steps(choices, sizes, held, lambda size, books=segments: Both(books, size), 1)
            if meter.troubles() != before:
                ended += 1
                break
            assert segments.peaks.reserved <= BUDGET, (name, seed, step)
            real = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            assert real == (segments.allocated, segments.reserved), (name, seed, step)
        assert (meter.troubles() != before) == (segments.peaks.reserved > BUDGET), (name, seed)
        held.clear()
    assert programs < ended < len(SIZES) * programs  # others went to their end


@pytest.mark.parametrize("others", [False, True])
def test_the_books_are_the_allocators_and_foresee_the_first_request_without_room(others: bool, tmp_path: Path) -> None:
    ended = forked(same_under_pressure, 6, others, folder=tmp_path)
    assert ended.code == 0, ended.output


def told_of_settings() -> None:
    """Rules that ``Segments`` does not know are noticed, also where they were set at run time."""
    meter = AllocatorMeter(torch.device("cuda", 0))
    assert meter.cuts_segments
    for setting in (
        "expandable_segments:True",
        "garbage_collection_threshold:0.5",
        "max_split_size_mb:64",
        "roundup_power2_divisions:[4:2,>:1]",
        "expandable_segments:True,large_segment_size_mb:64",
        "max_split_size_mb:64,max_non_split_rounding_mb:64",
    ):
        torch._C._accelerator_setAllocatorSettings(setting)
        assert not meter.cuts_segments, setting
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        assert meter.cuts_segments, setting


def test_settings_that_change_the_rules_are_noticed(tmp_path: Path) -> None:
    ended = forked(told_of_settings, folder=tmp_path)
    assert ended.code == 0, ended.output
