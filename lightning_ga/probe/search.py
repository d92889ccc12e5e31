"""Find the largest micro-batch that fits in a memory budget, in as few training steps as possible.

``Search`` says which size to try next as a function of the outcomes so far. Two traces of small steps (on a GPU
larger ones) predict the peak at every size (see ``peak_prediction``), and one step at the predicted limit verifies it.
If the prediction misses, or the streams do not align, measured peaks and halving close in on the limit from both sides.
The limit was always tried, or, if nothing may be tried, predicted.

If sizes are exact to the byte, so is the limit. An allocator that rounds and cuts segments varies from step to step:
there the search ends when at most one sample in a hundred could be gained, or after ``MOST_TRIALS``.
"""

from math import isqrt, sqrt
from typing import NamedTuple

from lightning_ga.plan.accumulation import ceil_div, whole_multiples
from lightning_ga.plan.records import Method
from lightning_ga.probe.curve import Curve, Step, fit_curve
from lightning_ga.probe.peak_prediction import PeakPredictor, largest_fitting
from lightning_ga.probe.steps_to_record import MARGIN, Task, after_first_failure, lowered

CURVE_POINTS = 32
ENOUGH = 0.99  # of what may still fit: then no further trial, if sizes are not exact
BACKOFF_AFTER_FAILURE = 0.02  # of a size that failed: if a trial that much smaller fits, two in a hundred are left
MOST_TRIALS = 12  # if sizes are not exact
HOLE_RESERVE = 0.005  # share of the budget that a first trial near it leaves to holes, if there is no margin
WORTH_RECORDING = 0.03  # a step is recorded if sizes larger by this share might still fit
WORTH_A_STEP = 1.05  # times the largest step: if nothing can be predicted, a smaller growth ends the search


class Proposal(NamedTuple):
    """A step to try."""

    size: int
    record: bool = False  # one that is not recorded is not disturbed by that


