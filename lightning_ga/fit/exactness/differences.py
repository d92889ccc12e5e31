"""Compare the gradient of a batch with those of its two parts, and name the cause of a difference.

For a loss that is a mean over independent samples, the weighted parts add up to the whole, up to rounding.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ga.plan.exactness_verdicts import Cause

Gradient = Sequence[Tensor]  # one tensor for each parameter, on the host


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between the gradients of a batch's two parts and of the whole, relative as ``compare`` says."""

    error: float  # of the weighted sum of the parts
    summed: float  # of the sum of the parts
    best_weight: float  # the first part's weight at which the error is smallest; the second's is 1 − it
    best_error: float  # with that weight

    def cause(self, tolerance: float) -> Cause:
        """Name what kind of loss makes such differences.

        If one part has all of the weight and the other one's gradient is zero, because it has no targets, the parts
        also add up; yet the loss is a mean.

        Examples:
            >>> Differences(error=0.3, summed=0.9, best_weight=0.2, best_error=1e-7).cause(1e-4)
            'weighted'
            >>> Differences(error=0.5, summed=0.0, best_weight=0.0, best_error=0.0).cause(1e-4)
            'weighted'
        """
        if self.error <= tolerance:
            return "exact"
        smaller = min(self.best_weight, 1 - self.best_weight)
        is_mean = smaller >= -tolerance and self.best_error <= tolerance
        has_weight_in_one_part = is_mean and smaller <= tolerance
        if self.summed <= tolerance and not has_weight_in_one_part:
            return "sum"
        return "weighted" if is_mean else "coupled"


@torch.no_grad()
def compare(whole: Gradient, first: Gradient, second: Gradient, *, weight: float, enough: float = 0.0) -> Differences:
    """Compare the gradients of two parts of a batch with that of the whole; ``weight`` is that of the first part.

    If the error is at most ``enough``, nothing else is computed. Rounding grows with the gradients of the parts, which
    may cancel each other; then the error is relative to the parts, not to the whole.

    Examples:
        >>> one, three, two = ([torch.tensor([value])] for value in (1.0, 3.0, 2.0))
        >>> compare(two, one, three, weight=0.5).error
        0.0
        >>> compare([torch.tensor([4.0])], one, three, weight=0.5).summed
        0.0
    """
    size = max(norm(whole), weight * norm(first), (1 - weight) * norm(second)) or math.inf

    def error(share: float, other: float) -> float:
        squares = 0.0
        for w, a, b in _alike(whole, first, second):
            parts = (share * a).add_(b, alpha=other)
            squares += _square(parts.sub_(w))
        return math.sqrt(squares) / size

    found = error(weight, 1 - weight)
    if found <= enough:
        return Differences(found, math.inf, weight, found)
    along = apart = 0.0
    for w, a, b in _alike(whole, first, second):
        along += float(((w - b) * (a - b)).sum())
        apart += _square(a - b)
    best = along / apart if apart else weight
    return Differences(found, error(1, 1), best, error(best, 1 - best))


def norm(gradient: Gradient) -> float:
    """Return ‖gradient‖."""
    return math.sqrt(sum(map(_square, gradient)))


@torch.no_grad()
def distance(one: Gradient, other: Gradient) -> float:
    """Return ‖one − other‖ ÷ ‖one‖; infinity if only ``one`` is zero."""
    difference = math.sqrt(sum(_square(a - b) for a, b in _alike(one, other)))
    size = norm(one)
    if not size:
        return math.inf if difference else 0.0
    return difference / size


def _alike(*gradients: Gradient) -> Iterable[tuple[Tensor, ...]]:
    """Yield one parameter at a time: half precision as float32, complex numbers as pairs."""
    for tensors in zip(*gradients, strict=True):
        yield tuple(map(_real, tensors))


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.float() if tensor.element_size() < 4 else tensor


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_real(tensor)).double().square())  # infinity, where a float would raise
