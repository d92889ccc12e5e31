"""The gradient noise scale of micro-batches' gradients and their mean (McCandlish et al., arXiv 1812.06162). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import covariance, fmean, variance


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """A noise scale in samples, and its standard error."""

    value: float
    error: float


def window_moments(passes: Sequence[tuple[float, float]], whole: float) -> tuple[float, float]:
    """Return unbiased estimates of the variance of a sample's gradient and of the squared norm of their mean.

    ``passes`` are counts of samples and squared norms of mean gradients; ``whole`` is that of the window's mean. A mean
    over n samples has the expected squared norm |G|² + tr Σ / n (appendix A.1 there, for micro-batches of any sizes).

    Examples:
        >>> window_moments([(1, 5.0), (1, 3.0)], 2.5)
        (3.0, 1.0)
    """
    each = fmean(1 / count for count, _ in passes)
    total = 1 / sum(count for count, _ in passes)
    spread = (fmean(norm for _, norm in passes) - whole) / (each - total)
    return spread, whole - spread * total


def noise_scale(moments: Sequence[tuple[float, float]]) -> NoiseScale | None:
    """Return tr Σ / |G|² of several windows' estimates; ``None`` if |G|² is not clearly above zero.

    The error is that of a ratio of means, to first order.
    """
    if len(moments) < 2:
        return None
    spreads, squares = zip(*moments)
    spread, square, number = fmean(spreads), fmean(squares), len(moments)
    if square <= 2 * sqrt(variance(squares) / number) or spread <= 0:
        return None
    value = spread / square
    mixed = variance(spreads) - 2 * value * covariance(spreads, squares) + value**2 * variance(squares)
    return NoiseScale(value, sqrt(max(0.0, mixed) / number) / square)
