"""Compare the gradient of a batch in micro-batches with that of one pass, and name the cause of a difference.

For a loss that is a mean over independent samples the weighted parts add up to the whole, up to
rounding. Otherwise the cause follows from the difference and from the state that the step changed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.plan.exactness import Exactness


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between the gradients of two parts of a batch and that of the whole."""

    error: float  # ‖weighted sum of the parts − whole‖ ÷ ‖whole‖
    summed: float  # ‖sum of the parts − whole‖ ÷ ‖whole‖
    best_weight: float  # of the first part, of two weights that add up to one, with the smallest error
    best_error: float  # with that weight


Gradient = Sequence[torch.Tensor]  # one tensor per parameter


@uncounted()
def compare(whole: Gradient, first: Gradient, second: Gradient, *, weight: float) -> Differences:
    """Compare the gradients of two parts of a batch with that of the whole; ``weight`` is that of the first part.

    Examples:
        >>> one, three, two = ([torch.tensor([value])] for value in (1.0, 3.0, 2.0))
        >>> compare(two, one, three, weight=0.5).error
        0.0
        >>> compare([torch.tensor([4.0])], one, three, weight=0.5).summed
        0.0
    """
    error = summed = along = apart = 0.0
    for w, a, b in _in_double(whole, first, second):
        error, summed = error + _square(weight * a + (1 - weight) * b - w), summed + _square(a + b - w)
        along, apart = along + float(((w - b) * (a - b)).sum()), apart + _square(a - b)
    best = along / apart if apart else weight
    least = sum(_square(best * a + (1 - best) * b - w) for w, a, b in _in_double(whole, first, second))
    size = norm(whole) or math.inf  # without a gradient there is no difference
    return Differences(math.sqrt(error) / size, math.sqrt(summed) / size, best, math.sqrt(least) / size)


@uncounted()
def norm(gradient: Gradient) -> float:
    """Return ‖gradient‖."""
    return math.sqrt(sum(_square(tensor) for (tensor,) in _in_double(gradient)))


@uncounted()
def distance(one: Gradient, other: Gradient) -> float:
    """Return ‖one − other‖ ÷ ‖one‖; infinity if only the other is there."""
    size = difference = 0.0
    for a, b in _in_double(one, other):
        size, difference = size + _square(a), difference + _square(a - b)
    return math.sqrt(difference / size) if size else math.inf if difference else 0.0


def _in_double(*gradients: Gradient) -> Iterable[tuple[torch.Tensor, ...]]:
    """Yield one parameter at a time in double precision, to save memory; of sparse gradients, the rows."""
    for tensors in zip(*gradients):
        doubles = [tensor.to("cpu", torch.float64) for tensor in tensors]
        if any(double.is_sparse for double in doubles):
            doubles = _same_rows(doubles)
        yield tuple(doubles)


def _same_rows(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    coalesced = [(gradient if gradient.is_sparse else gradient.to_sparse()).coalesce() for gradient in gradients]
    zeros = sum((0.0 * gradient for gradient in coalesced[1:]), start=0.0 * coalesced[0]).coalesce()
    return [(gradient + zeros).coalesce().values() for gradient in coalesced]


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.pow(2).sum())


def judge(measured: Exactness, alone: Differences | None, *, noise: float) -> Exactness:
    """Name the cause of a measured difference, and of state that changes.

    ``alone`` are the differences of gradients that are not accumulated; they are needed if the measured one is above
    the tolerance. ``noise`` is the relative distance of passes over the same batch with other random numbers.
    """
    unknown, error, tolerance = replace(measured, relative_error=None), measured.relative_error, measured.tolerance
    layers = measured.layers
    if measured.tensors:
        return replace(unknown if noise > tolerance else measured, cause="stateful")
    if noise > tolerance:
        return replace(unknown, cause="batch_norm" if layers else "random")
    if error is None or math.isnan(error):  # a part has no gradient by itself, and the whole has one
        return replace(unknown, cause="batch_norm" if layers else "coupled")
    if error <= tolerance or alone is None:
        return replace(measured, cause="exact", layers=())
    least_weight = min(alone.best_weight, 1 - alone.best_weight)
    between = least_weight >= -tolerance and alone.best_error <= tolerance
    if alone.summed <= tolerance and not (between and least_weight <= tolerance):  # or a part counts for nothing
        return replace(measured, cause="sum", layers=())
    if layers:
        return replace(measured, cause="batch_norm")
    return replace(measured, cause="weighted" if between else "coupled")
