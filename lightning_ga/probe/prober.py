"""Runs the training steps that a search for the limit asks for, each from the same state.

Tested in tests/integration/test_probe.py.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ga.errors import UserError
from lightning_ga.memory.device import enforced_budget, lifted_budget, may_reserve
from lightning_ga.memory.oom import attempt, is_ambiguous_out_of_memory, is_out_of_memory, release
from lightning_ga.memory.trace import Segment
from lightning_ga.plan.records import GRADIENTS, Attribution, Fits, ProbeResult, Trial, still_holds
from lightning_ga.plan.units import least_budget, parse_budget
from lightning_ga.probe.curve import MARGIN, Step, Task, affordable_samples, most_bytes, trace_sizes
from lightning_ga.probe.meters import Measurement, PeakHolders, StepMeter, bytes_of
from lightning_ga.probe.search import Search
from lightning_ga.probe.training import ProbedTraining
from lightning_ga.recompute.choice import Candidate, ChosenSet, SetTrial, choose

_frozen: ContextVar[bool] = ContextVar("_frozen", default=False)
CLOSEST = 0.25  # share of the budget that a trial may use if nothing can be predicted and running out ends the process


@contextmanager
def older_objects_frozen() -> Iterator[None]:
    """Return a context in which the cycle collector looks at new objects alone: PyTorch has made a million before.

    Nothing is done within another such context, or if the user has frozen objects.
    """
    if _frozen.get() or gc.get_freeze_count():  # counting a million takes as long as a small step
        yield
        return
    token = _frozen.set(True)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _frozen.reset(token)


class DoesNotFitError(UserError):
    """A step of the fewest samples takes more bytes than are left."""

    def __init__(self, sentence: str, needed: int, left: int) -> None:
        super().__init__(sentence)
        self.needed = needed
        self.left = left


class Budget:
    """A memory budget, or what a device has free without one."""

    advice = "train in a lower precision, use a smaller model, or shard it over more devices"

    def __init__(
        self, value: int | float | str | None, total_bytes: int | None, *, name: str = "memory_budget"
    ) -> None:
        self.asked = parse_budget(value, total_bytes, name=name)  # bytes; ``None`` is what the device has free
        self.bound = "the device"  # what leaves a step too little
        if value is not None:
            self.bound = f"{name}={value!r}"
        self._name = name  # of the argument
        self._total_bytes = total_bytes  # of the device, to which shares refer

    def shortage(
        self, what: str, needed: int, left: int, *, measured: bool = False, holders: Attribution | None = None
    ) -> DoesNotFitError:
        """Return the error that something takes more bytes than are left; if ``measured``, as many are enough."""
        on_device = self._total_bytes is None or needed <= self._total_bytes
        if measured and self.asked is not None and on_device:
            remedy = f"{self._name}={least_budget(needed)!r} is enough, or {self.advice}"
        else:
            remedy = f"more memory is needed; {self.advice}"
        holding = ""
        if holders:
            holding = f" As it was recorded: {holders.sentence()}"
        sentence = f"{what} {needed:,} bytes, and {self.bound} leaves {left:,} bytes: {remedy}.{holding}"
        return DoesNotFitError(sentence, needed, left)


class Prober:
    """Runs trial steps of a training and puts its state back after each.

    With several ranks, one may know an earlier limit and another none; all run steps of the same sizes.
    """

    def __init__(self, training: ProbedTraining, meter: StepMeter, budget: Budget) -> None:
        self._training = training
        self._meter = meter
        self._budget = budget
        self._holders = PeakHolders(meter.rounding)
        self._trials: list[Trial] = []
        self._steps = 0
        self._least: float = inf  # smallest size whose step ran
        self._started = time.perf_counter()
        self._collects = True

    def find(self, high: int, *, known: ProbeResult | None = None, predict_only: bool | None = None) -> ProbeResult:
        """Verify a limit that is known from before, else search; the arguments are those of ``find_micro_batch``."""
        with self._running():
            high = self._training.smallest(high)
            alive, budget = self._prepare()
            cautious = self._is_cautious(alive, predict_only)
            is_valid = known is not None and still_holds(known, budget, high)
            if self._training.agree(is_valid) and known is not None:
                verified = self._verified(known, high, cautious=cautious)
                if verified is not None:
                    return verified
            self._training.forget()
            return self._search(high, cautious=cautious)

    def choose(self, root: Candidate, size: int, use: Callable[[tuple[str, ...]], None]) -> ChosenSet:
        """Choose the submodules that are computed again so that a step of so many samples fits; ``use`` sets them.

        The first step with an optimizer needs less memory than later ones, so its state is made before.

        Raises:
            UserError: If no set fits.
        """
        with self._running():
            warmed = attempt(self._training.warm_up).failure is None
            self._training.put_back()
            self._least = 0
            alive, budget = self._prepare()
            budget = self._training.smallest(budget)
            if not self._training.agree(warmed and alive <= budget):
                what = "The model, its gradients and its optimizer's states, which checkpointing cannot lower, take"
                raise self._budget.shortage(what, alive, budget)

            def run(names: tuple[str, ...]) -> SetTrial:
                use(names)
                trial = self._try(size, record=False).trial
                return SetTrial(trial.fits, self._training.largest(trial.peak_bytes) if trial.fits else None)

            chosen = choose(root, run, budget)
            if not chosen.names:
                peaks = [trial.peak_bytes for trial in self._trials]
                what = (
                    f"With micro_batch_size={size} and all submodules computed again that can be, a step takes at least"
                )
                raise self._budget.shortage(what, max(min(peaks, default=0), budget + 1), budget)
            return chosen

    def fits(self, samples: int) -> Fits | None:
        """Return what a step of so many samples takes if it fits, from one step; ``None`` if that is not sure.

        All of them run, unless running out of memory might end the process. Then two samples run, and a bound decides.
        """
        with self._running(collects=not self._meter.deadly):
            samples = self._training.smallest(samples)
            tried = samples
            if self._is_cautious(self._prepare()[0], None):
                tried = min(2, samples)
            if tried == samples:
                peak = self._peak_of(samples)
            else:
                peak = self._bound_from(tried, samples)
            budget = self._prepare()[1]
            if not self._training.agree(peak is not None and peak <= budget):
                self._training.forget()
                return None
            return Fits(samples, peak or 0, budget, tried, time.perf_counter() - self._started)

    def _peak_of(self, samples: int) -> int | None:
        """Return the peak of a step of so many samples, once there is state in the optimizer; ``None`` if it fails."""
        warmed = attempt(self._training.warm_up, lambda error: isinstance(error, Exception))
        self._training.put_back()
        if not self._training.agree(bool(warmed.result)):
            return None
        self._least = 0  # after an ambiguous error a search follows, which judges it
        trial = self._try(samples, record=False).trial
        if not trial.fits:
            self._trials.append(trial)
        return trial.peak_bytes if trial.fits else None

    def _bound_from(self, tried: int, samples: int) -> int | None:
        """Return a bound on the peak of so many samples, from a first pass of some; ``None`` if that shows none.

        Nothing is put back before what the pass has made is counted.
        """
        measured = self._meter.run(self._training.first_pass, tried, budget=self._prepare()[1], record=True)
        trace = measured.traces[-1]
        if measured.failure is not None:  # a search follows, and meets it again
            release(measured.failure)
        bound = None
        if measured.failure is None and trace.marks:  # a backward pass
            owned = self._training.owned()
            gradients = bytes_of(owned[GRADIENTS])
            owned_bytes = bytes_of(chain(*owned.values()))
            bound = most_bytes(trace, samples, peak=measured.peak_bytes, owned=owned_bytes, gradients=gradients)
        self._training.put_back()
        return bound

    def confirm(self, sizes: Sequence[int], *, predict_only: bool | None = None) -> tuple[int, int]:
        """Return the first of these falling sizes whose step fits, or 0, and the steps run so far.

        If no step near the budget may run, the prediction decides.
        """
        with self._running():
            if self._is_cautious(self._prepare()[0], predict_only):
                try:
                    return self._search(sizes[0], cautious=True).limit, self._steps
                except UserError:  # not one sample fits
                    return 0, self._steps
            return next((size for size in sizes if self._try(size, record=False).trial.fits), 0), self._steps

    @contextmanager
    def _running(self, *, collects: bool = True) -> Iterator[None]:
        """Watch optimizers, keep to the budget and let ``gc.collect`` leave older objects aside, as a context.

        Unless it ``collects``, no step needs the memory of garbage. A full collection of new objects alone would let
        Python collect all older ones soon after, which may take longer than a step.
        """
        self._collects = collects
        if not self._meter.deadly:  # tensors that nobody refers to use memory of the device
            gc.collect()
        hook = register_optimizer_step_pre_hook(self._on_optimizer_step)
        with older_objects_frozen():
            try:
                with enforced_budget(self._meter.device, self._budget.asked):
                    yield
            finally:
                hook.remove()
                if self._meter.allocator is not None:
                    self._meter.allocator.stop()
                if collects:
                    gc.collect()  # a failed step that computes again in its backward pass leaves cycles with its batch

    def _verified(self, known: ProbeResult, high: int, *, cautious: bool) -> ProbeResult | None:
        """Try a known limit; ``None`` unless it is still valid, on all ranks."""
        limit = self._training.smallest(min(known.limit, high))
        if cautious and not self._training.agree(limit == known.limit):
            return None  # the prediction is for more samples, and none are tried
        self._training.see_gradients()
        if self._training.warm_up():
            self._training.put_back()
        self._least = 0  # after an ambiguous error a search follows, which judges it
        trial = self._try(min(2, limit) if cautious else limit, record=False).trial
        if not trial.fits:
            return None
        if limit == known.limit:
            peak = known.peak_bytes
        else:
            peak = trial.peak_bytes
        if cautious:
            holders = known.holders
        else:
            holders = self._holders.at(limit, peak) or known.holders
        found = replace(known, limit=limit, budget_bytes=self._prepare()[1], peak_bytes=peak, holders=holders)
        return replace(found, trials=(), steps=1, seconds=time.perf_counter() - self._started, source="cache")

    def _search(self, high: int, *, cautious: bool) -> ProbeResult:
        """Warm up, then run what a search proposes until it proposes nothing new."""
        self._least = inf
        high, sizes = self._warm_up(high, cautious)
        alive, budget = self._prepare()
        has_margin = may_reserve(self._meter.device, budget + int(MARGIN * budget))
        closest = None
        if cautious:
            closest = CLOSEST if self._meter.deadly else 1.0
        rules = None
        if self._meter.allocator is not None:
            rules = self._meter.allocator.rules
        task = Task(high, budget, self._meter.rounding, rules, has_margin, closest)
        search = Search(task, sizes)
        while (size := self._next(search)) > search.limit:
            step = self._try(size, record=search.wants_trace)
            self._trials.append(step.trial)
            search.record(step)
        if task.rules is not None:
            self._training.put_back()
        if cautious:
            limit = self._training.smallest(search.predicted)
        else:
            limit = search.limit
        if limit < 1:
            raise self._does_not_fit(alive, budget, high, cautious=cautious)
        return self._result(search, limit)

    def _next(self, search: Search) -> int:
        """Return the next size to try, at most the limit if there is none."""
        size = self._training.useful(self._training.smallest(search.propose(self._layout(search))), search.limit)
        return size if size < search.ceiling else search.limit

    def _on_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """End a phase of the step and remember the optimizer, as a hook before every optimizer step."""
        self._meter.tensors.mark()
        self._training.note(optimizer)

    def _result(self, search: Search, limit: int) -> ProbeResult:
        measured = {trial.micro_batch_size: trial.peak_bytes for trial in self._trials}
        if limit in measured:
            peak = measured[limit]
        else:
            peak = search.predict(limit) or 0
        return ProbeResult(
            limit=limit,
            budget_bytes=search.task.budget,
            peak_bytes=peak,
            trials=tuple(self._trials),
            steps=self._steps,
            seconds=time.perf_counter() - self._started,
            method=search.method,
            curve=search.curve(limit),
            holders=self._holders.at(limit, peak),
        )

    def _warm_up(self, high: int, cautious: bool) -> tuple[int, tuple[int, ...]]:
        """Run a first step, of two samples if these fit; return the largest size left to search, and sizes to trace."""
        alive, budget = self._prepare()
        if not self._training.agree(alive <= budget):
            raise self._does_not_fit(alive, budget, high, cautious=cautious)
        for size in self._training.first_sizes(high):
            step = self._try(size, record=True)
            if not step.trial.fits:
                self._trials.append(step.trial)
                continue
            peak = step.trial.peak_bytes
            if self._meter.device.type != "cpu" and not peak:
                raise UserError(
                    f"A step of {size} samples uses no memory on device {str(self._meter.device)!r}: give "
                    "find_micro_batch the device= that it runs on."
                )
            self._training.see_gradients()
            alive = self._prepare()[0]
            rounding = self._meter.rounding
            affordable = affordable_samples(step.traces, budget - alive, taken=peak - alive, rounding=rounding)
            affordable = self._training.smallest(min(max(0, affordable), 2 * high))
            if size == 1:
                high = 1
            kernels_vary = self._meter.allocator is not None and not cautious
            return high, trace_sizes(high, affordable, size, kernels_vary=kernels_vary)
        raise self._does_not_fit(alive, budget, high, cautious=cautious)

    def _prepare(self) -> tuple[int, int]:
        """Prepare a step; return the bytes alive before it, and the budget in bytes as the device stands now."""
        if self._collects:
            gc.collect()
        self._training.lend()
        alive = self._meter.count(self._training.resident())
        room = alive + self._meter.room()
        return alive, room if self._budget.asked is None else min(self._budget.asked, room)

    def _layout(self, search: Search) -> tuple[Segment, ...]:
        """Prepare a step if segments matter, and return those that it will find."""
        if search.task.rules is None:
            return ()
        self._prepare()
        return self._meter.layout()

    def _is_cautious(self, alive: int, predict_only: bool | None) -> bool:
        """Return whether no rank may run a step near the budget: it might end the process, or the caller forbids it."""
        if predict_only is None:
            bounded = self._budget.asked is not None and self._budget.asked <= alive + self._meter.room()
            predict_only = self._meter.deadly and not bounded
        return not self._training.agree(not predict_only)

    def _try(self, size: int, *, record: bool, bounded: bool = True) -> Step:
        """Run a step from a clean start, and put the state back after it, whatever came of it.

        A step that is not ``bounded`` by the budget is bounded by the device alone, and raises no error.
        """
        alive, budget = self._prepare()
        had_gradients = self._training.graded()
        self._steps += 1
        with nullcontext() if bounded else lifted_budget(self._meter.device):
            if not bounded:
                budget = alive + self._meter.room()
            measured = self._meter.run(self._training.step, size, budget=budget, record=record)
        if measured.origins is not None:
            self._holders.record(measured.traces[-1], measured.origins)
        failure = measured.failure
        fatal = failure is not None and bounded and not self._means_too_large(failure, size)
        if failure is not None and not fatal:
            release(failure)
        self._training.put_back(None if failure is None else had_gradients)
        if fatal and failure is not None:
            raise failure
        return Step(self._judge(size, measured, budget), measured.traces, measured.reserved_bytes)

    def _judge(self, size: int, measured: Measurement, budget: int) -> Trial:
        """Decide whether a step fits, on all ranks."""
        ran = measured.failure is None
        peak = measured.peak_bytes
        self._least = min(self._least, size if ran else inf)
        short = measured.strained or (measured.failure is not None and is_out_of_memory(measured.failure))
        if short:  # an allocator that ran out has handed out less than was needed
            peak = max(peak, budget + 1)
        fits = self._training.agree(ran and not short and peak <= budget)
        return Trial(size, peak, fits, measured.seconds)

    def _means_too_large(self, failure: Exception, size: int) -> bool:
        if is_out_of_memory(failure):
            return True
        larger = any(not trial.fits and trial.micro_batch_size > size for trial in self._trials)
        # BatchNorm refuses one sample: with two known to be too many, no size is left.
        return (self._least < size and is_ambiguous_out_of_memory(failure)) or (size == 1 and larger)

    def _does_not_fit(self, alive: int, budget: int, high: int, *, cautious: bool) -> UserError:
        smallest = None
        if not cautious:
            smallest = self._smallest_step(budget, high)
        if smallest is None and not self._trials:
            return self._budget.shortage("The model and its optimizer alone take", alive, budget)
        refused = [trial for trial in self._trials if trial.peak_bytes > budget] or self._trials
        if smallest:
            trial = smallest[0]
        else:
            trial = min(refused, key=lambda trial: trial.micro_batch_size)
        size = trial.micro_batch_size
        needed = smallest[1] if smallest else trial.peak_bytes
        holders = self._holders.at(size, trial.peak_bytes)
        least = "" if smallest else " at least"
        what = f"A training step with micro_batch_size={size}, the smallest that runs, takes{least}"
        return self._budget.shortage(what, needed, budget, measured=smallest is not None, holders=holders)

    def _smallest_step(self, budget: int, high: int) -> tuple[Trial, int] | None:
        """Run the smallest step that runs, bounded by the device alone; ``None`` if the budget is all that it has.

        It runs twice, because the optimizer makes its state in the first step. Also return the bytes that a budget must
        leave on any rank: those that an allocator reserves.
        """
        with lifted_budget(self._meter.device):
            more = self._prepare()[0] + self._meter.room() > budget
        if not self._training.agree(more):
            return None
        smallest = None
        for size in self._training.first_sizes(high):
            tried = [self._try(size, record=True, bounded=False) for _ in range(2)]
            if all(step.trial.fits for step in tried):
                needed = max(max(step.trial.peak_bytes, step.reserved_bytes or 0) for step in tried)
                smallest = tried[-1].trial, self._training.largest(needed)
        return smallest
