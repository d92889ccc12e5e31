"""Whether a batch cut in halves gives the gradient of the batch in one pass, and if not, why.

For a loss that is a mean over independent samples the weighted halves add up to the whole, to
rounding. Where they do not, the relative difference says by how much, and its shape says why.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

Cause = Literal["exact", "batch_norm", "sum", "coupled", "unmeasured"]

_MEANING = {
    "exact": "micro-batches give the gradient of the whole batch",
    "batch_norm": "{layers} normalize by the statistics of each micro-batch, not of the whole batch; GroupNorm "
    "(lightning_ga.models.to_group_norm) makes it exact",
    "sum": "the loss is a sum over samples, and accumulation averages: use a mean, or the learning rate means another "
    "thing for every micro-batch",
    "coupled": "the loss couples the samples of a batch (contrastive losses, in-batch negatives), is a mean over "
    "something else than samples (tokens: give normalize=…), or training_step draws random numbers",
    "unmeasured": "not measured: {reason}",
}


@dataclass(frozen=True, slots=True)
class Exactness:
    """What the exactness check measured.

    Attributes:
        relative_error: ‖halves − whole‖ ÷ ‖whole‖ of the gradient; ``None`` if it could not be measured.
        tolerance: What rounding may explain at the precision in use.
        cause: Why the difference is above it, or ``"exact"``, or ``"unmeasured"``.
        layers: Names of BatchNorm layers, where they are the cause.
        reason: Why nothing could be measured.
        micro_steps: Forward and backward passes that the check ran.
    """

    relative_error: float | None
    tolerance: float
    cause: Cause
    layers: tuple[str, ...] = ()
    reason: str = ""
    micro_steps: int = 3

    def __str__(self) -> str:
        layers = ", ".join(self.layers[:3]) + (f" and {len(self.layers) - 3} more" if len(self.layers) > 3 else "")
        meaning = _MEANING[self.cause].format(layers=f"BatchNorm layers ({layers})", reason=self.reason)
        return meaning if self.relative_error is None else f"relative error {self.relative_error:.1e}: {meaning}"


def judge(
    whole: Iterable[torch.Tensor],
    first: Iterable[torch.Tensor],
    second: Iterable[torch.Tensor],
    *,
    share: float,
    tolerance: float,
    layers: tuple[str, ...] = (),
) -> Exactness:
    """Name the cause of a difference between a whole gradient and its halves.

    Args:
        whole: Gradient of the whole batch, one tensor per parameter.
        first: Gradient of the first half.
        second: Gradient of the second half.
        share: Part of the batch that the first half is, by what the loss is a mean over.
        tolerance: What rounding may explain.
        layers: Names of BatchNorm layers in training mode.

    Examples:
        >>> one, three, two = ([torch.tensor([value])] for value in (1.0, 3.0, 2.0))
        >>> judge(two, one, three, share=0.5, tolerance=1e-3).cause
        'exact'
        >>> judge([torch.tensor([4.0])], one, three, share=0.5, tolerance=1e-3).cause
        'sum'
    """
    squares = [0.0, 0.0, 0.0]
    for tensors in zip(whole, first, second):  # one parameter at a time: nothing large is held in double precision
        w, a, b = (tensor.to("cpu", torch.float64) for tensor in tensors)
        for place, difference in enumerate((w, share * a + (1 - share) * b - w, a + b - w)):
            squares[place] += float(_values(difference).pow(2).sum())
    size, error, summed = map(math.sqrt, squares)
    if not 0 < size < float("inf"):
        return unmeasured(tolerance, f"the gradient's norm is {size}")
    error, summed = error / size, summed / size
    if error != error:
        return unmeasured(tolerance, "the gradient of a half is NaN")
    if error <= tolerance:
        return Exactness(error, tolerance, "exact")
    if summed <= tolerance:
        return Exactness(error, tolerance, "sum")
    return Exactness(error, tolerance, "batch_norm" if layers else "coupled", layers)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def unmeasured(tolerance: float, reason: str) -> Exactness:
    """The record of a check that could not be made."""
    return Exactness(None, tolerance, "unmeasured", reason=reason, micro_steps=0)
