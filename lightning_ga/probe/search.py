"""Find the largest micro-batch that fits in a memory budget, in as few training steps as possible.

``Search`` is pure: it says which size to try next, and gets the outcome. Two traces of small
steps predict the peak at every size (see ``prediction``), and one step at the predicted limit verifies
it. If the prediction misses, or the streams do not align, measured peaks and halving close in on
the limit from both sides. The limit was always tried, or, if nothing may be tried, predicted.

If sizes are exact to the byte, so is the limit. An allocator that rounds and cuts segments varies from step to step:
there the search ends when at most one sample in a hundred could be gained, or after ``MOST_TRIALS``.
"""

from math import isqrt, sqrt

from lightning_ga.memory.trace import Segment
from lightning_ga.plan.records import Method
from lightning_ga.probe.curve import MARGIN, Curve, Step, Task, TraceSizes, fit_curve
from lightning_ga.probe.prediction import PeakPredictor, largest_fitting

CURVE_POINTS = 32
ENOUGH = 0.99  # of what may still fit: then no further trial, if sizes are not exact
MANY_TRIALS = 5  # after so many, these shares are enough: of what may still fit, and of a size that failed
NEARLY = 0.98
NEARLY_OF_FAILED = 0.95
BACKOFF_AFTER_FAILURE = 0.02  # of a size that failed: if a trial that much smaller fits, two in a hundred are left
MOST_TRIALS = 12  # if sizes are not exact
HOLE_RESERVE = 0.005  # share of the budget that a first trial near it leaves to holes, if there is no margin
WORTH_RECORDING = 0.03  # a step is recorded if sizes larger by this share might still fit
WORTH_A_STEP = 1.05  # times the largest step: if nothing can be predicted, a smaller growth ends the search
# After a failure that the curve did not predict: how far to stay below it, as a share of the budget if sizes are exact,
# else of the size. A step that fits corrects the curve by what the allocator reserved, so one should come soon.
EXACT_SPARES = (0.02, 0.04, 0.08)
SPARES = (0.08, 0.08)


