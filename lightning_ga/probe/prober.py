"""Runs the training steps that a search for the limit asks for, each from the same state."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ga.errors import UserError
from lightning_ga.memory.device import enforced_budget, lifted_budget
from lightning_ga.memory.oom import is_ambiguous_out_of_memory, is_out_of_memory, release
from lightning_ga.memory.trace import Segment
from lightning_ga.plan.records import ProbeResult, Trial, still_holds
from lightning_ga.probe.curve import Step
from lightning_ga.probe.meters import Measurement, TensorMeter
from lightning_ga.probe.optimizers import SteppingOptimizers
from lightning_ga.probe.prediction import PeakHolders
from lightning_ga.probe.search import MARGIN, Search, affordable_samples, trace_sizes
from lightning_ga.probe.shortage import Shortage

_MOST = 1 << 62
CLOSEST = 0.25  # share of the budget that a trial may take where nothing can be predicted and running out is deadly


class Prober:
    """Runs trial steps and puts the training's state back after each."""

    def __init__(
        self,
        step: Callable[[int], object],
        meter: TensorMeter,
        *,
        budget: int | None,  # bytes; ``None`` is what the device has
        resident: Callable[[], Iterable[Tensor | None]],
        shortage: Shortage,
        reset: Callable[[], object] | None = None,
        agree: Callable[[bool], bool] | None = None,  # whether something is so on every rank
        on_step: Callable[[int], object] | None = None,  # told the size of each step before it runs
        optimizers: SteppingOptimizers | None = None,
    ) -> None:
        self._step, self._meter, self._asked, self._resident, self._shortage = step, meter, budget, resident, shortage
        self._reset, self._agree, self._on_step = reset, agree or bool, on_step
        self._optimizers = SteppingOptimizers() if optimizers is None else optimizers
        self._holders = PeakHolders(meter.rounding)
        self._trials: list[Trial] = []
        self._steps = 0
        self._least: float = inf  # smallest size whose step ran
        self._started = time.perf_counter()

    def find(
        self,
        high: int,
        *,
        known: ProbeResult | None = None,
        predict_only: bool | None = None,
        warm_up: Callable[[], object] | None = None,
    ) -> ProbeResult:
        """Verify a limit that is known from before, else search; the arguments are those of ``find_micro_batch``.

        With several ranks, one may know something from before and another nothing.
        """
        with self._running():
            high = smallest_over_ranks(high, self._agree)
            alive, budget = self._prepare()
            cautious = self._is_cautious(alive, predict_only)
            holds = known is not None and still_holds(known, budget, high)
            if self._agree(holds) and known is not None:
                if warm_up is not None:
                    warm_up()
                    self._put_back()
                verified = self._verified(known, high, cautious=cautious)
                if verified is not None:
                    return verified
            return self._search(high, cautious=cautious)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Return a context in which optimizers are watched and the budget is kept to.

        ``gc.collect`` leaves older objects aside inside.
        """
        if self._meter.may_hold_garbage(self._resident()):  # a full collection takes seconds in a large process
            gc.collect()
        mine = gc.get_freeze_count() == 0
        hook = register_optimizer_step_pre_hook(self._on_optimizer_step)
        try:
            if mine:
                gc.freeze()
            with enforced_budget(self._meter.device, self._asked):
                yield
        finally:
            hook.remove()
            self._meter.stop()
            if mine:
                gc.unfreeze()

    def _verified(self, known: ProbeResult, high: int, *, cautious: bool) -> ProbeResult | None:
        """Try a known limit; ``None`` unless it still holds, on all ranks."""
        limit = smallest_over_ranks(min(known.limit, high), self._agree)
        self._least = 0  # an error of two meanings is for the search to judge, which follows a failure
        trial, _ = self._try(min(2, limit) if cautious else limit, record=False)
        if not trial.fits:
            return None
        peak = known.peak_bytes if limit == known.limit or cautious else trial.peak_bytes
        holders = known.holders if cautious else self._holders.at(limit, peak) or known.holders
        found = replace(known, limit=limit, budget_bytes=self._prepare()[1], peak_bytes=peak, holders=holders)
        return replace(found, trials=(), steps=1, seconds=self._seconds(), source="cache")

    def _search(self, high: int, *, cautious: bool) -> ProbeResult:
        """Warm up, then run what a search proposes until it proposes nothing new."""
        self._least = inf
        high, sizes, first = self._warm_up(high, cautious)
        alive, budget = self._prepare()
        search = Search(
            high=high,
            budget=budget,
            sizes=sizes,
            rounding=self._meter.rounding,
            rules=self._meter.rules(),
            predict_only=cautious,
            closest=CLOSEST if self._meter.deadly else 1.0,
            has_margin=self._meter.may_exceed(budget + budget // MARGIN),
            warm_up=first,
        )
        while (size := smallest_over_ranks(search.propose(self._layout(search)), self._agree)) != search.limit:
            trial, measured = self._try(size, record=search.wants_trace)
            self._trials.append(trial)
            search.record(trial, *measured.traces, reserved_bytes=measured.reserved_bytes)
        if search.rules is not None:
            self._put_back()
        limit = smallest_over_ranks(search.predicted, self._agree) if search.predict_only else search.limit
        if limit < 1:
            raise self._does_not_fit(alive, budget, high, cautious=cautious)
        return self._result(search, limit)

    def _on_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """End a phase of the step and remember the optimizer, as a hook before every optimizer step."""
        self._meter.mark()
        self._optimizers.note(optimizer)

    def _result(self, search: Search, limit: int) -> ProbeResult:
        measured = {trial.micro_batch_size: trial.peak_bytes for trial in self._trials}
        peak = measured[limit] if limit in measured else search.predict(limit) or 0
        return ProbeResult(
            limit=limit,
            budget_bytes=search.budget,
            peak_bytes=peak,
            trials=tuple(self._trials),
            steps=self._steps,
            seconds=self._seconds(),
            method=search.method,
            curve=search.curve(limit),
            holders=self._holders.at(limit, peak),
        )

    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def _warm_up(self, high: int, cautious: bool) -> tuple[int, tuple[int, ...], Step]:
        """Run a first step, of two samples if these fit; the largest size left to search, sizes to trace, the step."""
        alive, budget = self._prepare()
        if not self._agree(alive <= budget):
            raise self._does_not_fit(alive, budget, high, cautious=cautious)
        for size in range(min(2, high), 0, -1):
            trial, measured = self._try(size, record=True)
            if not trial.fits:
                self._trials.append(trial)
                continue
            if self._meter.device.type != "cpu" and not trial.peak_bytes:
                raise UserError(
                    f"A step of {size} samples takes no memory on device {str(self._meter.device)!r}: give "
                    "find_micro_batch the device= that it runs on."
                )
            alive = self._prepare()[0]
            affordable = affordable_samples(
                measured.traces, budget - alive, taken=trial.peak_bytes - alive, rounding=self._meter.rounding
            )
            affordable = smallest_over_ranks(min(max(0, affordable), 2 * high), self._agree)
            high = high if size == 2 else 1
            sizes = trace_sizes(high, affordable, kernels_vary=self._meter.sees_kernels and not cautious)
            return high, sizes, Step(trial, measured.traces)
        raise self._does_not_fit(alive, budget, high, cautious=cautious)

    def _prepare(self) -> tuple[int, int]:
        """Make ready for a step: bytes alive before it, and the budget in bytes as the device stands now."""
        gc.collect()
        self._optimizers.lend()
        alive = self._meter.count(self._resident())
        room = alive + self._meter.room()
        return alive, room if self._asked is None else min(self._asked, room)

    def _layout(self, search: Search) -> tuple[Segment, ...]:
        """Make ready for a step where segments count, and return those that it finds."""
        if search.rules is None:
            return ()
        self._prepare()
        return self._meter.layout()

    def _is_cautious(self, alive: int, predict_only: bool | None) -> bool:
        """Whether no rank may run a step near the budget: it might end the process, or the caller forbids it."""
        if predict_only is None:
            bounded = self._asked is not None and self._asked <= alive + self._meter.room()
            predict_only = self._meter.deadly and not bounded
        return not self._agree(not predict_only)

    def _try(self, size: int, *, record: bool, bounded: bool = True) -> tuple[Trial, Measurement]:
        """Run a step from a clean start, and put the state back after it, whatever came of it.

        One that is not ``bounded`` by the budget is by the device alone, and raises no error.
        """
        if self._on_step is not None:
            self._on_step(size)
        alive, budget = self._prepare()
        had_gradients = self._optimizers.graded()
        self._steps += 1
        with nullcontext() if bounded else lifted_budget(self._meter.device):
            budget = budget if bounded else self._meter.most(alive)
            measured = self._meter.run(lambda: self._step(size), size, budget=budget, record=record)
        if measured.origins is not None:
            self._holders.record(measured.traces[-1], measured.origins)
        failure = measured.failure
        fatal = failure is not None and bounded and not self._means_too_large(failure, size)
        if failure is not None and not fatal:
            release(failure)
        self._put_back()
        if self._reset is None and failure is not None:
            self._optimizers.regrade(had_gradients)
        if fatal and failure is not None:
            raise failure
        return self._judge(size, measured, budget), measured

    def _judge(self, size: int, measured: Measurement, budget: int) -> Trial:
        """Decide whether a step fits, on all ranks."""
        ran, peak = measured.failure is None, measured.peak_bytes
        self._least = min(self._least, size if ran else inf)
        short = measured.strained or (measured.failure is not None and is_out_of_memory(measured.failure))
        if short:  # an allocator that ran out has handed out less than was needed
            peak = max(peak, budget + 1)
        fits = self._agree(ran and not short and peak <= budget)
        return Trial(size, peak, fits, measured.seconds)

    def _put_back(self) -> None:
        """Put back the state before the step, but for what the optimizers made, which is kept for the next."""
        self._optimizers.borrow()
        if self._reset is not None:
            self._reset()

    def _means_too_large(self, failure: Exception, size: int) -> bool:
        """Whether a failed step means that its size does not fit."""
        if is_out_of_memory(failure):
            return True
        larger = any(not trial.fits and trial.micro_batch_size > size for trial in self._trials)
        # BatchNorm refuses one sample: with two known to be too many, no size is left.
        return (self._least < size and is_ambiguous_out_of_memory(failure)) or (size == 1 and larger)

    def _does_not_fit(self, alive: int, budget: int, high: int, *, cautious: bool) -> UserError:
        smallest = None if cautious else self._smallest_step(budget, high)
        if smallest is None and not self._trials:
            return self._shortage.error("The model and its optimizer alone take", alive, budget)
        refused = [trial for trial in self._trials if trial.peak_bytes > budget] or self._trials
        trial = smallest[0] if smallest else min(refused, key=lambda trial: trial.micro_batch_size)
        size, needed = trial.micro_batch_size, smallest[1] if smallest else trial.peak_bytes
        holders = self._holders.at(size, trial.peak_bytes)
        least = "" if smallest else " at least"
        what = f"A training step with micro_batch_size={size}, the smallest that runs, takes{least}"
        return self._shortage.error(what, needed, budget, measured=smallest is not None, holders=holders)

    def _smallest_step(self, budget: int, high: int) -> tuple[Trial, int] | None:
        """Run the smallest step that runs, bounded by the device alone; ``None`` if the budget is all that it has.

        Its optimizer has its state by the second time. Beside it are the bytes that a budget must leave on any rank,
        which is what an allocator reserves.
        """
        with lifted_budget(self._meter.device):
            more = self._meter.most(self._prepare()[0]) > budget
        if not self._agree(more):
            return None
        smallest = None
        for size in range(min(2, high), 0, -1):
            tried = [self._try(size, record=True, bounded=False) for _ in range(2)]
            if all(trial.fits for trial, _ in tried):
                needed = max(max(trial.peak_bytes, step.reserved_bytes or 0) for trial, step in tried)
                smallest = tried[-1][0], largest_over_ranks(needed, self._agree)
        return smallest


def smallest_over_ranks(value: int, agree: Callable[[bool], bool]) -> int:
    """The smallest value over ranks, from answers of ``agree`` alone: all ranks ask the same questions.

    Examples:
        >>> smallest_over_ranks(300, agree=bool)
        300
    """
    bound = 1
    while agree(value >= bound):
        bound *= 2
    low, high = bound // 2, bound - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if agree(value >= middle) else (low, middle - 1)
    return low


def largest_over_ranks(value: int, agree: Callable[[bool], bool]) -> int:
    """The largest value over ranks, in the same way.

    Examples:
        >>> largest_over_ranks(300, agree=bool)
        300
    """
    return _MOST - smallest_over_ranks(_MOST - value, agree)
