"""The largest batch that trains as well on the same samples: the verdict on branches of a run. Pure."""

from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """The validation losses of the seeds after the same samples with one effective batch."""

    batch: int
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The mean over seeds."""
        return fmean(self.losses)

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return stdev(self.losses) / sqrt(len(self.losses))


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
        return (self.points[-1] if beyond is None else self.points[self.points.index(beyond) - 1]).batch

    @property
    def _beyond(self) -> BatchPoint | None:
        above = (point for point in self.points if point.batch > self.lowest.batch and point.loss > self.bound)
        return next(above, None)

    def sentence(self) -> str:
        """Say what the largest batch is, and what accumulating more costs."""
        best, beyond = self.lowest, self._beyond
        text = f"{self.largest} is the largest of these batches within {100 * self.tolerance:.3g} % of the lowest loss"
        if beyond is not None:
            error = sqrt(beyond.error**2 + best.error**2)
            text += f"; {beyond.batch} costs {beyond.loss - best.loss:.3g} ± {error:.2g} of loss on the same samples"
        open_ = [str(one.batch) for one in self.points if one != best and abs(one.loss - self.bound) < 2 * one.error]
        return f"{text}." + (f" Seeds leave open on which side of it {' and '.join(open_)} lies." if open_ else "")


def batches_around(batch: int, samples: int) -> tuple[int, ...]:
    """Return B/2 (if that is a whole number), B, 2B and 4B, but none above the samples of a branch.

    Examples:
        >>> batches_around(32, 1000)
        (16, 32, 64, 128)
    """
    half = () if batch % 2 else (batch // 2,)
    return tuple(size for size in (*half, batch, 2 * batch, 4 * batch) if size <= samples)
