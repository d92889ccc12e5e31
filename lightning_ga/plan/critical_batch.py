"""The largest batch that trains as well on the same samples: the verdict on branches of a run. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """The validation loss after the same samples with one effective batch.

    Attributes:
        batch: Effective batch size.
        losses: Validation loss of each seed.
    """

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
    """What branches of a run have measured (Merrill et al., arXiv 2505.23971).

    Attributes:
        points: One for each batch, in rising order.
        tolerance: By which share of the lowest loss another may be higher.
        samples: That each branch trained on.
    """

    points: tuple[BatchPoint, ...]
    tolerance: float
    samples: int

    @property
    def lowest(self) -> BatchPoint:
        """The batch with the lowest loss."""
        return min(self.points, key=lambda point: point.loss)

    @property
    def largest(self) -> int:
        """The largest batch such that it, and all below it down to the best, are within the tolerance."""
        found = self.lowest.batch
        for point in self.points:
            if point.batch > found and point.loss > self.bound:
                break
            found = max(found, point.batch)
        return found

    @property
    def bound(self) -> float:
        """The highest loss within the tolerance."""
        return self.lowest.loss + self.tolerance * abs(self.lowest.loss)

    def sentence(self) -> str:
        """Say what the largest batch is, and what accumulating more costs."""
        best, at = self.lowest, next(point for point in self.points if point.batch == self.largest)
        text = f"{at.batch} is the largest of these batches within {100 * self.tolerance:.3g} % of the lowest loss"
        if beyond := next((point for point in self.points if point.batch > self.largest), None):
            more, error = beyond.loss - best.loss, sqrt(beyond.error**2 + best.error**2)
            text += f"; {beyond.batch} costs {more:.3g} ± {error:.2g} of loss on the same samples"
        near = [point for point in self.points if point is not best and abs(point.loss - self.bound) < 2 * point.error]
        unsure = (
            f" Seeds leave open on which side of it {' and '.join(str(p.batch) for p in near)} lies." if near else ""
        )
        return f"{text}.{unsure}"


def batches_around(batch: int, samples: int) -> Sequence[int]:
    """Return B/2 (if that is a whole number), B, 2B and 4B, but none above the samples of a branch.

    Examples:
        >>> batches_around(32, 1000)
        (16, 32, 64, 128)
    """
    half = () if batch % 2 else (batch // 2,)
    return tuple(size for size in (*half, batch, 2 * batch, 4 * batch) if size <= samples)


def critical_batch(measured: Mapping[int, Mapping[int, float]], tolerance: float, samples: int) -> CriticalBatch:
    """Return the record of losses by batch and seed."""
    points = (BatchPoint(batch, tuple(losses.values())) for batch, losses in sorted(measured.items()))
    return CriticalBatch(tuple(points), tolerance, samples)