class Search:
    """Says which micro-batch size to try next (``propose``), from what came of the earlier ones (``record``).

    With several ranks, each keeps a search of its own and all run the smallest proposal: it ends at the limit of all.
    """

    def __init__(self, task: Task, sizes: tuple[int, ...]) -> None:
        self.task = task
        self._sizes = sizes  # to trace, in rising order
        self._steps: list[Step] = []  # in order
        self._curve: Curve | None = None
        self._verified = False  # whether a trial confirmed the curve
        self._misled = False  # whether one contradicted it

    @property
    def limit(self) -> int:
        """Largest size that was tried and fits."""
        return max((step.samples for step in self._steps if step.trial.fits), default=0)

    @property
    def ceiling(self) -> int:
        """Smallest size known not to fit, by trial."""
        return min((step.samples for step in self._failed), default=self.task.high + 1)

    @property
    def _failed(self) -> list[Step]:
        return [step for step in self._steps if not step.trial.fits]

    @property
    def _fitting(self) -> list[Step]:
        """The steps that fit, by size."""
        fitting = [step for step in self._steps if step.trial.fits]
        return sorted(fitting, key=lambda step: step.samples)

    def propose(self) -> Proposal:
        """Return the next step to try, of a size below ``ceiling``; one of ``limit`` samples if nothing is left."""
        limit = self.limit
        if self._following(limit) >= self.ceiling:
            return Proposal(limit)
        needs_traces = len(self._fitting) < len(self._sizes) or self.task.is_cautious
        for size in self._sizes:
            if limit < size < self.ceiling:
                return Proposal(self._whole(size), needs_traces)
        if self.task.is_cautious:
            return Proposal(self._whole(self._approach()), needs_traces)
        guess = self._guess()
        if self.task.rounding > 1 and self._is_enough(guess):
            return Proposal(limit)
        return Proposal(self._whole(guess), needs_traces or self._may_be_more(guess))

    def _following(self, size: int) -> int:
        """Return the next larger size that micro-batches may have."""
        above = size + 1
        if above < self.task.multiple:
            return above
        return ceil_div(above, self.task.multiple) * self.task.multiple

    def _whole(self, size: int) -> int:
        """Return the largest multiple up to a proposed size; if that is no news, the next one above the limit.

        It is not, where the search is over, or more is not safe.
        """
        whole = whole_multiples(size, self.task.multiple)
        is_over = self.task.is_cautious or self._is_proven()
        if whole <= self.limit and not is_over:
            return self._following(self.limit)
        return whole

    def _guess(self) -> int:
        """Guess the limit from the predicted curve and from the trials that contradict it."""
        low = self.limit
        if self._curve is None and self._failed:
            return _between(low, self.ceiling)
        if self._curve is None:
            return min(2 * low, self.ceiling - 1)
        guess = largest_fitting(self._less_margin, low + 1, self.task.high, self.task.budget)
        if self.task.rounding > 1:
            if low > max(self._sizes):  # the curve goes through a large step: it is nearly right
                return self._below_failures(guess)
            if not self.task.has_margin:
                guess = self._less_reserve(self._curve, guess)
        if guess < self.ceiling:
            return guess
        return _between(low, self.ceiling)  # memory may be fragmented

    def _less_reserve(self, curve: Curve, guess: int) -> int:
        """Lower a guess near an allocator's budget, where many more samples may need little more memory.

        By a hundredth of the samples, or until ``HOLE_RESERVE`` of the budget is left: whichever leaves more samples.
        """
        within = self.task.budget - int(HOLE_RESERVE * self.task.budget)
        spared = largest_fitting(curve.needs, self.limit + 1, guess, within)
        return max(spared, self.limit, guess - guess // 100)

    def _below_failures(self, guess: int) -> int:
        """Return a guess that trusts a failure just above more than the last bytes of a prediction."""
        failures = len(self._failed)
        if not failures:
            return guess
        middle = _between(self.limit, self.ceiling)
        is_still_misled = not self._steps[-1].trial.fits or guess >= self.ceiling
        if failures > 1 and is_still_misled:  # the curve has led too far twice, and no step has corrected it
            return middle
        below_failure = self.ceiling - max(1, int(BACKOFF_AFTER_FAILURE * self.ceiling))
        return min(guess, max(middle, below_failure))

    def _approach(self) -> int:
        """Return a larger size that is not near the budget: needed only if the streams do not align."""
        limit = self.limit
        if not limit:
            return _between(0, self.ceiling)
        aligned = self._replay is not None and (self._verified or not self._replay.is_quadratic)
        if aligned or self._failed:
            return limit
        fixed, growing = self._parts()
        # What grows at all grows at most as the square of the samples: attention and similarity matrices do.
        growth = min(2.0, sqrt(max(0, int(self.task.share * self.task.budget) - fixed) / max(1, growing)))
        further = min(int(growth * limit), self.task.high)
        if further > WORTH_A_STEP * limit or further == self.task.high:
            return further
        return limit

    def _parts(self) -> tuple[int, int]:
        """Return the bytes of the largest step that stay as they are when the samples grow, and those that may grow.

        What a step leaves behind stays, if a smaller step leaves as much.
        """
        smaller, largest = self._fitting[-2:]
        rounding = self.task.rounding
        kept = _bytes_left_by(largest, rounding)
        if not kept or kept != _bytes_left_by(smaller, rounding):
            return 0, largest.trial.peak_bytes
        unseen = max(0, largest.trial.peak_bytes - max(trace.peak(rounding) for trace in largest.traces))
        return kept, unseen + max(trace.transient_peak(rounding) for trace in largest.traces)

    def record(self, step: Step) -> None:
        """Process the outcome of one step."""
        self._judge(step)
        self._steps.append(step)
        fitting = self._fitting
        if not step.trial.fits:
            if not fitting:
                self._sizes = after_first_failure(self._sizes, step.samples)
            return
        if step.traces or self._replay is None or self._curve is None:
            self._curve = fit_curve(fitting, self.task.rounding, in_segments=self.task.in_segments)
        else:
            self._curve = self._curve.through(fitting[-1])
        if len(fitting) < len(self._sizes):
            self._sizes = lowered(self._sizes, self.task, fitting[-1])

    def _judge(self, step: Step) -> None:
        """Note whether the curve, if there is one, has foreseen what came of a step."""
        if self._curve is None:
            return
        if step.trial.fits:
            is_foreseen = self._curve.confirms(step.trial, step.traces)
            self._verified |= is_foreseen
        else:
            is_foreseen = self._less_margin(step.samples) > self.task.budget
        self._misled |= not is_foreseen

    def _is_enough(self, guess: int) -> bool:
        """Return whether the limit, tried beyond the traces, is near enough to the guess, or trials are used up."""
        limit = self.limit
        is_beyond = limit > max(self._sizes) or bool(self._failed)
        is_near = limit >= ENOUGH * guess
        is_over = limit > 0 and len(self._steps) >= MOST_TRIALS
        return is_over or (is_beyond and is_near)

    def _may_be_more(self, guess: int) -> bool:
        """Return whether much more fits if temporaries have ended growing, which a recorded step would show."""
        more = guess + max(1, int(WORTH_RECORDING * guess))
        if self._curve is None or more >= self.ceiling:
            return False
        return self._curve.foreseen(more, at_least=True) <= self.task.budget

    @property
    def predicted(self) -> int:
        """The limit if nothing may be tried: predicted if the streams align, else the largest size that was tried.

        The margin stays unused, because no trial shows that holes keep within it.
        """
        if self._curve is None or self._replay is None:
            return self.limit
        return max(self.limit, largest_fitting(self._curve.needs, self.limit + 1, self.ceiling - 1, self.task.budget))

    def predict(self, samples: int) -> int | None:
        """Return the predicted peak in bytes at a micro-batch size, ``None`` before two steps were measured."""
        return None if self._curve is None else self._curve(samples)

    @property
    def method(self) -> Method:
        """What found the limit."""
        if self.task.is_cautious:
            return "below" if self._replay is None else "prediction"
        if self._is_proven():
            return "replay"
        if self._curve is not None and len(self._curve.lines) > 1:
            return "phases"
        return "bracket"

    def curve(self, limit: int) -> tuple[tuple[int, int], ...]:
        """Return bytes that a budget must leave at sizes from one to somewhat above the limit; none without a curve.

        Lines stand for a curve only near the steps they go through, so there is none without a replay.
        """
        if self._curve is None or self._replay is None:
            return ()
        end = max(limit + 1, limit * 5 // 4)
        sizes = {
            1,
            limit,
            limit + 1,
            self._following(limit),
            *(1 + (end - 1) * part // CURVE_POINTS for part in range(CURVE_POINTS + 1)),
        }
        return tuple((size, self._curve.needs(size)) for size in sorted(sizes))

    @property
    def _replay(self) -> PeakPredictor | None:
        """The replay of two aligned traces, if the curve is made of one."""
        return None if self._curve is None else self._curve.replay

    def _is_proven(self) -> bool:
        """Return whether a replay is as good as a trial: one trial confirmed it, and none contradicted it."""
        return self._verified and not self._misled and self._replay is not None

    def _less_margin(self, samples: int) -> int:
        """Return the bytes that the budget must leave, less what holes may use of the margin; blocks may not."""
        assert self._curve is not None
        needed = self._curve.needs(samples)
        if self.task.has_margin:
            needed = max(needed - int(MARGIN * self.task.budget), self._curve(samples))
        return needed


def _bytes_left_by(step: Step, rounding: int) -> int:
    """Return the bytes that are alive after a step; 0 if it was not recorded."""
    return max((trace.kept_bytes(rounding) for trace in step.traces), default=0)


def _between(low: int, ceiling: int) -> int:
    """Return a size strictly between: the geometric mean of bounds that are far apart, else the middle."""
    if ceiling > 4 * low > 0:
        return isqrt(low * ceiling)
    return (low + ceiling) // 2
