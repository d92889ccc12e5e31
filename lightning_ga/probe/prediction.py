"""Predict the peak of a training step at any micro-batch size from the traces of two small ones.

A step allocates and releases the same storages in the same order whatever the number of samples; only their
sizes change. The peak moves from one operation to another as the batch grows, so every storage is extrapolated
by itself, the stream is replayed with those sizes, and the maximum is taken. The same tells what holds the peak.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_ga.memory.attribution import StepOrigins, attribute
from lightning_ga.memory.trace import MemoryTrace, replay
from lightning_ga.plan.attribution import Attribution


@dataclass(frozen=True, slots=True)
class PeakPredictor:
    """Peak bytes as a function of the micro-batch size, from two traces of the same stream.

    A storage of equal size in both is constant. A line with an intercept of zero or more is
    affine. A line with a negative intercept cannot be the size of a tensor, so the storage is
    read as α·b² + β·b (a similarity matrix is b × b). One that shrinks keeps its larger size.
    """

    first: MemoryTrace
    second: MemoryTrace
    rounding: int = 1
    temporaries: frozenset[int] = frozenset()  # of kernels: they may grow, or may have ended growing

    @property
    def is_quadratic(self) -> bool:
        """Whether a storage was read as quadratic, which a third trace should confirm."""
        return any(map(self._is_square, self.first.sizes, self.second.sizes))

    def sizes(self, samples: int, *, at_least: bool = False) -> list[int]:
        """Bytes of every storage at a micro-batch of ``samples``, rounded up to whole bytes.

        What they are ``at_least`` is that where temporaries have ended growing.
        """
        low, high = self.first.samples, self.second.samples
        before, after, apart = samples - low, high - samples, high - low
        sizes = []
        for number, (small, large) in enumerate(zip(self.first.sizes, self.second.sizes)):
            if at_least and number in self.temporaries:
                size = large
            elif large <= small:
                size = small
            elif not self._is_square(small, large):
                size = small - (small - large) * before // apart
            else:  # size / samples is a line through both points
                size = -(-samples * (small * high * after + large * low * before) // (low * high * apart))
            sizes.append(max(size, 0))
        return sizes

    def __call__(self, samples: int, *, at_least: bool = False) -> int:
        """Predicted peak in bytes at a micro-batch of ``samples``, with these ``sizes``."""
        return replay(self.sizes(samples, at_least=at_least), self.second.events, self.rounding)

    def confirms(self, trace: MemoryTrace) -> bool:
        """Whether a further trace has the same stream and exactly the predicted peak."""
        return trace.events == self.second.events and self(trace.samples) == trace.peak(self.rounding)

    def _is_square(self, small: int, large: int) -> bool:
        return small < large and small * self.second.samples < large * self.first.samples


def extrapolate(
    first: MemoryTrace, second: MemoryTrace, temporaries: frozenset[int] = frozenset(), *, rounding: int = 1
) -> PeakPredictor | None:
    """Read the whole memory curve off two traces; ``None`` where the streams do not align.

    Examples:
        >>> small = MemoryTrace(2, (100, 8, 16), (0, 1, 2, ~1, ~2))
        >>> large = MemoryTrace(4, (100, 16, 16), (0, 1, 2, ~1, ~2))
        >>> extrapolate(small, large)(64)
        372
    """
    if first.samples == second.samples or first.events != second.events:
        return None
    small, large = sorted((first, second), key=lambda trace: trace.samples)
    return PeakPredictor(small, large, rounding, temporaries)


def largest_fitting(predict: Callable[[int], int], low: int, high: int, budget: int) -> int:
    """Largest size in ``low..high`` whose predicted peak is within the budget; ``low - 1`` if none is.

    ``predict`` must not fall as the size grows.

    Examples:
        >>> largest_fitting(lambda samples: 100 + 4 * samples, 1, 1000, budget=300)
        50
    """
    low -= 1
    known: list[tuple[int, int]] = []  # sizes and their peaks: lines through two of them lead near, halving ends there
    while low < high:
        middle = (low + high + 1) // 2
        if len(known) > 1 and len(known) % 3:
            (one, less), (other, more) = known[-2:]
            along = one + (budget - less) * (other - one) // (more - less) if more != less else middle
            middle = min(max(along, low + 1), high)
        peak = predict(middle)
        known.append((middle, peak))
        if peak <= budget:
            low = middle
        else:
            high = middle - 1
    return low


class PeakHolders:
    """Says what holds the peak of a step of any size, from the last recorded step of each size."""

    def __init__(self, rounding: int) -> None:
        self._rounding = rounding
        self._steps: dict[int, tuple[MemoryTrace, StepOrigins]] = {}

    def record(self, trace: MemoryTrace, origins: StepOrigins) -> None:
        """Keep a step."""
        self._steps[trace.samples] = trace, origins

    def at(self, samples: int, peak: int) -> Attribution | None:
        """Say what holds the peak of a step as measured or predicted, else that of the largest that ran."""
        recorded = self._steps.get(samples) or self._predicted(samples)
        if recorded is not None:
            return attribute(*recorded, rounding=self._rounding, peak=peak)
        ran = [size for size, (_, origins) in self._steps.items() if origins.complete]
        return attribute(*self._steps[max(ran)], rounding=self._rounding) if ran else None

    def _predicted(self, samples: int) -> tuple[MemoryTrace, StepOrigins] | None:
        """Return a step as two smaller ones foretell it; ``None`` where their streams do not align."""
        ran = sorted(size for size, (_, origins) in self._steps.items() if origins.complete)
        for small, large in pairwise(ran):
            (first, _), (second, origins) = self._steps[small], self._steps[large]
            predictor = extrapolate(first, second, rounding=self._rounding)
            if predictor is not None:
                sizes = tuple(predictor.sizes(samples))
                return replace(second, samples=samples, sizes=sizes), origins
        return None
