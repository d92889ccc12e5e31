"""Runs the training steps that a search for the limit asks for, under a meter of memory."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ga.errors import UserError
from lightning_ga.memory.allocator import WITH_STATISTICS, AllocatorMeter
from lightning_ga.memory.device import available_memory, is_emulated
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.memory.oom import is_ambiguous_out_of_memory, is_out_of_memory, release
from lightning_ga.memory.segments import ROUNDING
from lightning_ga.memory.trace import MemoryTrace
from lightning_ga.plan.records import ProbeResult, Trial, outdated
from lightning_ga.probe.optimizers import SteppingOptimizers
from lightning_ga.probe.search import Search, trace_sizes

# Share of a CPU's available memory that a step may take: the rest is for kernels' scratch and other processes.
CPU_SHARE = 0.8
CLOSEST = 0.25  # share of that which a trial may take where nothing can be predicted without


@contextmanager
def quick_collection(*, first: bool) -> Iterator[None]:
    """Within, ``gc.collect`` leaves older objects aside: it takes half a second in a process of usual size.

    Args:
        first: Whether to collect them once before: what no one refers to any more may hold memory of the device.
    """
    if first:
        gc.collect()
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


class Prober:
    """Runs the steps that a search asks for, under a meter, and tells it what came of them."""

    def __init__(
        self,
        step: Callable[[int], object],
        *,
        device: torch.device,
        budget: int | None,
        resident: Callable[[], Iterable[Tensor | None]] | None,
        reset: Callable[[], object] | None,
        agree: Callable[[bool], bool] | None,
        warm_up: Callable[[], object] | None = None,
        on_step: Callable[[int], object] | None = None,
    ) -> None:
        self.step, self.resident, self.reset, self.agree = step, resident, reset, agree or bool
        self.warm_up, self.on_step = warm_up, on_step
        self.device = device
        self.asked = budget
        self.allocator = AllocatorMeter(device) if device.type in WITH_STATISTICS else None
        self.meter = LiveTensorMeter(device=device, rounding=ROUNDING if self.allocator else 1)
        self.optimizers = SteppingOptimizers()
        self.trials: list[Trial] = []
        self.steps = 0
        self.least: float = inf  # smallest size whose step ran
        self._started = time.perf_counter()

    def find(self, high: int, predict_only: bool | None, known: ProbeResult | None) -> ProbeResult:
        """Verify what is known; else warm up, then do what the search proposes until it proposes nothing new."""
        high = self._smallest(high)
        verified = self._verify(known, high, predict_only)
        if verified is not None:
            return replace(verified, seconds=time.perf_counter() - self._started)
        search = self._search(high, predict_only)
        limit = self._smallest(search.predicted) if search.predict_only else search.limit
        if limit < 1:
            raise self._too_large(search.budget)
        measured = {trial.micro_batch_size: trial.peak_bytes for trial in self.trials}
        return ProbeResult(
            limit=limit,
            budget_bytes=search.budget,
            peak_bytes=measured[limit] if limit in measured else search.predict(limit) or 0,
            trials=tuple(self.trials),
            steps=self.steps,
            seconds=time.perf_counter() - self._started,
            method=search.method,
            curve=search.curve(limit),
        )

    def _search(self, high: int, predict_only: bool | None) -> Search:
        """Run a search to its end."""
        self.least = inf
        high, sizes = self._warm_up(high)
        search = Search(
            high=high,
            budget=self._prepare(),
            sizes=sizes,
            rounding=self.meter.rounding,
            segmented=self.allocator is not None and self.allocator.segmented,
            predict_only=self._is_cautious(predict_only),
            closest=CLOSEST if self._is_real_cpu() else 1.0,
        )
        while (size := self._smallest(search.propose())) != search.limit:
            trial, traces = self._try(size, record=self.allocator is None or search.wants_trace)
            self.trials.append(trial)
            search.record(trial, *traces)
        return search

    def _verify(self, known: ProbeResult | None, high: int, predict_only: bool | None) -> ProbeResult | None:
        """A known limit, if it holds here and one step confirms it; ranks then take the smallest."""
        reason = "unknown" if known is None else outdated(known, self._prepare(), high)
        if not self.agree(reason is None) or known is None:
            return None
        limit = self._smallest(min(known.limit, high))
        if self.warm_up is not None:
            self.warm_up()
            self._put_back()
        cautious = self._is_cautious(predict_only)
        self.least = 0  # an error of two meanings is for the search to judge, which follows a failure
        trial, _ = self._try(min(2, limit) if cautious else limit, record=False)
        budget = self._prepare()
        peak = known.peak_bytes if limit == known.limit or cautious else trial.peak_bytes
        found = replace(known, limit=limit, budget_bytes=budget, peak_bytes=peak, trials=(), steps=1, method="cache")
        return found if trial.fits else None

    def on_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook before every optimizer step: a phase of the step ends, and its state is known from now on."""
        self.meter.mark()
        self.optimizers.note(optimizer)

    def _warm_up(self, high: int) -> tuple[int, tuple[int, ...]]:
        """Run a first step, of two samples if these fit; the largest size left to search, and sizes to trace."""
        budget = self._prepare()
        if not self.agree(self.meter.live_bytes <= budget):
            raise self._too_large(budget)
        for size in range(min(2, high), 0, -1):
            trial, traces = self._try(size, record=True)
            if trial.fits and self.device.type != "cpu" and not trial.peak_bytes:
                raise UserError(
                    f"A step of {size} samples takes no memory on device {str(self.device)!r}: give find_micro_batch "
                    "the device= that it runs on."
                )
            if trial.fits:
                alive = self._prepare() and self.meter.live_bytes
                growing = max((trace.transient_peak(self.meter.rounding) for trace in traces), default=0)
                high = high if size == 2 else 1
                return high, trace_sizes(high, budget, alive=alive, growing=growing, warm_up=size)
            self.trials.append(trial)
        raise self._too_large(budget)

    def _prepare(self) -> int:
        """Count what is alive before a step; the budget in bytes as the device stands now."""
        gc.collect()
        self.optimizers.lend()
        self.meter.add(self.resident() if self.resident else self.optimizers.tensors())
        taken = self.allocator.allocated() if self.allocator else self.meter.live_bytes
        room = taken + self._room()
        return room if self.asked is None else min(self.asked, room)

    def _room(self) -> int:
        """Bytes that the device can still give; on a real CPU, a share of them."""
        return int((CPU_SHARE if self._is_real_cpu() else 1) * available_memory(self.device))

    def _is_real_cpu(self) -> bool:
        return self.device.type == "cpu" and not is_emulated(self.device)

    def _is_cautious(self, predict_only: bool | None) -> bool:
        """Whether no rank may run a step near the budget."""
        return not self.agree(not (self._invites_killer() if predict_only is None else predict_only))

    def _invites_killer(self) -> bool:
        """Whether a step that runs out of memory would bring in the operating system's killer."""
        if not self._is_real_cpu():
            return False
        return self.asked is None or self.asked > self.meter.live_bytes + self._room()

    def _try(self, size: int, *, record: bool) -> tuple[Trial, tuple[MemoryTrace, ...]]:
        """One step from a clean start, and the state put back after it, whatever came of it."""
        if self.on_step is not None:
            self.on_step(size)
        budget = self._prepare()
        graded = self.optimizers.graded()
        failure, trial, undisturbed = self._measure(size, budget, record=record)
        fatal = failure is not None and not self._means_too_large(failure, size)
        if failure is not None and not fatal:
            release(failure)
            trial = replace(trial, peak_bytes=max(trial.peak_bytes, self.meter.wanted_bytes))
        traces = self._traces(size) if record else ()
        self._put_back()
        if self.reset is None and failure is not None:
            self.optimizers.regrade(graded)
        if fatal and failure is not None:
            raise failure
        self.least = min(self.least, size if failure is None else inf)
        short = not undisturbed or (failure is not None and is_out_of_memory(failure))
        if short:  # an allocator that ran out has handed out less than was needed
            trial = replace(trial, peak_bytes=max(trial.peak_bytes, budget + 1))
        fits = self.agree(failure is None and not short and trial.peak_bytes <= budget)
        return replace(trial, fits=fits), traces if fits else ()

    def _put_back(self) -> None:
        """The state before the step, but for what the optimizers made, which is kept for the next."""
        self.optimizers.borrow()
        if self.reset is not None:
            self.reset()

    def _measure(self, size: int, budget: int, *, record: bool) -> tuple[Exception | None, Trial, bool]:
        """Run the step under the meters: what it raised, what it took, and whether the allocator had no trouble."""
        self.meter.budget = None if self.allocator else budget
        self.meter.start(record=record)
        if self.allocator:
            self.allocator.start(record=record)
        self.steps += 1
        started = time.perf_counter()
        failure = self._run(size, record=record)
        peak, undisturbed = self.allocator.finish() if self.allocator else (self.meter.peak_bytes, True)
        return failure, Trial(size, peak, failure is None, time.perf_counter() - started), undisturbed

    def _traces(self, size: int) -> tuple[MemoryTrace, ...]:
        """The recorded step, seen by the allocator where it keeps a history, and by its tensors."""
        seen = self.allocator.trace(size) if self.allocator else None
        return (*(() if seen is None else (seen,)), self.meter.trace(size))

    def _run(self, size: int, *, record: bool) -> Exception | None:
        """Run the step without the cycle collector, so that every run releases memory at the same places."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            if record or not self.allocator:
                with self.meter:
                    self.step(size)
            else:
                self.step(size)
        except Exception as error:
            return error
        finally:
            if collecting:
                gc.enable()
        return None

    def _means_too_large(self, failure: Exception, size: int) -> bool:
        """Whether a failed step means that its size does not fit."""
        if is_out_of_memory(failure):
            return True
        larger = any(not trial.fits and trial.micro_batch_size > size for trial in self.trials)
        # BatchNorm refuses one sample: with two known to be too many, no size is left.
        return (self.least < size and is_ambiguous_out_of_memory(failure)) or (size == 1 and larger)

    def _smallest(self, value: int) -> int:
        """The smallest value over ranks, from answers of ``agree`` alone: all ranks ask the same questions."""
        bound = 1
        while self.agree(value >= bound):
            bound *= 2
        low, high = bound // 2, bound - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.agree(value >= middle) else (low, middle - 1)
        return low

    def _too_large(self, budget: int) -> UserError:
        alive = self.meter.live_bytes
        if not self.trials:
            return UserError(
                f"The model and its optimizer alone take {alive:,} bytes, and memory_budget leaves {budget:,}: raise "
                "memory_budget, train in a lower precision, or shard the model over more devices."
            )
        refused = [trial for trial in self.trials if trial.peak_bytes > budget] or self.trials
        least = min(refused, key=lambda trial: trial.micro_batch_size)
        return UserError(
            f"A training step with micro_batch_size={least.micro_batch_size}, the smallest that runs, takes at least "
            f"{least.peak_bytes:,} bytes, and memory_budget leaves {budget:,}: raise memory_budget, train in a lower "
            "precision, or use activation checkpointing or a smaller model."
        )
