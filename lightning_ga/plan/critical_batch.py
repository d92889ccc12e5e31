"""How large a batch may be: the gradient noise scale (McCandlish et al., arXiv 1812.06162), and a verdict on branches.

The branches of a run train on the same samples with other batches (Merrill et al., arXiv 2505.23971). Pure.

Tested in tests/test_batch_size.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import covariance, fmean, harmonic_mean, stdev, variance


@dataclass(frozen=True, slots=True)
class NoiseScaleEstimate:
    """A noise scale in samples, and its standard error."""

    value: float
    error: float


def window_moments(passes: Sequence[tuple[float, float]], whole: float) -> tuple[float, float]:
    """Return unbiased estimates of the variance of a sample's gradient and of the squared norm of their mean.

    ``passes`` are counts of samples and squared norms of mean gradients; ``whole`` is that of the window's mean. A mean
    over n samples has the expected squared norm |G|² + tr Σ / n (appendix A.1 there, for micro-batches of any sizes).
    """
    counts, norms = zip(*passes)
    total = 1 / sum(counts)
    spread = (fmean(norms) - whole) / (1 / harmonic_mean(counts) - total)
    return spread, whole - spread * total


def noise_scale(moments: Sequence[tuple[float, float]]) -> NoiseScaleEstimate | None:
    """Return tr Σ / |G|² of several windows' estimates; ``None`` if |G|² is not clearly above zero.

    The error is that of a ratio of means, to first order.
    """
    if len(moments) < 2:
        return None
    spreads, squares = zip(*moments)
    spread = fmean(spreads)
    square = fmean(squares)
    number = len(moments)
    if square <= 2 * sqrt(variance(squares) / number) or spread <= 0:
        return None
    value = spread / square
    mixed = variance(spreads) - 2 * value * covariance(spreads, squares) + value**2 * variance(squares)
    return NoiseScaleEstimate(value, sqrt(max(0.0, mixed) / number) / square)


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """The validation losses of the seeds after the same samples with one effective batch."""

    batch: int
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The mean over seeds; infinite if one of them diverged."""
        return fmean(self.losses) if self.is_finite else inf

    @property
    def error(self) -> float:
        """The standard error of the mean; infinite if one of the seeds diverged."""
        return stdev(self.losses) / sqrt(len(self.losses)) if self.is_finite else inf

    @property
    def is_finite(self) -> bool:
        """Whether no seed diverged."""
        return all(map(isfinite, self.losses))


@dataclass(frozen=True, slots=True)
class CriticalBatch:
    """What branches of a run have measured (Merrill et al., arXiv 2505.23971)."""

    points: tuple[BatchPoint, ...]  # in rising order of batches
    tolerance: float  # share of the lowest loss by which another may be higher
    samples: int  # that each branch trained on

    @property
    def lowest(self) -> BatchPoint:
        """The batch with the lowest loss."""
        return min(self.points, key=lambda point: point.loss)

    @property
    def bound(self) -> float:
        """The highest loss within the tolerance."""
        return self.lowest.loss + self.tolerance * abs(self.lowest.loss)

    @property
    def largest(self) -> int:
        """The largest batch such that it, and all from the best one up to it, are within the tolerance."""
        beyond = self._beyond
        if beyond is None:
            return self.points[-1].batch
        return self.points[self.points.index(beyond) - 1].batch

    @property
    def _beyond(self) -> BatchPoint | None:
        for point in self.points:
            is_within = point.is_finite and point.loss <= self.bound
            if point.batch > self.lowest.batch and not is_within:
                return point
        return None

    def sentence(self) -> str:
        """Say what the largest batch is, and what accumulating more costs."""
        best = self.lowest
        if not best.is_finite:
            return "Training diverged with each of these batches: not all losses are finite."
        beyond = self._beyond
        text = f"{self.largest} is the largest of these batches within {100 * self.tolerance:.3g} % of the lowest loss"
        if beyond is not None and not beyond.is_finite:
            text += f"; with {beyond.batch} training diverged"
        elif beyond is not None:
            error = sqrt(beyond.error**2 + best.error**2)
            text += f"; {beyond.batch} costs {beyond.loss - best.loss:.3g} ± {error:.2g} of loss on the same samples"
        return f"{text}."


def batches_around(batch: int, samples: int) -> tuple[int, ...]:
    """Return B/2 (if that is a whole number), B, 2B and 4B, but none above the samples of a branch."""
    sizes = [batch, 2 * batch, 4 * batch]
    if batch % 2 == 0:
        sizes.insert(0, batch // 2)
    return tuple(size for size in sizes if size <= samples)