class Search:
    """Says which micro-batch size to try next (``propose``), from what came of the earlier ones (``record``).

    A proposal equal to ``limit`` means that nothing is worth a trial any more. With several ranks,
    each keeps a search of its own and all run the smallest proposal: it ends at the limit of all.
    """

    def __init__(self, task: Task, sizes: tuple[int, ...] = (4, 8)) -> None:
        self.task = task
        self.limit = 0  # largest size that was tried and fits
        self.ceiling = task.high + 1  # smallest size known not to fit, by trial
        self._traces = TraceSizes(task, sizes)
        self._fitting: list[Step] = []  # by size
        self._curve: Curve | None = None
        self._verified = self._misled = False  # whether a trial confirmed the curve, and whether one contradicted it
        self._failed_last = False
        self._is_unsure = False  # whether the last proposal may be too small
        self._misses = 0
        self._stride = 1

    def propose(self, layout: tuple[Segment, ...] = ()) -> int:
        """Return the next size to try, below ``ceiling``, which will find these segments; ``limit`` at the end."""
        if self._curve is not None:
            self._curve = self._curve.begun_at(layout)
        if self.limit + 1 >= self.ceiling:
            return self.limit
        size = self._traces.next(self.limit, self.ceiling)
        if size is not None:
            return size
        if self.task.closest is not None:
            return self._approach(self.task.closest)
        guess = self._guess()
        if self.task.rounding > 1 and self._is_enough(guess):
            return self.limit
        self._is_unsure = self._may_be_more(guess)
        if guess > self.limit or self._is_proven():
            return guess
        return self._unused_between_traces() or min(self.limit + self._stride, self.ceiling - 1)

    def _guess(self) -> int:
        """Guess the limit from the predicted curve and from the trials that contradict it."""
        low = self.limit
        high = self.ceiling - 1
        budget = self.task.budget
        if self._curve is None:
            if self._misses:
                return _between(low, self.ceiling)
            return min(2 * low, high)
        is_exact = self.task.rounding == 1
        large = low > max(self._traces.sizes)  # a large step is in the curve: it is nearly right
        guess = largest_fitting(self._needs, low + 1, self.task.high, budget)
        if not (is_exact or large or self.task.has_margin):
            # Near an allocator's budget, many more samples may need little more memory.
            spared = largest_fitting(self._curve.needs, low + 1, guess, budget - int(HOLE_RESERVE * budget))
            guess = max(spared, largest_fitting(self._needs, low + 1, guess - guess // 100, budget))
        if large and not is_exact:
            middle = _between(low, self.ceiling)
            if self._misses > 1 and (self._failed_last or guess >= self.ceiling):
                return middle
            # A failure just above is better evidence than the last bytes of a prediction.
            below = max(middle, min(high, self.ceiling - int(BACKOFF_AFTER_FAILURE * self.ceiling)))
            return min(guess, below) if self._misses else guess
        if guess < self.ceiling:
            return guess
        guess = self._spared(self._curve)
        if low < guess < self.ceiling:
            return guess
        return _between(low, self.ceiling)

    def _spared(self, curve: Curve) -> int:
        """Return a size below one that failed although the curve said that it fits: memory may be fragmented."""
        high = self.ceiling - 1
        is_exact = self.task.rounding == 1
        spares = EXACT_SPARES if is_exact else SPARES
        if self._misses > len(spares) or (curve.replay is None and len(curve.lines) == 1):
            return 0
        spare = spares[self._misses - 1]
        if not is_exact:
            return high - int(spare * high)
        return largest_fitting(curve.needs, self.limit + 1, high, self.task.budget - int(spare * self.task.budget))

    def _unused_between_traces(self) -> int | None:
        """Return a size whose trial confirms a replay that puts the limit at a trace, if there is one.

        The alternative is to try one sample too many.
        """
        if self._replay is None or self._misled:
            return None
        low = self._replay.first.samples
        high = self._replay.second.samples
        return (low + high) // 2 if high - low > 1 else None

    def _approach(self, closest: float) -> int:
        """Return a larger size that is not near the budget: needed only if the streams do not align."""
        if not self._fitting:
            return _between(0, self.ceiling)
        aligned = self._replay is not None and (self._verified or not self._replay.is_quadratic)
        if aligned or self._misses:
            return self.limit
        fixed, growing = self._parts()
        # What grows at all grows at most as the square of the samples: attention and similarity matrices do.
        growth = min(2.0, sqrt(max(0, int(closest * self.task.budget) - fixed) / max(1, growing)))
        further = min(int(growth * self.limit), self.task.high)
        if further > WORTH_A_STEP * self.limit or further == self.task.high:
            return further
        return self.limit

    def _parts(self) -> tuple[int, int]:
        """Return the bytes of the largest step that stay as they are when the samples grow, and those that may grow."""
        trial = self._fitting[-1].trial
        traces = self._fitting[-1].traces
        rounding = self.task.rounding
        recorded = [step.traces for step in self._fitting if step.traces]
        kept = [max(trace.kept_bytes(rounding) for trace in traces) for traces in recorded]
        if not traces or len(kept) < 2 or kept[-1] != kept[-2]:
            return 0, trial.peak_bytes
        unseen = max(0, trial.peak_bytes - max(trace.peak(rounding) for trace in traces))
        return kept[-1], unseen + max(trace.transient_peak(rounding) for trace in traces)

    @property
    def wants_trace(self) -> bool:
        """Whether the next step should be recorded; later ones need not be, if recording disturbs them."""
        return self.task.closest is not None or self._is_unsure or len(self._fitting) < len(self._traces.sizes)

    def record(self, step: Step) -> None:
        """Process the outcome of one step."""
        trial = step.trial
        size = step.samples
        if self._curve is not None:
            needs_more = self._needs(size) > self.task.budget
            foreseen = needs_more
            if trial.fits:
                foreseen = self._curve.confirms(trial, step.traces)
            self._verified |= foreseen and trial.fits
            self._misled |= not foreseen
        self._failed_last = not trial.fits
        if not trial.fits:
            self.ceiling = min(self.ceiling, size)
            self._misses += 1
            self._stride = 1
            if not self._fitting:
                self._traces.fall_back(size, self.ceiling)
            return
        if size == self.limit + self._stride:
            self._stride = 2 * self._stride
        else:
            self._stride = 1
        self.limit = max(self.limit, size)
        self._fitting = sorted([*self._fitting, step], key=lambda step: step.samples)
        if step.traces or self._replay is None or self._curve is None:
            self._curve = fit_curve(self._fitting, self.task.rounding, rules=self.task.rules)
        else:
            self._curve = self._curve.through(self._fitting[-1])
        traced = len(self._traces.sizes)
        if len(self._fitting) < traced:
            self._traces.adjust_last(self._fitting[-1])
        elif len(self._fitting) == traced == 2 and self._replay is not None and self._curve is not None:
            self._traces.add_third(self._curve, self._fitting[-1], self._guess())

    def _is_enough(self, guess: int) -> bool:
        """Return whether the limit, tried beyond the traces, is near enough to the guess, or trials are used up."""
        beyond = self.limit > max(self._traces.sizes) or self._misses > 0
        trials = len(self._fitting) + self._misses
        many = trials >= MANY_TRIALS
        enough = self.limit >= (NEARLY if many else ENOUGH) * guess
        enough |= many and self.limit >= NEARLY_OF_FAILED * self.ceiling
        return (beyond and enough) or (self.limit > 0 and trials >= MOST_TRIALS)

    def _may_be_more(self, guess: int) -> bool:
        """Return whether much more fits if temporaries have ended growing, which a recorded step would show."""
        more = guess + max(1, int(WORTH_RECORDING * guess))
        if self._curve is None or more >= self.ceiling:
            return False
        return self._curve.foreseen(more, at_least=True) <= self.task.budget

    @property
    def predicted(self) -> int:
        """The limit if nothing may be tried: predicted if the streams align, else the largest size that was tried."""
        if self._curve is None or self._replay is None:
            return self.limit
        return max(self.limit, largest_fitting(self._curve.needs, self.limit + 1, self.ceiling - 1, self.task.budget))

    def predict(self, samples: int) -> int | None:
        """Return the predicted peak in bytes at a micro-batch size, ``None`` before two steps were measured."""
        return None if self._curve is None else self._curve(samples)

    @property
    def method(self) -> Method:
        """What found the limit."""
        if self.task.closest is not None:
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
        sizes = {1, limit, limit + 1, *(1 + (end - 1) * part // CURVE_POINTS for part in range(CURVE_POINTS + 1))}
        return tuple((size, self._curve.needs(size)) for size in sorted(sizes))

    @property
    def _replay(self) -> PeakPredictor | None:
        """The replay of two aligned traces, if the curve is made of one."""
        return None if self._curve is None else self._curve.replay

    def _is_proven(self) -> bool:
        """Return whether a replay is as good as a trial: one trial confirmed it, and none contradicted it."""
        return self._verified and not self._misled and self._replay is not None

    def _needs(self, samples: int) -> int:
        """Return the bytes that the budget must leave: holes may be in the margin, blocks may not."""
        assert self._curve is not None
        needed = self._curve.needs(samples)
        margin = int(MARGIN * self.task.budget)
        if self.task.has_margin:
            return max(needed - margin, self._curve(samples))
        return needed


def _between(low: int, ceiling: int) -> int:
    """Return a size strictly between: the geometric mean of bounds that are far apart, else the middle."""
    if ceiling > 4 * low > 0:
        return isqrt(low * ceiling)
    return (low + ceiling) // 2
