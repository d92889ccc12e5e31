"""Measure training steps, and say what holds the memory at their peak.

Tested in tests/integration/test_probe.py.
"""

import gc
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.allocator_segments import ROUNDING
from lightning_ga.memory.device import available_memory, is_emulated
from lightning_ga.memory.holders import StepOrigins, attribute
from lightning_ga.memory.live_tensors import plain_tensors
from lightning_ga.memory.step_recorder import StepRecorder
from lightning_ga.memory.trace import MemoryTrace
from lightning_ga.memory.vendors import WITH_STATISTICS
from lightning_ga.plan.records import Attribution
from lightning_ga.probe.peak_prediction import extrapolate
from lightning_ga.probe.training import ProbedTraining

# Share of a CPU's available memory that a step may use: the rest is for kernels' scratch and other processes.
CPU_SHARE = 0.8
TrialStep = Callable[[int, StepRecorder], object]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one training step took."""

    peak_bytes: int  # if the meter stopped the step, including the bytes that were refused
    seconds: float
    failure: Exception | None = None
    strained: bool = False  # the allocator ran out of memory or had to free its cache, even if the step continued
    traces: tuple[MemoryTrace, ...] = ()  # of the step, the most faithful first; the last is that of its tensors
    origins: StepOrigins | None = None  # of the storages of the last trace
    reserved_bytes: int | None = None  # most that the allocator reserved at once, if it reserves more than it hands out


class StepMeter:
    """Measures training steps on any device.

    Without a caching allocator it counts live tensors, and stops a step at the operation that goes beyond the budget.
    With one, the allocator's statistics decide, and the device's limit stops the step. Counting live tensors disturbs a
    step a little, so there it is done only in steps that are recorded.
    """

    def __init__(self, device: torch.device, training: ProbedTraining) -> None:
        self.device = device
        # Whether running out of memory ends the process instead of raising an error.
        self.deadly = device.type == "cpu" and not is_emulated(device)
        self.allocator = None
        self.rounding = 1
        if device.type in WITH_STATISTICS:
            self.allocator = AllocatorMeter(device)
            self.rounding = ROUNDING
        self.tensors = StepRecorder(training.owned, self.allocator, device=device, rounding=self.rounding)

    def count(self, tensors: Iterable[Tensor | None]) -> int:
        """Return the bytes that are alive, these tensors included; recordings know them from now on."""
        self.tensors.add(tensors)
        return self.tensors.live_bytes if self.allocator is None else self.allocator.allocated()

    def room(self) -> int:
        """Return the bytes that the device can still give; a share of them if it must not run out."""
        return int((CPU_SHARE if self.deadly else 1.0) * available_memory(self.device))

    def run(self, step: TrialStep, samples: int, *, budget: int, record: bool) -> Measurement:
        """Run a step; ``record`` matters only if there is an allocator."""
        allocator = self.allocator
        if allocator is None:
            self.tensors.start(budget=budget)
            failure, seconds = self._run(step, samples, self.tensors)
            peak = max(self.tensors.peak_bytes, self.tensors.wanted_bytes)
            trace, origins = self.tensors.recorded(samples, complete=failure is None)
            return Measurement(peak, seconds, failure, traces=(trace,), origins=origins)
        self.tensors.start(record=record)
        allocator.start(record=record)
        failure, seconds = self._run(step, samples, self.tensors if record else nullcontext())
        peak, undisturbed = allocator.finish()
        found = Measurement(peak, seconds, failure, not undisturbed, reserved_bytes=allocator.reserved_peak())
        if not record:
            return found
        of_blocks = allocator.trace(samples)
        trace, origins = self.tensors.recorded(samples, complete=failure is None)
        traces = (trace,) if of_blocks is None else (of_blocks, trace)
        return replace(found, traces=traces, origins=origins)

    def _run(self, step: TrialStep, samples: int, mode: AbstractContextManager[Any]) -> tuple[Exception | None, float]:
        """Run a step without the cycle collector, so that every run releases memory at the same places."""
        started = time.perf_counter()
        collecting = gc.isenabled()
        gc.disable()
        failure = None
        try:
            with mode:
                step(samples, self.tensors)
        except Exception as error:
            failure = error
        finally:
            if collecting:
                gc.enable()
        return failure, time.perf_counter() - started


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of dense tensors; sparse ones may grow with the samples."""
    sizes = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class PeakHolders:
    """Says what holds the memory at the peak of a step of any size, from the last recorded step of each size."""

    def __init__(self, rounding: int) -> None:
        self._rounding = rounding
        self._steps: dict[int, tuple[MemoryTrace, StepOrigins]] = {}

    def record(self, trace: MemoryTrace, origins: StepOrigins) -> None:
        """Keep a step."""
        self._steps[trace.samples] = trace, origins

    def at(self, samples: int, peak: int) -> Attribution | None:
        """Say what holds the memory at the peak of a step, recorded or predicted; else of the largest that ran."""
        recorded = self._steps.get(samples) or self._predicted(samples)
        if recorded is not None:
            return attribute(*recorded, rounding=self._rounding, peak=peak)
        ran = self._complete()
        if not ran:
            return None
        return attribute(*self._steps[ran[-1]], rounding=self._rounding)

    def _complete(self) -> list[int]:
        return sorted(size for size, (_, origins) in self._steps.items() if origins.complete)

    def _predicted(self, samples: int) -> tuple[MemoryTrace, StepOrigins] | None:
        """Predict a step from two smaller ones; ``None`` if their streams do not align."""
        for small, large in pairwise(self._complete()):
            first, _ = self._steps[small]
            second, origins = self._steps[large]
            predictor = extrapolate(first, second, rounding=self._rounding)
            if predictor is not None:
                return replace(second, samples=samples, sizes=tuple(predictor.sizes(samples))), origins
        return None
