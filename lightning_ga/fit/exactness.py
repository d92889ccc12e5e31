"""Compare the gradient of a batch in micro-batches with that of one pass, and name the cause of a difference.

For a loss that is a mean over independent samples the weighted parts add up to the whole, up to
rounding. Otherwise the cause follows from the difference and from the state that the step changed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_ga.fit.messages import SAME_RESULT

Cause = Literal["exact", "batch_norm", "sum", "coupled", "weighted", "stateful", "random", "uncuttable", "unmeasured"]
INEXACT = ("batch_norm", "sum", "coupled", "weighted", "stateful")
"""Causes for which gradients differ from those of one pass, or may in a later window."""

_MEANING: dict[Cause, str] = {
    "exact": "micro-batches gave the gradient of the whole batch, on the samples that were measured",
    "batch_norm": "{layers} normalize by the statistics of each micro-batch, not of the whole batch; GroupNorm "
    "(lightning_ga.models.to_group_norm) makes it exact",
    "sum": "the loss is a sum over samples, and accumulation averages: divide it by the number of samples, or the "
    "learning rate means another thing for every micro-batch",
    "coupled": "the loss couples the samples of a batch: it compares them with each other (contrastive losses, "
    "in-batch negatives), or depends on which of them are together (statistics or padding of the batch); let it treat "
    "samples by themselves, or train in whole batches",
    "weighted": "the loss is a mean over something else than samples (tokens, nodes, class weights): give {counter}, "
    "so that micro-batches weigh what they count",
    "stateful": "the step, or a hook, changes {tensors}, which the next micro-batch meets: that happens once for each "
    "micro-batch now, not once a step; change it after the optimizer's step (in optimizer_step, after "
    "super().optimizer_step(…))",
    "random": "the step, or what makes and moves its batch, draws random numbers: two passes over one batch differ, "
    "so nothing can be measured, and accumulation is right on average",
    "uncuttable": "{reason}",
    "unmeasured": "not measured: {reason}",
}


@dataclass(frozen=True, slots=True)
class Exactness:
    """Result of the exactness check.

    Attributes:
        relative_error: ‖parts − whole‖ ÷ ‖whole‖ of the gradient; ``None`` if it could not be measured.
        tolerance: Largest difference that rounding explains at the precision in use.
        cause: ``"exact"``, or why the difference is above the tolerance or could not be measured.
        layers: Names of BatchNorm layers in training mode.
        reason: Why nothing could be measured, or cut.
        micro_steps: Forward and backward passes that the check ran.
        tensors: State that the step changes besides gradients: buffers, untrained parameters, attributes.
        counter: The ``normalize=`` that fits a loss that is a mean over something else than samples.
    """

    relative_error: float | None
    tolerance: float
    cause: Cause
    layers: tuple[str, ...] = ()
    reason: str = ""
    micro_steps: int = 0
    tensors: tuple[str, ...] = ()
    counter: str = ""

    def __str__(self) -> str:
        meaning = _MEANING[self.cause].format(
            layers=f"BatchNorm layers ({_some(self.layers)})",
            tensors=_some(self.tensors),
            counter=self.counter or "normalize= a function that counts that in a batch",
            reason=self.reason,
        )
        if self.cause == "stateful" and self.layers:
            meaning += f"; besides, BatchNorm layers ({_some(self.layers)}) see each micro-batch by itself"
        return meaning if self.relative_error is None else f"relative error {self.relative_error:.1e}: {meaning}"


def found_to_change(found: Exactness | None, tensors: tuple[str, ...]) -> Exactness | None:
    """Return the verdict after training has shown that something outside the step changes the model.

    Args:
        found: The verdict of the check; ``None`` if there is none.
        tensors: Names of the tensors that change between two passes of a window, if any.
    """
    if found is None or not tensors or found.cause in INEXACT:
        return found
    return replace(found, relative_error=None, cause="stateful", tensors=tensors)


def splitting_sentence(found: Exactness | None) -> str:
    """Return a sentence on whether a batch that is cut in the step has the same gradient.

    Args:
        found: The verdict on such batches; ``None`` if there is none.
    """
    if found is None:
        return "Whether its gradient is that of the batch in one pass was not measured (verify=False)."
    if found.cause == "exact":
        return SAME_RESULT
    if found.cause in INEXACT:
        return f"Its gradient is not that of the batch in one pass, {found}."
    return f"Whether its gradient is that of the batch in one pass is not known: {found}."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between the gradients of two parts of a batch and that of the whole.

    Attributes:
        error: ‖weighted sum of the parts − whole‖ ÷ ‖whole‖.
        summed: ‖sum of the parts − whole‖ ÷ ‖whole‖.
        share: The weight of the first part, of two that add up to one, with the smallest error.
        best: The error with that weight.
        size: ‖whole‖.
    """

    error: float
    summed: float
    share: float
    best: float
    size: float

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


def unmeasured(tolerance: float, reason: str) -> Exactness:
    """Return the record of a check that could not be made."""
    return Exactness(None, tolerance, "unmeasured", reason=reason)


def uncuttable(tolerance: float, reason: str) -> Exactness:
    """Return the record of batches that cannot be cut."""
    return Exactness(None, tolerance, "uncuttable", reason=reason)
