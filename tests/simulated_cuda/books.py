"""Random programs, run by PyTorch's allocator on the simulated device and in ``Segments``: byte for byte the same."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from benchmarks.allocator import take_as_others
from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.segments import MIB, SEGMENT_ROUNDING, SegmentRules, Segments, replay_segments, segments_of

Sizes = Callable[[random.Random], int]
SIZES: dict[str, Sizes] = {
    "any": lambda r: 1 + r.randrange(r.choice((2000, 3 * MIB, 64 * MIB))),
    "of layers": lambda r: r.choice((3, 5, 7, 12, 26, 26, 26, 33, 64)) * MIB + r.choice((0, 0, 512, 4096)),
    "equal": lambda r: r.choice((2, 3, 4)) * MIB,
    "small": lambda r: r.choice((512, 1024, 2048, 4096, 65536, 262144, 524288, MIB)),
    "mixed": lambda r: r.choice((512, 65536, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 15 * MIB, 26 * MIB, 26 * MIB, 100 * MIB)),
}
MOST = 60  # blocks held at once


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


def same_books(programs: int, setting: str = "") -> None:
    """Bytes in blocks and in segments after every step of every program, from an empty cache."""
    rules = rules_with(setting)
    for name, sizes, seed in each_program(programs):
        assert torch.cuda.memory_reserved() == 0
        choices, segments, held = random.Random(seed), segments_of(rules), []
        for step in range(400):
            random_steps(choices, sizes, held, lambda size, books=segments: Both(books, size), 1)
            real = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            assert real == (segments.allocated, segments.reserved), (name, seed, step)
        held.clear()


def same_replay(programs: int, setting: str = "") -> None:
    """A recorded step is replayed to the peaks that the allocator reports, whatever was there before it."""
    rules = rules_with(setting)
    meter = AllocatorMeter(torch.device("cuda", 0))
    for name, sizes, seed in each_program(programs):
        choices, held = random.Random(seed), []
        random_steps(choices, sizes, held, on_device, 120)
        meter.start(record=True)
        random_steps(choices, sizes, held, on_device, 300)
        peak, undisturbed = meter.finish()
        trace, reserved = meter.trace(1), torch.cuda.max_memory_reserved()
        assert undisturbed
        assert trace is not None
        assert replay_segments(trace.sizes, trace, rules)[:2] == (peak, reserved), (name, seed)
        held.clear()


def same_replay_elsewhere(programs: int, setting: str = "") -> None:
    """A recorded step is replayed to these peaks, too, where what was there before it lies in other places."""
    rules = rules_with(setting)
    meter = AllocatorMeter(torch.device("cuda", 0))
    for name, sizes, seed in each_program(programs):
        choices, held = random.Random(seed), []
        random_steps(choices, sizes, held, on_device, 120)
        wanted = [tensor.nbytes for tensor in held]
        meter.start(record=True, residents=_places(held))
        random_steps(random.Random(-seed), sizes, held, on_device, 300)
        trace = meter.trace(1)
        assert trace is not None
        held.clear()
        torch.cuda.empty_cache()  # older segments lie below younger ones: snapshots do not tell how old they are
        others = {place: (on_device(sizes(choices)), on_device(wanted[place])) for place in _shuffled(wanted, choices)}
        held += [others.pop(place)[1] for place in range(len(wanted))]
        layout = meter.layout(_places(held))
        meter.start()
        random_steps(random.Random(-seed), sizes, held, on_device, 300)
        peak, undisturbed = meter.finish()
        assert undisturbed
        now = trace.begun_at(layout, small=0)
        assert now is not trace or not layout, (name, seed)
        assert replay_segments(now.sizes, now, rules)[:2] == (peak, meter.reserved_peak()), (name, seed)
        held.clear()


def _shuffled(wanted: list[int], choices: random.Random) -> list[int]:
    return choices.sample(range(len(wanted)), len(wanted))


def _places(held: list[torch.Tensor]) -> dict[int, int]:
    return {tensor.data_ptr(): place for place, tensor in enumerate(held, 1)}


BUDGET = 400 * MIB


def same_under_pressure(programs: int, setting: str = "", others: bool = False) -> None:
    """Where memory is short, the same blocks go back to the device, up to the first request that finds no room."""
    if others:
        rest = torch.cuda.mem_get_info()[0] - BUDGET
        take_as_others(rest - rest % SEGMENT_ROUNDING)
    else:
        torch.cuda.set_per_process_memory_fraction((BUDGET + 0.5) / torch.cuda.mem_get_info()[1])
    rules = replace(rules_with(setting), budget=BUDGET)
    meter = AllocatorMeter(torch.device("cuda", 0))
    ended = 0
    for name, sizes, seed in each_program(programs):
        choices, segments, held = random.Random(seed), segments_of(rules), []
        before = meter.troubles()
        for step in range(400):
            with suppress(torch.OutOfMemoryError):
                random_steps(choices, sizes, held, lambda size, books=segments: Both(books, size), 1)
            if meter.troubles() != before:
                ended += 1
                break
            assert segments.peaks.needed <= BUDGET, (name, seed, step)
            real = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            assert real == (segments.allocated, segments.reserved), (name, seed, step)
        assert (meter.troubles() != before) == (segments.peaks.needed > BUDGET), (name, seed)
        held.clear()
    assert ended > programs


def rules_with(setting: str) -> SegmentRules:
    """The rules after a setting at run time."""
    if setting:
        torch._C._accelerator_setAllocatorSettings(setting)
    rules = AllocatorMeter(torch.device("cuda", 0)).rules
    assert rules is not None
    assert (rules == SegmentRules()) == (not setting)
    return rules


def told_of_settings() -> None:
    """Rules that ``Segments`` does not know are noticed, also where they were set at run time."""
    meter = AllocatorMeter(torch.device("cuda", 0))
    assert meter.rules == SegmentRules()
    torch._C._accelerator_setAllocatorSettings("garbage_collection_threshold:0.5")
    assert meter.rules == SegmentRules(), "nothing is collected as long as no fraction is set"
    for setting in (
        "expandable_segments:True,large_segment_size_mb:64",
        "max_split_size_mb:64,max_non_split_rounding_mb:64",
    ):
        torch._C._accelerator_setAllocatorSettings(setting)
        assert meter.rules is None, setting
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        assert meter.rules == SegmentRules(), setting
