"""Meters of training steps: by live tensors on any device, or by the caching allocator of an accelerator."""

import gc
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.device import WITH_STATISTICS, available_memory, is_emulated, may_reserve
from lightning_ga.memory.holders import OriginMeter, Owner, StepOrigins, attribute
from lightning_ga.memory.live_tensors import plain_tensors
from lightning_ga.memory.segments import ROUNDING, SegmentRules
from lightning_ga.memory.trace import MemoryTrace, Segment
from lightning_ga.plan.records import Attribution
from lightning_ga.probe.prediction import extrapolate
from lightning_ga.probe.training import ProbedTraining

# Share of a CPU's available memory that a step may take: the rest is for kernels' scratch and other processes.
CPU_SHARE = 0.8
UNBOUNDED = 1 << 60
GARBAGE = 0.005  # share of a device's room that may be held by what nobody refers to any more


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one training step took."""

    peak_bytes: int  # where the meter stopped the step, with those that were asked for
    seconds: float
    failure: Exception | None = None
    strained: bool = False  # the allocator ran out of memory or had to free its cache, even if the step went on
    traces: tuple[MemoryTrace, ...] = ()  # of the step, the most faithful first; the last is that of its tensors
    origins: StepOrigins | None = None  # of the storages of the last trace
    reserved_bytes: int | None = None  # most that the allocator held at once, if it holds more than it hands out


class TensorMeter:
    """Counts live tensors; a step is stopped at the operation that goes beyond its budget."""

    sees_kernels = False  # whether temporaries that kernels choose by size are measured, too

    def __init__(
        self,
        device: torch.device,
        owner: Owner,
        *,
        rounding: int = 1,
        room: int | None = None,  # bytes that a device that is not this machine's can still give
        allocator: AllocatorMeter | None = None,
    ) -> None:
        self.device, self.rounding = device, rounding
        # Whether running out of memory ends the process instead of raising an error.
        self.deadly = room is None and device.type == "cpu" and not is_emulated(device)
        self._given = room
        self.tensors = OriginMeter(owner, allocator, device=device, rounding=rounding)

    def count(self, tensors: Iterable[Tensor | None]) -> int:
        """Return the bytes that are alive, these tensors included."""
        self.tensors.add(tensors)
        return self.tensors.live_bytes

    def room(self) -> int:
        """Return the bytes that the device can still give; a share of them where it must not run out."""
        if self._given is not None:
            return self._given
        return int((CPU_SHARE if self.deadly else 1) * available_memory(self.device))

    def may_exceed(self, size: int) -> bool:
        """Return whether a step may take more than ``size`` bytes for a while without running out of memory."""
        return False

    def may_hold_garbage(self, tensors: Iterable[Tensor | None]) -> bool:
        """Return whether memory may be held by what only the cycle collector finds: it cannot be told."""
        return not self.deadly

    def rules(self) -> SegmentRules | None:
        """Return how the allocator cuts its blocks out of segments; ``None`` if it does not, or that is not known."""
        return None

    def layout(self) -> tuple[Segment, ...]:
        """Return the segments that the next step finds, as far as they are known."""
        return ()

    def run(self, training: ProbedTraining, samples: int, *, budget: int, record: bool) -> Measurement:
        """Run a step; it is recorded in any case, as that changes nothing here."""
        self.tensors.start(record=True, budget=budget)
        failure, seconds = self._run(training, samples, self.tensors)
        peak = max(self.tensors.peak_bytes, self.tensors.wanted_bytes)
        origins = self.tensors.origins(complete=failure is None)
        return Measurement(peak, seconds, failure, traces=(self.tensors.trace(samples),), origins=origins)

    def most(self, alive: int) -> int:
        """Return the bytes that a step may take where no budget bounds it; a device that is not here has no end."""
        return alive + self.room() if self._given is None else UNBOUNDED

    def stop(self) -> None:
        """Do nothing: every recording ends with its step."""

    def _run(
        self, training: ProbedTraining, samples: int, mode: AbstractContextManager[Any]
    ) -> tuple[Exception | None, float]:
        """Run a step without the cycle collector, so that every run releases memory at the same places."""
        started, collecting = time.perf_counter(), gc.isenabled()
        gc.disable()
        failure = None
        try:
            with mode:
                training.step(samples, self.tensors)
        except Exception as error:
            failure = error
        finally:
            if collecting:
                gc.enable()
        return failure, time.perf_counter() - started


class CachingMeter(TensorMeter):
    """Reads an allocator's statistics, and records its events and the live tensors.

    A dispatch mode disturbs a step a little, so only steps that are recorded run under it.
    """

    sees_kernels = True

    def __init__(self, device: torch.device, owner: Owner) -> None:
        self._allocator = AllocatorMeter(device)
        super().__init__(device, owner, rounding=ROUNDING, allocator=self._allocator)
        self._residents: dict[int, int] = {}  # by address: which of the tensors that are alive before a step

    def count(self, tensors: Iterable[Tensor | None]) -> int:
        """Return the bytes that are alive; these tensors are known to the recordings from now on."""
        known = list(tensors)
        self.tensors.add(known)
        self._residents = {}
        for place, tensor in enumerate(known, 1):
            for plain in () if tensor is None else plain_tensors(tensor):
                self._residents.setdefault(plain.untyped_storage().data_ptr(), place)
        return self._allocator.allocated()

    def rules(self) -> SegmentRules | None:
        """Return the allocator's settings, under the budget that is kept to now."""
        return self._allocator.rules

    def layout(self) -> tuple[Segment, ...]:
        """Return the segments that the next step finds, with the tensors that were counted last."""
        return self._allocator.layout(self._residents)

    def may_exceed(self, size: int) -> bool:
        """Return whether the allocator may reserve more than ``size`` bytes."""
        return may_reserve(self.device, size)

    def may_hold_garbage(self, tensors: Iterable[Tensor | None]) -> bool:
        """Return whether much more is alive than these tensors."""
        return self.count(tensors) - self.tensors.live_bytes > GARBAGE * self.room()

    def run(self, training: ProbedTraining, samples: int, *, budget: int, record: bool) -> Measurement:
        """Run a step: the device's own limit stops it."""
        self.tensors.start(record=record)
        self._allocator.start(record=record, residents=self._residents)
        failure, seconds = self._run(training, samples, self.tensors if record else nullcontext())
        peak, undisturbed = self._allocator.finish()
        origins = self.tensors.origins(complete=failure is None) if record else None
        recorded = (self._allocator.trace(samples), self.tensors.trace(samples)) if record else ()
        traces = tuple(trace for trace in recorded if trace is not None)
        return Measurement(peak, seconds, failure, not undisturbed, traces, origins, self._allocator.reserved_peak())

    def stop(self) -> None:
        """Record no more."""
        self._allocator.stop()


