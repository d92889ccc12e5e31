"""The verdict of the measurement of exactness, and its sentences. Pure.

Tested in tests/fit/exactness/test_measure.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

SAME_RESULT = "The result is the same."

Cause = Literal["exact", "batch_norm", "sum", "coupled", "weighted", "stateful", "random", "uncuttable", "unmeasured"]
INEXACT = ("batch_norm", "sum", "coupled", "weighted", "stateful")
"""Causes for which gradients differ from those of one pass, or may in a later window."""

WEIGHS_ALIKE = (
    "normalize=None weighs micro-batches alike, as Lightning does, and some have fewer samples than others: leave "
    "normalize= out, which weighs them by their samples, or give a micro_batch_size that divides every window"
)

_MEANING: dict[Cause, str] = {
    "exact": "micro-batches gave the gradient of the whole batch, on the samples that were measured",
    "batch_norm": "{layers} normalize by the statistics of each micro-batch, not of the whole batch; GroupNorm "
    "(lightning_ga.models.to_group_norm) makes it exact",
    "sum": "the loss is a sum over samples, and accumulation averages: divide it by the number of samples; if it is a "
    "sum divided by what few samples have (positives, at least one), give normalize= a function that counts that in a "
    "batch",
    "coupled": "the loss couples the samples of a batch: it compares them with each other (contrastive losses, "
    "in-batch negatives), or depends on which of them are together (statistics or padding of the batch); let it treat "
    "samples by themselves, name the submodules below it in whole=, or train in whole batches",
    "weighted": "the loss is a mean over something else than samples (tokens, nodes, class weights): give normalize= a "
    "function that counts that in a batch, such as lightning_ga.counters.TargetTokens()",
    "stateful": "a pass changes {tensors}, and the gradient of the next micro-batch depends on it, but one pass over "
    "the batch would not: change it after the optimizer's step (in optimizer_step, after super().optimizer_step(…))",
    "random": "{reason}",
    "uncuttable": "{reason}",
    "unmeasured": "not measured: {reason}",
}


@dataclass(frozen=True, slots=True)
class Exactness:
    """Result of a measurement of exactness.

    Attributes:
        relative_error: ‖weighted sum of the parts − whole‖ ÷ ‖whole‖ of the gradient; ``None`` if it is not known.
        tolerance: Largest difference that rounding explains at the precision in use.
        cause: ``"exact"``, or why the difference is above the tolerance or could not be measured.
        layers: Names of BatchNorm layers in training mode.
        reason: Why nothing could be measured or cut, or a sentence in place of the cause's usual one.
        tensors: State that a pass changes besides gradients (buffers, untrained parameters, attributes). Unless the
            cause is ``"stateful"``, no gradient was seen to depend on it.
        has_gradient: False if the gradient was zero, so that nothing could be measured.
    """

    relative_error: float | None
    tolerance: float
    cause: Cause
    layers: tuple[str, ...] = ()
    reason: str = ""
    tensors: tuple[str, ...] = ()
    has_gradient: bool = True

    def __str__(self) -> str:
        layers = f"BatchNorm layers ({_some(self.layers)})"
        meaning = self.reason or _MEANING[self.cause]
        if self.cause in ("uncuttable", "unmeasured") or not self.reason:
            meaning = _MEANING[self.cause].format(layers=layers, tensors=_some(self.tensors), reason=self.reason)
        if self.cause in INEXACT and self.cause != "batch_norm" and self.layers:
            meaning += f"; besides, {layers} see each micro-batch by itself"
        error = self.relative_error
        if error is None or (self.cause != "exact" and error <= self.tolerance):
            return meaning
        return f"relative error {error:.1e}: {meaning}"


def is_inexact(verdict: Exactness | None) -> bool:
    """Return whether gradients are known to differ from those of one pass."""
    return verdict is not None and verdict.cause in INEXACT


def combined(verdicts: Iterable[Exactness]) -> Exactness:
    """Return the verdict for all ranks: exact if that of every rank is, else the worst."""
    return max(verdicts, key=lambda each: (is_inexact(each), each.cause != "exact"))


def warning(verdict: Exactness | None, *, batch_norm: str = "warn") -> str | None:
    """Return the sentence for a user whose batches are cut; ``None`` if all is well, or BatchNorm is accepted."""
    if verdict is None:
        return None
    if verdict.cause == "unmeasured":
        return f"Whether accumulation is exact for this model is not known: {verdict}."
    is_accepted = verdict.cause == "batch_norm" and batch_norm != "warn"
    if is_accepted or not is_inexact(verdict):
        return None
    return f"Accumulation is not exact for this model, {verdict}."


def after_error(verdict: Exactness | None) -> str:
    """Return what is known of the gradient of a window that runs again in smaller micro-batches."""
    if verdict is None:
        return "Whether its gradient is that of the window in one pass was not measured (verify=False)."
    if verdict.cause == "exact":
        return SAME_RESULT
    if is_inexact(verdict):
        return f"Its gradient is not that of the window in one pass, {verdict}."
    return f"Its gradient may not be that of one pass, {verdict}."


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
