"""The curve of peak memory by micro-batch size, computed from recorded steps. Pure.

Tested in tests/probe/test_peak_prediction.py.
"""

from dataclasses import dataclass, field, replace

from lightning_ga.memory.allocator_segments import Peaks, replay_segments
from lightning_ga.memory.trace import MemoryTrace
from lightning_ga.plan.records import Trial
from lightning_ga.probe.peak_prediction import PeakPredictor, extrapolate, paired

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

    @property
    def needed_bytes(self) -> int:
        """Bytes that a budget had to leave, as far as is known."""
        return max(self.trial.peak_bytes, self.reserved_bytes or 0)


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
    in_segments: bool = False  # whether the allocator cuts blocks out of segments (``memory.allocator_segments``)
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
        real_growth, foreseen_growth = self.grown
        foreseen = self.foreseen(samples)
        if real_growth < foreseen_growth:  # the same number of bytes less, as no more is sure
            return max(self(samples) - self.less, foreseen - foreseen_growth + real_growth)
        return self.start + (foreseen - self.start) * real_growth // foreseen_growth

    def through(self, step: Step) -> "Curve":
        """Stretch a curve so that it goes through a step, if the step shows more than the traces.

        It is stretched from the larger traced step on, or from zero if only that step shows what is reserved.
        """
        needed = step.needed_bytes
        traced = self.replay is not None and step.samples <= self.samples[1]
        if traced and self.in_segments:  # recording changes what a step reserves
            return self
        foreseen = self.foreseen(step.samples)
        # On a flat curve a small correction would move the limit far.
        if self.in_segments and 0 <= foreseen - needed <= TOLERANCE * needed:
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
        return self._unseen(samples) + self._seen(samples, at_least=at_least).reserved

    def _unseen(self, samples: int) -> int:
        low, high = self.samples
        most = 0
        for start, end in self.lines:
            most = max(most, end + max(0, end - start) * (samples - high) // (high - low))
        return most

    def _seen(self, samples: int, *, at_least: bool = False) -> Peaks:
        if self.replay is None:
            return Peaks(0, 0)
        if self.in_segments:
            if (samples, at_least) not in self.replayed:
                sizes = self.replay.sizes(samples, at_least=at_least)
                self.replayed[samples, at_least] = replay_segments(sizes, self.replay.second)
            return self.replayed[samples, at_least]
        peak = self.replay(samples, at_least=at_least)
        return Peaks(peak, peak)


def fit_curve(fitting: list[Step], rounding: int, *, in_segments: bool = False) -> Curve | None:
    """Fit the curve to steps in rising order: by replay, then by phase, if two traces allow, else by their peaks.

    It goes through the largest step. ``None`` if there are not two steps.
    """
    traced = [step for step in fitting if step.traces][-2:]
    if len(fitting) < 2:
        return None
    curve = None
    if len(traced) == 2:
        curve = _of_traces(traced[0], traced[1], rounding, in_segments)
    if curve is None:
        small = fitting[-2]
        large = fitting[-1]
        line = (small.trial.peak_bytes, large.trial.peak_bytes)
        curve = Curve(None, (small.samples, large.samples), (line,), rounding)
    return curve.through(fitting[-1])


def _of_traces(small: Step, large: Step, rounding: int, in_segments: bool) -> Curve | None:
    samples = (small.samples, large.samples)
    pairs = list(zip(small.traces, large.traces))
    blocks = paired(small.traces, large.traces)  # an allocator's records: nothing is unseen
    replay = None if blocks is None else extrapolate(*blocks, rounding=rounding)
    if replay is not None:
        return Curve(replay, samples, ((0, 0),), rounding, in_segments)
    for first, second in pairs:
        replay = extrapolate(first, second, rounding=rounding)
        if replay is not None:
            seen = Curve(replay, samples, ((0, 0),), rounding, in_segments)
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
