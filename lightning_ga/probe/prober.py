"""Find the limit of a training by trial steps, verify one that is known, or say that a window fits.

Tested in tests/integration/test_probe.py.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter

from lightning_ga.errors import UserError
from lightning_ga.memory.device import may_reserve
from lightning_ga.memory.oom import attempt, release
from lightning_ga.plan.accumulation import whole_multiples
from lightning_ga.plan.records import GRADIENTS, PARAMETERS, Fits, ProbeResult, Trial, still_holds
from lightning_ga.probe.budget import Budget, DoesNotFitError
from lightning_ga.probe.curve import TOLERANCE, Step
from lightning_ga.probe.meters import StepMeter, bytes_of
from lightning_ga.probe.search import Search
from lightning_ga.probe.steps_to_record import MARGIN, UPDATE, Task, affordable_samples, most_bytes, trace_sizes
from lightning_ga.probe.training import ProbedTraining
from lightning_ga.probe.trials import Trials

WARM_ROOM = 2 * (1 + UPDATE)  # times the bytes of the parameters: for gradients, twice as wide, and what they update
CLOSEST = 0.25  # share of the budget that a trial may use if nothing can be predicted and running out ends the process


class Prober:
    """Asks trial steps of a training what fits.

    With several ranks, one may know an earlier limit and another none; all run steps of the same sizes.
    """

    def __init__(self, training: ProbedTraining, meter: StepMeter, budget: Budget) -> None:
        self._training = training
        self._meter = meter
        self._budget = budget
        self._trials = Trials(training, meter, budget.asked)
        self._tried: list[Trial] = []  # in the search, in order
        self._started = time.perf_counter()

    def find(self, high: int, *, known: ProbeResult | None = None, predict_only: bool | None = None) -> ProbeResult:
        """Verify a limit that is known from before, else search; the arguments are those of ``find_micro_batch``."""
        with self._trials.running():
            high = self._training.smallest(high)
            if self._tried:  # a whole window did not fit
                high = max(1, min(high, self._tried[0].micro_batch_size - 1))
            alive, budget = self._trials.prepare()
            cautious = self._is_cautious(alive, predict_only)
            is_valid = known is not None and still_holds(known, budget, high, self._training.multiple)
            # A remembered limit is verified by a step at it.
            if self._training.agree(is_valid and not cautious) and known is not None:
                verified = self._verified(known, high)
                if verified is not None:
                    return verified
            self._training.forget()
            return self._search(high, cautious=cautious)

    def fits(self, samples: int) -> Fits | None:
        """Return what a step of so many samples takes if it fits, from one step; ``None`` if that is not sure.

        All of them run, unless running out of memory might end the process. Then two samples run, and a bound decides.
        """
        with self._trials.running(collects=not self._meter.deadly):
            samples = self._training.smallest(samples)
            tried = samples
            if self._is_cautious(self._trials.prepare()[0], None) and samples > 2:
                tried = 2
                peak = self._bound_from(tried, samples)
            else:
                peak = self._peak_of(samples)
            budget = self._trials.prepare()[1]
            if not self._training.agree(peak is not None and peak <= budget):
                self._training.forget()
                return None
            return Fits(samples, peak or 0, budget, tried, time.perf_counter() - self._started)

    def _peak_of(self, samples: int) -> int | None:
        """Return the peak of a step of so many samples, once there is state in the optimizer; ``None`` if it fails."""
        if not self._is_warmed_up():
            return None
        trial = self._trials.run(samples, record=False, lenient=True).trial
        if trial.fits:
            return trial.peak_bytes
        self._tried.append(trial)
        return None

    def _is_warmed_up(self) -> bool:
        """Make the optimizer's state by a step on gradients of zeros; return whether all ranks could."""
        warmed = attempt(self._training.warm_up, lambda error: isinstance(error, Exception))
        return self._training.agree(warmed.failure is None)

    def _bound_from(self, tried: int, samples: int) -> int | None:
        """Return a bound on the peak of so many samples, from a first pass of some; ``None`` if that shows none."""
        measured = self._meter.run(self._training.first_pass, tried, budget=self._trials.prepare()[1], record=True)
        trace = measured.traces[-1]
        bound = None
        owned = self._training.owned()
        is_sparse = any(gradient.is_sparse for gradient in owned[GRADIENTS])  # then states may be as large as weights
        if measured.failure is not None:
            release(measured.failure)  # a search follows, and meets it again
        elif trace.marks and self._training.updates_in_proportion() and not is_sparse:  # a mark: of a backward pass
            gradients = bytes_of(owned[GRADIENTS])
            owned_bytes = bytes_of(chain(*owned.values()))
            bound = most_bytes(trace, samples, peak=measured.peak_bytes, owned=owned_bytes, gradients=gradients)
        if bound is None:
            self._training.put_back()
        return bound

    def confirm(self, sizes: Sequence[int], *, predict_only: bool | None = None) -> tuple[int, int]:
        """Return the first of these falling sizes whose step fits, or 0, and the steps run so far.

        If no step near the budget may run, the prediction decides.
        """
        self._tried.clear()  # its trials were of the longest samples, and do not bound these
        with self._trials.running():
            if self._is_cautious(self._trials.prepare()[0], predict_only):
                search = partial(self._search, sizes[0], cautious=True)
                found = attempt(search, lambda error: isinstance(error, DoesNotFitError)).result
                return 0 if found is None else found.limit, self._trials.steps
            for size in sizes:
                if self._trials.run(size, record=False, lenient=True).trial.fits:
                    return size, self._trials.steps
        return 0, self._trials.steps

    def _is_cautious(self, alive: int, predict_only: bool | None) -> bool:
        """Return whether no rank may run a step near the budget: it might end the process, or the caller forbids it."""
        if predict_only is None:
            asked = self._budget.asked
            is_bounded = asked is not None and asked <= alive + self._meter.room()
            predict_only = self._meter.deadly and not is_bounded
        return not self._training.agree(not predict_only)

    def _verified(self, known: ProbeResult, high: int) -> ProbeResult | None:
        """Try a known limit; ``None`` unless it is still valid, on all ranks."""
        limit = whole_multiples(self._training.smallest(min(known.limit, high)), self._training.multiple)
        self._training.see_gradients()
        if not self._is_warmed_up():
            return None
        trial = self._trials.run(limit, record=False, lenient=True).trial
        if limit != known.limit:  # what was timed may be larger
            known = replace(known, peak_bytes=trial.peak_bytes, fastest=None, timings=())
        tolerance = 0.0 if self._meter.allocator is None else TOLERANCE
        is_as_known = abs(trial.peak_bytes - known.peak_bytes) <= tolerance * known.peak_bytes
        if not self._training.agree(trial.fits and is_as_known):  # code and data may have changed unseen
            return None
        return replace(
            known,
            limit=limit,
            budget_bytes=self._trials.prepare()[1],
            peak_bytes=trial.peak_bytes,
            trials=(),
            steps=1,
            seconds=time.perf_counter() - self._started,
            source="cache",
            holders=self._trials.holders.at(limit, trial.peak_bytes) or known.holders,
        )

    def _search(self, high: int, *, cautious: bool) -> ProbeResult:
        """Run a first step, then what a search proposes until it proposes nothing new."""
        alive, budget = self._trials.prepare()
        warm = first = None
        if self._training.agree(alive <= budget):
            sizes = self._training.first_sizes(high, cautious=cautious)
            warm = self._warm_step(sizes[0])
            first = warm or self._first_step(sizes)
        if first is None:
            raise self._does_not_fit(alive, budget, high, cautious=cautious)
        search = self._new_search(high, first, cautious=cautious, traced=warm is not None)
        if warm is not None:
            self._tried.append(warm.trial)
            search.record(warm)
        while True:
            proposal = search.propose()
            size = self._training.useful(self._training.smallest(proposal.size), search.limit)
            if size <= search.limit or size >= search.ceiling:  # nothing is left to try
                break
            step = self._trials.run(size, record=proposal.record)
            self._tried.append(step.trial)
            search.record(step)
        limit = search.limit
        if cautious:
            limit = whole_multiples(self._training.smallest(search.predicted), self._training.multiple)
        if limit < 1:
            raise self._does_not_fit(alive, budget, high, cautious=cautious)
        return self._result(search, limit)

    def _warm_step(self, size: int) -> Step | None:
        """Run a first step that finds gradients and the optimizer's state, as later ones do; ``None`` if that fails.

        The state is made outside of the budget. With an allocator, blocks would lie otherwise than in training, where
        the first step makes it.
        """
        has_room = self._meter.room() >= WARM_ROOM * bytes_of(self._training.owned()[PARAMETERS])
        can_warm_up = self._meter.allocator is None and has_room and self._training.updates_in_proportion()
        if not self._training.agree(can_warm_up):
            return None
        for _ in range(2):
            step = self._step_after_warm_up(size)
            if step is not None and self._training.agree(self._training.reached_all):
                return step
            self._training.forget()
            if step is None:
                break
            # It had assumed that all parameters have gradients; now ``warm_up`` looks (see ``ProbedTraining.forget``).
        return None

    def _step_after_warm_up(self, size: int) -> Step | None:
        """Make the optimizer's state and run a step; ``None`` if one of both fails."""
        if not self._is_warmed_up():
            return None
        step = self._trials.run(size, record=True)
        return step if step.trial.fits else None

    def _first_step(self, sizes: Sequence[int]) -> Step | None:
        """Run the first of these sizes that fits; in that step the optimizer makes its state. ``None`` if none fits."""
        for size in sizes:
            step = self._trials.run(size, record=True)
            if step.trial.fits:
                if self._meter.device.type != "cpu" and not step.trial.peak_bytes:
                    raise UserError(
                        f"A step of {size} samples uses no memory on device {str(self._meter.device)!r}: give "
                        "find_micro_batch the device= that it runs on."
                    )
                self._training.see_gradients()
                return step
            self._tried.append(step.trial)
        return None

    def _new_search(self, high: int, first: Step, *, cautious: bool, traced: bool) -> Search:
        """Return a search that knows what the first step has shown."""
        alive, budget = self._trials.prepare()
        allocator = self._meter.allocator
        rounding = self._meter.rounding
        taken = first.trial.peak_bytes - alive
        affordable = affordable_samples(first, budget - alive, taken=taken, rounding=rounding)
        affordable = self._training.smallest(min(max(0, affordable), 2 * high))
        for trial in self._tried:
            if not trial.fits:
                high = min(high, trial.micro_batch_size - 1)
        kernels_vary = allocator is not None and not cautious
        task = Task(
            high,
            budget,
            rounding,
            self._training.multiple,
            in_segments=allocator is not None and allocator.cuts_segments,
            has_margin=may_reserve(self._meter.device, budget + int(MARGIN * budget)),
            is_cautious=cautious,
            share=CLOSEST if self._meter.deadly else 1.0,
        )
        sizes = trace_sizes(high, affordable, first.samples, kernels_vary=kernels_vary, traced=traced)
        return Search(task, sizes)

    def _result(self, search: Search, limit: int) -> ProbeResult:
        measured = {trial.micro_batch_size: trial.peak_bytes for trial in self._tried}
        peak = measured.get(limit) or search.predict(limit) or 0
        return ProbeResult(
            limit=limit,
            budget_bytes=search.task.budget,
            peak_bytes=peak,
            trials=tuple(self._tried),
            steps=self._trials.steps,
            seconds=time.perf_counter() - self._started,
            method=search.method,
            curve=search.curve(limit),
            holders=self._trials.holders.at(limit, peak),
        )

    def _does_not_fit(self, alive: int, budget: int, high: int, *, cautious: bool) -> DoesNotFitError:
        smallest = self._smallest_step(budget, high, cautious=cautious)
        if smallest is None and not self._tried:
            return self._budget.shortage("The model and its optimizer alone take", alive, budget)
        least = ""
        if smallest is not None:
            trial, needed = smallest
        else:
            least = " at least"
            refused = [trial for trial in self._tried if trial.peak_bytes > budget] or self._tried
            trial = min(refused, key=attrgetter("micro_batch_size"))
            needed = trial.peak_bytes
        size = trial.micro_batch_size
        holders = self._trials.holders.at(size, trial.peak_bytes)
        what = f"A training step with micro_batch_size={size}, the smallest that runs, takes{least}"
        return self._budget.shortage(what, needed, budget, measured=smallest is not None, holders=holders)

    def _smallest_step(self, budget: int, high: int, *, cautious: bool) -> tuple[Trial, int] | None:
        """Run the smallest step that runs, bounded by the device alone; ``None`` if it has no more than the budget.

        It runs twice, because the optimizer makes its state in the first step. Also return the bytes that a budget must
        leave on any rank: those that an allocator reserves.
        """
        if cautious or not self._training.agree(self._trials.could_use_more(budget)):
            return None
        smallest = None
        for size in self._training.first_sizes(high):  # they fall: the last that runs is the smallest
            first = self._trials.run(size, record=True, bounded=False)
            second = self._trials.run(size, record=True, bounded=False)
            if first.trial.fits and second.trial.fits:
                needed = max(first.needed_bytes, second.needed_bytes)
                smallest = second.trial, self._training.largest(needed)
        return smallest
