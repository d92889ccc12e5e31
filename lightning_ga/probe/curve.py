"""Peak memory by micro-batch size, read off the steps that were tried. Pure."""

from dataclasses import dataclass, replace

from lightning_ga.memory.segments import replay_segments
from lightning_ga.memory.trace import MemoryTrace
from lightning_ga.plan.records import Trial
from lightning_ga.probe.prediction import PeakPredictor, extrapolate

# A caching allocator hands out somewhat more than is asked for, and kernels choose their workspaces by size.
TOLERANCE = 0.016  # of a measured peak
Step = tuple[Trial, tuple[MemoryTrace, ...]]  # one that fits, and what was recorded of it


@dataclass(frozen=True, slots=True)
class Curve:
    """Peak bytes by micro-batch size: a replay if there is one, plus the highest of some lines.

    With a replay, the one line is what the traces did not see. Without, there is a line for every
    phase of the step that the traces tell apart, or one through the measured peaks.

    Attributes:
        replay: What the traces saw.
        samples: The two sizes that were traced or measured.
        lines: Bytes at these two sizes.
        rounding: Bytes that the allocator rounds up to: 1 where sizes are exact.
        segmented: Whether the allocator cuts its blocks out of segments.
    """

    replay: PeakPredictor | None
    samples: tuple[int, int]
    lines: tuple[tuple[int, int], ...]
    rounding: int = 1
    segmented: bool = False

    @property
    def is_replay(self) -> bool:
        """Whether every storage was read off two aligned traces."""
        return self.replay is not None

    @property
    def is_quadratic(self) -> bool:
        """Whether a storage was read as a square."""
        return self.replay is not None and self.replay.is_quadratic

    def __call__(self, samples: int) -> int:
        """Peak bytes at a size."""
        return self._unseen(samples) + self._seen(samples)[0]

    def needs(self, samples: int) -> int:
        """Bytes that a budget must leave: with segments, what the allocator reserves for that peak."""
        return self._unseen(samples) + self._seen(samples)[1]

    def confirms(self, trial: Trial, traces: tuple[MemoryTrace, ...]) -> bool:
        """Whether a further trial has the predicted peak, and the stream of one of its traces.

        To the byte where sizes are exact, else as closely as an allocator's word can be predicted.
        """
        aligned = self.replay is None or not traces or any(map(self.replay.confirms, traces))
        tolerance = TOLERANCE * trial.peak_bytes if self.rounding > 1 else 0
        return aligned and abs(self(trial.micro_batch_size) - trial.peak_bytes) <= tolerance

    def _unseen(self, samples: int) -> int:
        low, high = self.samples
        return max(0, *(end + max(0, end - start) * (samples - high) // (high - low) for start, end in self.lines))

    def _seen(self, samples: int) -> tuple[int, int]:
        """Bytes handed out, and bytes reserved for them."""
        if self.replay is None:
            return 0, 0
        if self.segmented:
            return replay_segments(self.replay.sizes(samples), self.replay.second)
        peak = self.replay(samples)
        return peak, peak


def fit_curve(fitting: list[Step], rounding: int, *, segmented: bool = False) -> Curve | None:
    """The curve through the two largest steps; by replay, then by phase, if the two largest traces allow."""
    traced = [pair for pair in fitting if pair[1]][-2:]
    pairs = list(zip(*(traces for _, traces in traced))) if len(traced) == 2 else []
    for first, second in pairs:
        replay = extrapolate(first, second, rounding=rounding)
        if replay is not None:
            seen = Curve(replay, (first.samples, second.samples), ((0, 0),), rounding, segmented)
            unseen = [trial.peak_bytes - seen(trial.micro_batch_size) for trial, _ in traced]
            return replace(seen, lines=((unseen[0], unseen[1]),))
    for first, second in pairs:
        if len(first.marks) == len(second.marks) > 0:
            unseen = [trial.peak_bytes - trace.peak(rounding) for (trial, _), trace in zip(traced, (first, second))]
            phases = zip(first.phase_peaks(rounding), second.phase_peaks(rounding))
            lines = tuple((start + unseen[0], end + unseen[1]) for start, end in phases)
            return Curve(None, (first.samples, second.samples), lines, rounding)
    if len(fitting) < 2:
        return None
    small, large = fitting[-2][0], fitting[-1][0]
    line = (small.peak_bytes, large.peak_bytes)
    return Curve(None, (small.micro_batch_size, large.micro_batch_size), (line,), rounding)
