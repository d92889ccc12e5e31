"""Peak memory by micro-batch size, read off the steps that were tried. Pure."""

from dataclasses import dataclass

from lightning_ga.replay import Replay, Trace, extrapolate
from lightning_ga.results import Trial

Step = tuple[Trial, tuple[Trace, ...]]  # one that fits, and what was recorded of it


@dataclass(frozen=True, slots=True)
class Curve:
    """Peak bytes by micro-batch size: a replay if there is one, plus the highest of some lines.

    With a replay, the one line is what the traces did not see. Without, there is a line for every
    phase of the step that the traces tell apart, or one through the measured peaks.
    """

    replay: Replay | None
    samples: tuple[int, int]
    lines: tuple[tuple[int, int], ...]  # bytes at these two sizes

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
        low, high = self.samples
        rest = max(end + max(0, end - start) * (samples - high) // (high - low) for start, end in self.lines)
        return max(rest, 0) + (0 if self.replay is None else self.replay(samples))

    def confirms(self, trial: Trial, traces: tuple[Trace, ...]) -> bool:
        """Whether a further trial has the predicted peak to the byte, and the stream of one of its traces."""
        aligned = self.replay is None or not traces or any(map(self.replay.confirms, traces))
        return aligned and self(trial.micro_batch_size) == trial.peak_bytes


def fit_curve(fitting: list[Step], rounding: int) -> Curve | None:
    """The curve through the two largest steps; by replay, then by phase, if the two largest traces allow."""
    traced = [pair for pair in fitting if pair[1]][-2:]
    pairs = list(zip(*(traces for _, traces in traced))) if len(traced) == 2 else []
    for first, second in pairs:
        replay = extrapolate(first, second, rounding=rounding)
        if replay is not None:
            return Curve(replay, (first.samples, second.samples), (_unseen(traced, (first, second), rounding),))
    for first, second in pairs:
        if len(first.marks) == len(second.marks) > 0:
            unseen = _unseen(traced, (first, second), rounding)
            phases = zip(first.phase_peaks(rounding), second.phase_peaks(rounding))
            lines = tuple((start + unseen[0], end + unseen[1]) for start, end in phases)
            return Curve(None, (first.samples, second.samples), lines)
    if len(fitting) < 2:
        return None
    small, large = fitting[-2][0], fitting[-1][0]
    return Curve(None, (small.micro_batch_size, large.micro_batch_size), ((small.peak_bytes, large.peak_bytes),))


def _unseen(
    traced: list[tuple[Trial, tuple[Trace, ...]]], traces: tuple[Trace, Trace], rounding: int
) -> tuple[int, int]:
    """Bytes of two steps that their traces did not see."""
    small, large = (trial.peak_bytes - trace.peak(rounding) for (trial, _), trace in zip(traced, traces))
    return small, large
