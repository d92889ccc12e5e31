"""The curve of peak memory by micro-batch size, computed from recorded steps, and which sizes to record. Pure.

Tested in tests/probe/test_prediction.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isqrt

from lightning_ga.memory.segments import SMALL, Peaks, SegmentRules, replay_segments
from lightning_ga.memory.trace import MemoryTrace, Segment
from lightning_ga.plan.accumulation import ceil_div
from lightning_ga.plan.records import Trial
from lightning_ga.probe.prediction import PeakPredictor, extrapolate, largest_fitting, paired

# A caching allocator hands out somewhat more than is asked for, and kernels choose their workspaces by size.
TOLERANCE = 0.016  # of a measured peak


@dataclass(frozen=True, slots=True)
class Step:
    """A training step that was tried."""

    trial: Trial
    traces: tuple[MemoryTrace, ...] = ()  # if it was recorded, the most faithful first
    reserved_bytes: int | None = None  # what an allocator reserved, and a budget had to leave; ``None`` is not known

    @property
    def samples(self) -> int:
        """Micro-batch size."""
        return self.trial.micro_batch_size


@dataclass(frozen=True, slots=True)
class Curve:
    """Peak bytes by micro-batch size: a replay if there is one, plus the highest of some lines.

    With a replay, the one line is what the traces did not see. Without, there is a line for every
    phase of the step that the traces tell apart, or one through the measured peaks.
    """

    replay: PeakPredictor | None
    samples: tuple[int, int]  # the two sizes that were traced or measured
    lines: tuple[tuple[int, int], ...]  # bytes at these two sizes
    rounding: int = 1  # of the allocator: 1 if sizes are exact
    rules: SegmentRules | None = None  # how the allocator cuts its blocks out of segments, if it does
    # Above ``start`` bytes, the predicted need is corrected by real ÷ predicted growth up to the largest step.
    start: int = 0
    grown: tuple[int, int] = (1, 1)  # the real growth up to that step, and the predicted one
    less: int = 0  # bytes by which the peak of that step was lower than predicted
    replayed: dict[tuple[int, bool], Peaks] = field(default_factory=dict, compare=False)  # a replay may be slow

    def __call__(self, samples: int) -> int:
        """Return the peak bytes at a size."""
        return self._unseen(samples) + self._seen(samples).allocated

    def needs(self, samples: int) -> int:
        """Return the bytes that a budget must leave: with segments, what the allocator reserves for that peak."""
        real, foreseen = self.grown
        needed = self.foreseen(samples)
        if real < foreseen:  # the same number of bytes less, as no more is sure
            return max(self(samples) - self.less, needed - foreseen + real)
        return self.start + (needed - self.start) * real // foreseen

    def begun_at(self, layout: tuple[Segment, ...]) -> "Curve":
        """Return the curve of steps that find these segments, which are those that an earlier one has left."""
        if self.replay is None or self.rules is None:
            return self
        second = self.replay.second.begun_at(layout, small=SMALL)
        return replace(self, replay=replace(self.replay, second=second), replayed={})

    def through(self, step: Step) -> "Curve":
        """Stretch a curve so that it goes through a step, if the step shows more than the traces.

        It is stretched from the larger traced step on, or from zero if only that step shows what is reserved.
        """
        needed = step.trial.peak_bytes if step.reserved_bytes is None else step.reserved_bytes
        traced = self.replay is not None and step.samples <= self.samples[1]
        if traced and self.rules is not None:  # recording changes what a step reserves
            return self
        foreseen = self.foreseen(step.samples)
        # On a flat curve a small correction would move the limit far.
        if self.rules is not None and 0 <= foreseen - needed <= TOLERANCE * needed:
            return replace(self, start=0, grown=(1, 1), less=0)
        start = 0 if traced or self.replay is None else self.foreseen(self.samples[1])
        if min(needed, foreseen) <= start:
            return self
        less = max(0, self(step.samples) - step.trial.peak_bytes)
        return replace(self, start=start, grown=(needed - start, foreseen - start), less=less)

    def confirms(self, trial: Trial, traces: tuple[MemoryTrace, ...]) -> bool:
        """Return whether a further trial has the predicted peak, and the stream of one of its traces.

        To the byte if sizes are exact, else as closely as an allocator can be predicted.
        """
        off = abs(self(trial.micro_batch_size) - trial.peak_bytes)
        if self.rounding > 1:
            return off <= TOLERANCE * trial.peak_bytes
        is_aligned = self.replay is None or not traces or any(map(self.replay.confirms, traces))
        return is_aligned and off == 0

    def foreseen(self, samples: int, *, at_least: bool = False) -> int:
        """Return the bytes that a budget must leave by the traces, ``at_least`` if temporaries grow no more."""
        return self._unseen(samples) + self._seen(samples, at_least=at_least).needed

    def _unseen(self, samples: int) -> int:
        low, high = self.samples
        most = 0
        for start, end in self.lines:
            most = max(most, end + max(0, end - start) * (samples - high) // (high - low))
        return most

    def _seen(self, samples: int, *, at_least: bool = False) -> Peaks:
        if self.replay is None:
            return Peaks(0, 0, 0)
        if self.rules is not None:
            if (samples, at_least) not in self.replayed:
                sizes = self.replay.sizes(samples, at_least=at_least)
                self.replayed[samples, at_least] = replay_segments(sizes, self.replay.second, self.rules)
            return self.replayed[samples, at_least]
        peak = self.replay(samples, at_least=at_least)
        return Peaks(peak, peak, peak)


def fit_curve(fitting: list[Step], rounding: int, *, rules: SegmentRules | None = None) -> Curve | None:
    """Fit the curve to steps in rising order: by replay, then by phase, if two traces allow, else by their peaks.

    It goes through the largest step. ``None`` if there are not two steps.
    """
    traced = [step for step in fitting if step.traces][-2:]
    if len(fitting) < 2:
        return None
    curve = None
    if len(traced) == 2:
        curve = _of_traces(traced[0], traced[1], rounding, rules)
    if curve is None:
        small = fitting[-2]
        large = fitting[-1]
        line = (small.trial.peak_bytes, large.trial.peak_bytes)
        curve = Curve(None, (small.samples, large.samples), (line,), rounding)
    return curve.through(fitting[-1])


def _of_traces(small: Step, large: Step, rounding: int, rules: SegmentRules | None) -> Curve | None:
    samples = (small.samples, large.samples)
    pairs = list(zip(small.traces, large.traces))
    blocks = paired(small.traces, large.traces)  # an allocator's records: nothing is unseen
    replay = None if blocks is None else extrapolate(*blocks, rounding=rounding)
    if replay is not None:
        return Curve(replay, samples, ((0, 0),), rounding, rules)
    for first, second in pairs:
        replay = extrapolate(first, second, rounding=rounding)
        if replay is not None:
            seen = Curve(replay, samples, ((0, 0),), rounding, rules)
            start = small.trial.peak_bytes - seen(small.samples)
            end = large.trial.peak_bytes - seen(large.samples)
            return replace(seen, lines=((start, end),))
    for first, second in pairs:
        if len(first.marks) == len(second.marks) > 0:
            start = small.trial.peak_bytes - first.peak(rounding)
            end = large.trial.peak_bytes - second.peak(rounding)
            phases = zip(first.phase_peaks(rounding), second.phase_peaks(rounding))
            return Curve(None, samples, tuple((low + start, high + end) for low, high in phases), rounding)
    return None


UPDATE = 8  # bytes of state and temporaries for a byte of gradients: Adam takes 2 to 5, Shampoo about 6
FAR = 8  # times the traced size: a prediction beyond needs a third trace in between
MARGIN = 0.01  # share of the budget that holes may use in addition, if a device keeps a margin for them


@dataclass(frozen=True, slots=True)
class Task:
    """A search for the largest micro-batch up to ``high`` of which a step takes at most ``budget`` bytes."""

    high: int
    budget: int
    rounding: int = 1  # of the allocator, in bytes: 512 on CUDA; sizes are exact to the byte if it is 1
    rules: SegmentRules | None = None  # of the segments that the budget bounds, if there are any
    has_margin: bool = False  # whether there is one percent more than the budget, for an allocator's holes
    closest: float | None = None  # share of the budget that a trial may come to; ``None`` if every size may be tried


def trace_sizes(high: int, affordable: int, first: int = 2, *, kernels_vary: bool = False) -> tuple[int, ...]:
    """Choose the sizes of the first traces, none below the ``first`` step: they fit for sure, yet lie apart.

    Kernels of an accelerator use other temporaries for larger inputs, so there the traces are as large as a quarter of
    the memory allows.
    """
    if high <= 3:
        return (high,) if high < 3 else (2, 3)
    second = min(affordable // 4, high // 2) if kernels_vary else 0
    if second > 8:
        return (second // 2, second)
    for pair in ((2 * first, 4 * first), (first, 2 * first)):
        if pair[1] <= min(high, affordable):
            return pair
    return (first, first + 1)


def affordable_samples(traces: Sequence[MemoryTrace], room: int, *, taken: int = 0, rounding: int = 1) -> int:
    """Return the samples that fit if all that grows does so in proportion, as the recorded warm-up step bounds it.

    What forward and backward passes (before the last mark) allocate and release may grow; the rest is added once. Of
    the bytes besides what is alive after the step, the budget leaves ``room``, and the step took ``taken`` by an
    allocator's measure.
    """
    marked = traces[-1]
    passes = marked.events[: marked.marks[-1]] if marked.marks else marked.events
    once = max(taken, *(trace.transient_peak(rounding) for trace in traces))
    growing = replace(marked, events=passes).transient_peak(rounding) or once
    return (room - once) * marked.samples // max(1, growing)


def most_bytes(trace: MemoryTrace, samples: int, *, peak: int, owned: int, gradients: int) -> int:
    """Return the most bytes that a step of so many samples can need, as a first pass of fewer bounds it.

    What the pass allocates grows at most as the square of the samples: attention and similarity matrices do. So does
    what it keeps besides the ``owned`` bytes, parameters and gradients. The recorded pass had a ``peak``; later ones
    make their ``gradients`` once more, to add them. Beside all that is what an optimizer may need for these gradients.
    """
    growing = trace.transient_peak() + max(0, trace.kept_bytes() - owned)
    fixed = max(peak, owned + gradients + trace.transient_peak()) + UPDATE * gradients
    return fixed + ceil_div(growing * samples**2, trace.samples**2)


class TraceSizes:
    """The sizes to trace, in rising order, which change with what the first traces show."""

    def __init__(self, task: Task, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._task = task

    def next(self, limit: int, ceiling: int) -> int | None:
        """Return the first size between the bounds, if one is left."""
        for size in self.sizes:
            if limit < size < ceiling:
                return size
        return None

    def fall_back(self, failed: int, ceiling: int) -> None:
        """Choose smaller sizes, because the first one ran out of memory."""
        if failed == self.sizes[0] > 4:
            root = isqrt(failed)  # something grows as the square: a tensor of ``root`` samples is as large as a line
            self.sizes = (root // 2, root) if root > 8 else trace_sizes(ceiling - 1, 8)

    def adjust_last(self, step: Step) -> None:
        """Lower the next size to what a quarter of the remaining memory allows, if all grows as the square."""
        task = self._task
        limit = step.samples
        if task.rounding == 1 or not step.traces:
            return
        kept = step.traces[0].kept_bytes(task.rounding)
        room = max(0, task.budget - kept)
        growing = max(1, step.trial.peak_bytes - kept)
        size = min(self.sizes[-1], isqrt(limit**2 * room // growing))  # if all grows as the square
        self.sizes = (*self.sizes[:-1], max(limit + 1, size))

    def add_third(self, curve: Curve, step: Step, guess: int) -> None:
        """Add a size between the traces and the predicted limit, if that is far, or if the curve is quadratic.

        Two traces cannot show for sure that a curve is quadratic.
        """
        limit = step.samples
        is_exact = self._task.rounding == 1
        far = not is_exact and guess > FAR * limit
        is_square = curve.replay is not None and curve.replay.is_quadratic
        if guess > 2 * limit and (far or is_square):
            needed = curve.needs(limit)
            a_quarter = needed + (self._task.budget - needed) // 4  # of what is left
            part_way = 0 if is_exact else largest_fitting(curve.needs, limit + 1, guess, a_quarter)
            self.sizes += (max(2 * limit, part_way),)
