"""What holds the memory at the peak of a step of any size, from the steps that a probe has recorded."""

from dataclasses import replace
from itertools import pairwise

from lightning_ga.memory.attribution import StepOrigins, attribute
from lightning_ga.memory.trace import MemoryTrace
from lightning_ga.plan.attribution import Attribution
from lightning_ga.probe.prediction import extrapolate


class PeakHolders:
    """Recorded steps by size, the last of each; an allocator rounds their storages up."""

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
