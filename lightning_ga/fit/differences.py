"""Compare the gradient of a batch in micro-batches with that of one pass, and name the cause of a difference.

For a loss that is a mean over independent samples the weighted parts add up to the whole, up to
rounding. Otherwise the cause follows from the difference and from the state that the step changed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_ga.plan.exactness import Exactness, unmeasured


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between the gradients of two parts of a batch and that of the whole."""

    error: float  # ‖weighted sum of the parts − whole‖ ÷ ‖whole‖
    summed: float  # ‖sum of the parts − whole‖ ÷ ‖whole‖
    share: float  # the weight of the first part, of two that add up to one, with the smallest error
    best: float  # the error with that weight
    size: float  # ‖whole‖

    @property
    def finite(self) -> bool:
        """True if the whole has a gradient to compare with."""
        return 0 < self.size < float("inf")


Gradient = Sequence[torch.Tensor]


def compare(whole: Gradient, first: Gradient, second: Gradient, *, share: float) -> Differences:
    """Compare the gradients of two parts of a batch with that of the whole.

    Args:
        whole: Gradient of the whole batch, one tensor per parameter.
        first: Gradient of the first part.
        second: Gradient of the second part.
        share: Weight of the first part, by what the loss is a mean over.

    Examples:
        >>> one, three, two = ([torch.tensor([value])] for value in (1.0, 3.0, 2.0))
        >>> compare(two, one, three, share=0.5).error
        0.0
        >>> compare([torch.tensor([4.0])], one, three, share=0.5).summed
        0.0
    """
    size = error = summed = along = apart = 0.0
    for w, a, b in _in_double(whole, first, second):
        size, error = size + _square(w), error + _square(share * a + (1 - share) * b - w)
        summed += _square(a + b - w)
        along, apart = along + float(((w - b) * (a - b)).sum()), apart + _square(a - b)
    best = along / apart if apart else share
    left = sum(_square(best * a + (1 - best) * b - w) for w, a, b in _in_double(whole, first, second))
    norm = math.sqrt(size)
    if not norm:
        return Differences(0.0, 0.0, share, 0.0, 0.0)
    return Differences(math.sqrt(error) / norm, math.sqrt(summed) / norm, best, math.sqrt(left) / norm, norm)


def distance(one: Gradient, other: Gradient) -> float:
    """Return ‖one − other‖ ÷ ‖one‖."""
    size = difference = 0.0
    for a, b in _in_double(one, other):
        size, difference = size + _square(a), difference + _square(a - b)
    return math.sqrt(difference / size) if size else 0.0


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


def judge(
    differences: Differences,
    *,
    tolerance: float,
    noise: float = 0.0,
    layers: tuple[str, ...] = (),
    tensors: tuple[str, ...] = (),
    micro_steps: int = 0,
) -> Exactness:
    """Name the cause of a difference.

    Args:
        differences: Differences between the gradients of the parts and of the whole.
        tolerance: Largest difference that rounding explains.
        noise: Relative distance of two passes over the same whole batch with other random numbers.
        layers: Names of BatchNorm layers in training mode.
        tensors: State that a step changes besides gradients.
        micro_steps: Passes that were run.
    """
    if not differences.finite:
        return unmeasured(tolerance, f"the norm of the gradient is {differences.size}")
    found = Exactness(differences.error, tolerance, "exact", layers=layers, tensors=tensors, micro_steps=micro_steps)
    drawn = replace(found, relative_error=None)
    if tensors:
        return replace(drawn if noise > tolerance else found, cause="stateful")
    if noise > tolerance:
        return replace(drawn, cause="batch_norm" if layers else "random")
    if differences.error != differences.error:  # NaN: a part has no gradient by itself, and the whole has one
        return replace(drawn, cause="batch_norm" if layers else "coupled")
    if differences.error <= tolerance:
        return replace(found, layers=())
    if differences.summed <= tolerance:
        return replace(found, cause="sum", layers=())
    if layers:
        return replace(found, cause="batch_norm")
    between = 0 <= differences.share <= 1 and differences.best <= tolerance
    return replace(found, cause="weighted" if between else "coupled")
