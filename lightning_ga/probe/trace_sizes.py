"""Choose the micro-batch sizes whose steps are traced, before the limit is tried. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt

from lightning_ga.memory.segments import SegmentRules
from lightning_ga.memory.trace import MemoryTrace
from lightning_ga.probe.curve import Curve, Step, early_curve
from lightning_ga.probe.prediction import largest_fitting

FAR = 8  # times the traced size: a prediction from there wants a third trace on the way
MARGIN = 0.01  # share of the budget that holes may take besides, where a device keeps a margin for them


@dataclass(frozen=True, slots=True)
class Task:
    """A search for the largest micro-batch up to ``high`` of which a step takes at most ``budget`` bytes."""

    high: int
    budget: int
    rounding: int = 1  # of the allocator, in bytes: 512 on CUDA; sizes are exact to the byte if it is 1
    rules: SegmentRules | None = None  # of the segments that the budget bounds, if there are any
    has_margin: bool = False  # whether there is one percent more than the budget, for an allocator's holes
    closest: float | None = None  # share of the budget that a trial may come to; ``None`` if every size may be tried

    @property
    def margin(self) -> int:
        """Bytes that holes may take beyond the budget."""
        return int(MARGIN * self.budget) if self.has_margin else 0


def trace_sizes(high: int, affordable: int, first: int = 2, *, kernels_vary: bool = False) -> tuple[int, ...]:
    """Choose the sizes of the first traces: small enough to fit for sure, yet apart where that costs nothing.

    They start at two samples, as BatchNorm refuses one. Kernels of an accelerator take other
    temporaries for larger inputs, so there the traces are as large as a quarter of the memory allows. None is below
    the ``first`` step.
    """
    if high <= 3:
        return (high,) if high < 3 else (2, 3)
    second = min(affordable // 4, high // 2) if kernels_vary else 0
    if second > 8:
        return (second // 2, second)
    pairs = (2 * first, 4 * first), (first, 2 * first)
    return next((pair for pair in pairs if pair[1] <= min(high, affordable)), (first, first + 1))


def affordable_samples(traces: Sequence[MemoryTrace], room: int, *, taken: int = 0, rounding: int = 1) -> int:
    """Return the samples that fit if all that grows does so in proportion, as the recorded warm-up step bounds it.

    What is allocated and released before the last mark (forward and backward passes) may grow; the rest
    is added once. ``room`` are bytes that the budget leaves besides what is alive after the step, and ``taken`` those
    that it took besides these, as an allocator measured them.
    """
    marked = traces[-1]
    passes = marked.events[: marked.marks[-1]] if marked.marks else marked.events
    once = max(taken, *(trace.transient_peak(rounding) for trace in traces))
    growing = replace(marked, events=passes).transient_peak(rounding) or once
    return (room - once) * marked.samples // max(1, growing)


class TraceSizes:
    """The sizes to trace, in rising order, which change with what the first traces show."""

    def __init__(self, task: Task, sizes: tuple[int, ...], warm_up: Step | None) -> None:
        self.sizes = sizes
        self._task, self._warm_up = task, warm_up
        self._early: Curve | None = None  # from the first step on

    def next(self, limit: int, ceiling: int) -> int | None:
        """Return the first size between the bounds, if one is left."""
        return next((size for size in self.sizes if limit < size < ceiling), None)

    def fall_back(self, failed: int, ceiling: int) -> None:
        """Choose smaller sizes, because the first one ran out of memory."""
        if failed == self.sizes[0] > 4:
            root = isqrt(failed)  # something grows as the square: a tensor of ``root`` samples is as large as a line
            self.sizes = (root // 2, root) if root > 8 else trace_sizes(ceiling - 1, 8)

    def adjust_last(self, step: Step) -> None:
        """Choose the next size with a quarter of what is left, as far as can be told; a safe one is there already."""
        task, limit = self._task, step.samples
        if task.rounding == 1 or not step.traces:
            return
        self._early = early_curve(self._warm_up, step, task.rounding, task.rules) or self._early
        if self._early is not None:
            size = self._part_way(self._early, limit, task.high // 2)
        else:
            kept = step.traces[0].kept_bytes(task.rounding)
            room, growing = max(0, task.budget - kept), max(1, step.trial.peak_bytes - kept)
            size = min(self.sizes[-1], isqrt(limit**2 * room // growing))  # if all grows as the square
        self.sizes = (*self.sizes[:-1], max(limit + 1, size))

    def add_third(self, curve: Curve, step: Step, guess: int) -> None:
        """Add a size between the traces and where they lead: if that is far, or along a square.

        Two traces cannot tell a square for sure.
        """
        limit, is_exact = step.samples, self._task.rounding == 1
        foreseen = self._early is not None and self._early.confirms(step.trial, ())
        far = not is_exact and guess > FAR * limit
        is_square = curve.replay is not None and curve.replay.is_quadratic
        if guess > 2 * limit and (far or (is_square and not foreseen)):
            self.sizes += (2 * limit if is_exact else max(2 * limit, self._part_way(curve, limit, guess)),)

    def _part_way(self, curve: Curve, limit: int, high: int) -> int:
        """Return where a curve has come a quarter of the way from the largest step to the budget."""
        needed = curve.needs(limit)
        return largest_fitting(curve.needs, limit + 1, high, needed + (self._task.budget - needed) // 4)
