"""Find the largest micro-batch that fits in a memory budget, in as few training steps as possible.

``Search`` is pure: it says which size to try next and takes what came of it. Two traces of small
steps predict the peak at every size (see ``prediction``), and one step at the predicted limit verifies
it. Where the prediction misses, or the streams do not align, measured peaks and halving close in on
the limit from both sides. The limit was always tried, or, where nothing may be tried, predicted.

Where sizes are exact to the byte, so is the limit. An allocator that rounds and cuts segments does not repeat itself so
well: there the search ends when at most one sample in a hundred could be gained, or after ``MOST_TRIALS``.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt, sqrt

from lightning_ga.memory.segments import SegmentRules
from lightning_ga.memory.trace import MemoryTrace, Segment
from lightning_ga.plan.records import Method
from lightning_ga.probe.curve import Curve, Step, early_curve, fit_curve
from lightning_ga.probe.prediction import PeakPredictor, largest_fitting

CURVE_POINTS = 32
ENOUGH = 0.99  # of what may still fit: no further trial where sizes are not exact
MANY_TRIALS = 5  # after so many, less is enough: of what may still fit, and of a size that failed
NEARLY, NEARLY_OF_FAILED = 0.98, 0.95
APART = 50  # a trial is smaller by this part of one that failed, at least: if it fits, two in a hundred are left
MOST_TRIALS = 12  # where sizes are not exact
FAR = 8  # times the traced size: a prediction from there wants a third trace on the way
MARGIN = 100  # part of the budget that holes may take besides, where a device keeps a margin for them
HOLES = 200  # where there is none: part of the budget that a first trial near it leaves to them
WORTH = 33  # part of a size by which the next may have to be larger, for a step to be recorded that could tell so
# After a failure that the curve did not foresee: by what to stay below it, in percent of the budget where sizes are
# exact, else of the size. What an allocator reserved for a step that fits corrects the curve, so one is wanted soon.
EXACT_SPARES, SPARES = (2, 4, 8), (8, 8)


def trace_sizes(high: int, affordable: int, *, kernels_vary: bool = False) -> tuple[int, ...]:
    """Choose the sizes of the traces: small enough to fit for sure, yet apart where that costs nothing.

    They start at two samples, as BatchNorm refuses one. Kernels of an accelerator take other
    temporaries for larger inputs, so there the traces are as large as a quarter of the memory allows.
    """
    if high <= 3:
        return (high,) if high < 3 else (2, 3)
    second = min(affordable // 4, high // 2) if kernels_vary else 0
    if second > 8:
        return (second // 2, second)
    return next((pair for pair in ((4, 8), (2, 4)) if pair[1] <= min(high, affordable)), (2, 3))


def affordable_samples(traces: Sequence[MemoryTrace], room: int, *, taken: int = 0, rounding: int = 1) -> int:
    """Samples that fit if all that grows does so in proportion, as the recorded warm-up step bounds it.

    What is allocated and released before the first mark (forward and backward passes) may grow; the rest
    is added once. ``room`` are bytes that the budget leaves besides what is alive after the step, and ``taken`` those
    that it took besides these, as an allocator measured them.

    Examples:
        >>> step = MemoryTrace(2, (100, 8, 16), (0, 1, ~1, 2, ~2), marks=(3,))
        >>> affordable_samples([step], room=116)
        25
    """
    marked = traces[-1]
    passes = marked.events[: marked.marks[0]] if marked.marks else marked.events
    once = max(taken, *(trace.transient_peak(rounding) for trace in traces))
    growing = replace(marked, events=passes).transient_peak(rounding) or once
    return (room - once) * marked.samples // max(1, growing)


class Search:
    """Says which micro-batch size to try next (``propose``), from what came of the earlier ones (``record``).

    A proposal equal to ``limit`` means that nothing is worth a trial any more. With several ranks,
    each keeps a search of its own and all run the smallest proposal: it ends at the limit of all.
    """

    def __init__(
        self,
        *,
        high: int,
        budget: int,  # bytes that a step may take
        sizes: tuple[int, ...] = (4, 8),  # to trace first, in rising order
        rounding: int = 1,  # of the allocator, in bytes: 512 on CUDA
        rules: SegmentRules | None = None,  # of the segments that the budget bounds, if there are any
        predict_only: bool = False,  # nothing near the budget is tried: the result is ``predicted``
        closest: float = 1.0,  # share of the budget that a trial may come to where only that leads on
        has_margin: bool = False,  # whether there is one percent more than the budget, for an allocator's holes
        warm_up: Step | None = None,  # the first step, if it was recorded as the traces are
    ) -> None:
        self.budget = budget
        self.rounding = rounding
        self._margin = budget // MARGIN if has_margin else 0  # bytes that holes may take beyond the budget
        self.rules = None if rules is None else replace(rules, budget=budget + self._margin)
        self.predict_only = predict_only
        self._closest = int(closest * budget)
        self._holes = 0 if has_margin or rounding == 1 else budget // HOLES
        self.limit = 0  # largest size that was tried and fits
        self.ceiling = high + 1  # smallest size known not to fit, by trial
        self._high = high
        self._sizes = sizes
        self._fitting: list[Step] = []  # by size
        self._warm_up = warm_up
        self._curve: Curve | None = None
        self._verified = self._misled = self._contradicted = False
        self._early: Curve | None = None  # from the first step on
        self._is_unsure = False  # whether the last proposal may be too small
        self._trials = self._misses = 0
        self._stride = 1

    def propose(self, layout: tuple[Segment, ...] = ()) -> int:
        """Return the next size to try, below ``ceiling``, which will find these segments; ``limit`` at the end."""
        self._curve = None if self._curve is None else self._curve.begun_at(layout)
        if self.limit + 1 >= self.ceiling:
            return self.limit
        for size in self._sizes:
            if self.limit < size < self.ceiling:
                return size
        if self.predict_only:
            return self._approach()
        guess = self._guess()
        if self.rounding > 1 and self._is_enough(guess):
            return self.limit
        self._is_unsure = self._may_be_more(guess)
        if guess > self.limit or self._is_proven():
            return guess
        return self._unused_between_traces() or min(self.limit + self._stride, self.ceiling - 1)

    def record(self, step: Step) -> None:
        """Take the outcome of one step."""
        trial, size = step.trial, step.samples
        self._trials += 1
        if self._curve is not None:
            foreseen = self._curve.confirms(trial, step.traces) if trial.fits else self._needs(size) > self.budget
            self._verified |= foreseen and trial.fits
            self._misled |= not foreseen
        self._contradicted = not trial.fits
        if not trial.fits:
            self._fail(size)
            return
        self._stride = 2 * self._stride if size == self.limit + self._stride else 1
        self.limit = max(self.limit, size)
        self._fitting = sorted([*self._fitting, step], key=lambda step: step.samples)
        if step.traces or self._curve is None or self._replay is None:
            self._curve = fit_curve(self._fitting, self.rounding, rules=self.rules)
        else:
            self._curve = self._curve.through(self._fitting[-1])
        if len(self._fitting) < len(self._sizes):
            self._sizes = (*self._sizes[:-1], self._next_trace(self._sizes[-1]))
        elif len(self._fitting) == len(self._sizes) == 2 and self._replay is not None:
            self._sizes = (*self._sizes, *self._third_trace(self._guess()))

    def _next_trace(self, size: int) -> int:
        """The size of the second trace: with a quarter of what is left, as far as can be told, else a safe one."""
        last = self._fitting[-1]
        if self.rounding == 1 or not last.traces:
            return size
        early = early_curve(self._warm_up, last, self.rounding, self.rules)
        if early is not None:
            self._early = early
            return max(self.limit + 1, self._part_way(early, self._high // 2))
        kept = last.traces[0].kept_bytes(self.rounding)
        room, growing = max(0, self.budget - kept), max(1, last.trial.peak_bytes - kept)
        return max(self.limit + 1, min(size, isqrt(self.limit**2 * room // growing)))  # if all grows as the square

    def _part_way(self, curve: Curve, high: int) -> int:
        """Where a curve has come a quarter of the way from the largest step to the budget."""
        needed = curve.needs(self.limit)
        return largest_fitting(curve.needs, self.limit + 1, high, needed + (self.budget - needed) // 4)

    def _third_trace(self, guess: int) -> tuple[int, ...]:
        """A size between the traces and where they lead: far, or along a square, which two cannot tell for sure."""
        assert self._curve is not None
        trial = self._fitting[-1].trial
        foreseen = self._early is not None and self._early.confirms(trial, ())
        far = self.rounding > 1 and guess > FAR * self.limit
        is_square = self._replay is not None and self._replay.is_quadratic
        if guess <= 2 * self.limit or not (far or (is_square and not foreseen)):
            return ()
        return (max(2 * self.limit, self._part_way(self._curve, guess)) if self.rounding > 1 else 2 * self.limit,)

    def _fail(self, size: int) -> None:
        self.ceiling = min(self.ceiling, size)
        self._misses += 1
        self._stride = 1
        if not self._fitting and size == self._sizes[0] > 4:
            root = isqrt(size)  # something grows as the square: a tensor of ``root`` samples is as large as a line
            self._sizes = (root // 2, root) if root > 8 else trace_sizes(self.ceiling - 1, 8)

    @property
    def wants_trace(self) -> bool:
        """Whether the next step should be recorded; later ones need not be where that disturbs them."""
        return self.predict_only or self._is_unsure or len(self._fitting) < len(self._sizes)

    @property
    def predicted(self) -> int:
        """The limit where nothing may be tried: predicted if the streams align, else the largest that was tried."""
        if self._curve is None or self._replay is None:
            return self.limit
        return max(self.limit, largest_fitting(self._curve.needs, self.limit + 1, self.ceiling - 1, self.budget))

    def predict(self, samples: int) -> int | None:
        """Predicted peak in bytes at a micro-batch of ``samples``, ``None`` before two steps were measured."""
        return None if self._curve is None else self._curve(samples)

    @property
    def method(self) -> Method:
        """What found the limit."""
        if self.predict_only:
            return "below" if self._replay is None else "prediction"
        if self._is_proven():
            return "replay"
        return "phases" if self._curve is not None and len(self._curve.lines) > 1 else "bracket"

    def curve(self, limit: int) -> tuple[tuple[int, int], ...]:
        """Bytes that a budget must leave at sizes from one to somewhat above the limit; empty without a curve.

        Lines stand for a curve only near the steps they go through, so there is none without a replay.
        """
        if self._curve is None or self._replay is None:
            return ()
        end = max(limit + 1, limit * 5 // 4)
        sizes = {1, limit, limit + 1, *(1 + (end - 1) * part // CURVE_POINTS for part in range(CURVE_POINTS + 1))}
        return tuple((size, self._curve.needs(size)) for size in sorted(sizes))

    def _unused_between_traces(self) -> int | None:
        """A size whose trial confirms a replay that puts the limit at a trace: the alternative is one too many."""
        if self._replay is None or self._misled:
            return None
        low, high = self._replay.first.samples, self._replay.second.samples
        return (low + high) // 2 if high - low > 1 else None

    @property
    def _replay(self) -> PeakPredictor | None:
        """What two aligned traces tell, if that is what the curve is made of."""
        return None if self._curve is None else self._curve.replay

    def _may_be_more(self, guess: int) -> bool:
        """Whether much more fits if temporaries have ended growing, which a recorded step tells."""
        more = guess + max(1, guess // WORTH)
        return (
            self._curve is not None and more < self.ceiling and self._curve.foreseen(more, at_least=True) <= self.budget
        )

    def _is_enough(self, guess: int) -> bool:
        """Whether the limit, tried beyond the traces, is near enough to where it should be, or trials are used up."""
        beyond = self.limit > max(self._sizes) or self._misses > 0
        many = self._trials >= MANY_TRIALS
        enough = self.limit >= (NEARLY if many else ENOUGH) * guess
        enough |= many and self.limit >= NEARLY_OF_FAILED * self.ceiling
        return (beyond and enough) or (self.limit > 0 and self._trials >= MOST_TRIALS)

    def _is_proven(self) -> bool:
        """Whether a replay counts as a trial: one confirmed it, and none ever contradicted it."""
        return self._verified and not self._misled and self._replay is not None

    def _needs(self, samples: int) -> int:
        """Bytes that the budget must leave: holes may be in the margin, blocks may not."""
        assert self._curve is not None
        needed = self._curve.needs(samples)
        return max(needed - self._margin, self._curve(samples)) if self._margin else needed

    def _guess(self) -> int:
        """Where the limit should be, from the predicted curve and from what contradicts it."""
        low, high = self.limit, self.ceiling - 1
        if self._curve is None:
            return _between(low, self.ceiling) if self._misses else min(2 * low, high)
        large = low > max(self._sizes)  # a large step is in the curve: it is nearly right
        guess = largest_fitting(self._needs, low + 1, self._high, self.budget)
        if self._holes and not large:  # near a budget that an allocator keeps to, many samples may take little more
            spared = largest_fitting(self._curve.needs, low + 1, guess, self.budget - self._holes)
            guess = max(spared, largest_fitting(self._needs, low + 1, guess - guess // 100, self.budget))
        if large and self.rounding > 1:
            middle = _between(low, self.ceiling)
            if self._misses > 1 and (self._contradicted or guess >= self.ceiling):
                return middle
            # What failed just above tells more than the last bytes of a prediction.
            below = max(middle, min(high, self.ceiling - self.ceiling // APART))
            return min(guess, below) if self._misses else guess
        if guess < self.ceiling:
            return guess
        guess = self._spared(self._curve)
        return guess if low < guess < self.ceiling else _between(low, self.ceiling)

    def _spared(self, curve: Curve) -> int:
        """A size below one that failed although the curve said that it fits: an allocator may be fragmented."""
        high, spares = self.ceiling - 1, SPARES if self.rounding > 1 else EXACT_SPARES
        if self._misses > len(spares) or (curve.replay is None and len(curve.lines) == 1):
            return 0
        spare = spares[self._misses - 1]
        if self.rounding > 1:
            return high - high * spare // 100
        return largest_fitting(curve.needs, self.limit + 1, high, self.budget - self.budget * spare // 100)

    def _approach(self) -> int:
        """From below without coming near the budget: needed only where the streams do not align."""
        if not self._fitting:
            return _between(0, self.ceiling)
        aligned = self._replay is not None and (self._verified or not self._replay.is_quadratic)
        if aligned or self._misses:
            return self.limit
        fixed, growing = self._parts()
        # What grows takes at most the square of the growth in samples: attention and similarity matrices do.
        growth = min(2.0, sqrt(max(0, self._closest - fixed) / max(1, growing)))
        further = min(int(growth * self.limit), self._high)
        return further if 20 * further > 21 * self.limit or further == self._high else self.limit

    def _parts(self) -> tuple[int, int]:
        """Bytes of the largest step that stay as they are when the samples grow, and bytes that may grow."""
        trial, traces = self._fitting[-1].trial, self._fitting[-1].traces
        recorded = [step.traces for step in self._fitting if step.traces]
        kept = [max(trace.kept_bytes(self.rounding) for trace in traces) for traces in recorded]
        if not traces or len(kept) < 2 or kept[-1] != kept[-2]:
            return 0, trial.peak_bytes
        unseen = max(0, trial.peak_bytes - max(trace.peak(self.rounding) for trace in traces))
        return kept[-1], unseen + max(trace.transient_peak(self.rounding) for trace in traces)


def _between(low: int, ceiling: int) -> int:
    """A size strictly between: the geometric mean of bounds that are far apart, else the middle."""
    return isqrt(low * ceiling) if ceiling > 4 * low > 0 else (low + ceiling) // 2