def meter_of(device: torch.device, owner: Owner) -> TensorMeter:
    """Choose the meter for a device."""
    return (CachingMeter if device.type in WITH_STATISTICS else TensorMeter)(device, owner)


class PeakHolders:
    """Says what holds the peak of a step of any size, from the last recorded step of each size."""

    def __init__(self, rounding: int) -> None:
        self._rounding = rounding
        self._steps: dict[int, tuple[MemoryTrace, StepOrigins]] = {}

    def record(self, trace: MemoryTrace, origins: StepOrigins) -> None:
        """Keep a step."""
        self._steps[trace.samples] = trace, origins

    def at(self, samples: int, peak: int) -> Attribution | None:
        """Say what holds the peak of a step as measured or predicted, else that of the largest that ran."""
        recorded = self._steps.get(samples) or self._predicted(samples)
        if recorded is not None:
            return attribute(*recorded, rounding=self._rounding, peak=peak)
        ran = [size for size, (_, origins) in self._steps.items() if origins.complete]
        return attribute(*self._steps[max(ran)], rounding=self._rounding) if ran else None

    def _predicted(self, samples: int) -> tuple[MemoryTrace, StepOrigins] | None:
        """Return a step as two smaller ones foretell it; ``None`` where their streams do not align."""
        ran = sorted(size for size, (_, origins) in self._steps.items() if origins.complete)
        for small, large in pairwise(ran):
            (first, _), (second, origins) = self._steps[small], self._steps[large]
            predictor = extrapolate(first, second, rounding=self._rounding)
            if predictor is not None:
                sizes = tuple(predictor.sizes(samples))
                return replace(second, samples=samples, sizes=sizes), origins
        return None
