"""The verdict of the exactness check, and its sentences. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_ga.plan.units import format_bytes

SAME_RESULT = "with the same result"
NO_GRADIENT = "its gradient is zero"

Cause = Literal["exact", "batch_norm", "sum", "coupled", "weighted", "stateful", "random", "uncuttable", "unmeasured"]
INEXACT = ("batch_norm", "sum", "coupled", "weighted", "stateful")
"""Causes for which gradients differ from those of one pass, or may in a later window."""

_MEANING: dict[Cause, str] = {
    "exact": "micro-batches gave the gradient of the whole batch, on the samples that were measured",
    "batch_norm": "{layers} normalize by the statistics of each micro-batch, not of the whole batch; GroupNorm "
    "(lightning_ga.models.to_group_norm) makes it exact",
    "sum": "the loss is a sum over samples, and accumulation averages: divide it by the number of samples, or the "
    "learning rate means another thing for every micro-batch; if it is a sum divided by what few samples have "
    "(positives, at least one), give normalize= a function that counts that in a batch",
    "coupled": "the loss couples the samples of a batch: it compares them with each other (contrastive losses, "
    "in-batch negatives), or depends on which of them are together (statistics or padding of the batch); let it treat "
    "samples by themselves, or train in whole batches{whole}",
    "weighted": "the loss is a mean over something else than samples (tokens, nodes, class weights): give {counter}, "
    "so that micro-batches weigh what they count",
    "stateful": "the step, or a hook, changes {tensors}, which the next micro-batch meets and one pass over the batch "
    "would not; change it after the optimizer's step (in optimizer_step, after super().optimizer_step(…))",
    "random": "the step, or what makes and moves its batch, draws random numbers: two passes over one batch differ, "
    "so nothing can be measured, and accumulation is right on average",
    "uncuttable": "{reason}",
    "unmeasured": "not measured: {reason}",
}

# What a stateful step depends on, where it is no tensor that the step changes.
ACCUMULATED = (
    "gradients of earlier micro-batches, or adds some by itself (a hook that writes to .grad, a second loss)",
)
COUNTED = (
    "the step depends on the number of its batch, or of all (batch_idx, trainer.num_training_batches, or a count that "
    "a hook of batches keeps), which counts micro-batches here: use trainer.global_step, which counts optimizer steps, "
    'or micro_batching="step"'
)
COLLATE_COUNTS = (
    "the collate function makes other batches of the same samples after some calls, and micro-batches are more calls: "
    'let it depend on the epoch, or use micro_batching="step", which cuts batches after it'
)
KEPT = (
    "the module keeps something of each pass that a later hook or step reads (gradients that on_after_backward sees, "
    "what on_train_batch_end writes, losses that are gathered), and so the optimizer is given another gradient later "
    "than after one pass: keep what the whole batch shows, in on_before_optimizer_step or after the optimizer's step"
)
ACROSS_RANKS = (
    "the gradient depends on what the step exchanges with the other ranks (all_gather, all_reduce), which is of their "
    "micro-batches, not of the whole batch: leave a count of items to normalize=, or train in whole batches"
)
PER_CHUNK = (
    "BatchNorm layers in the submodules of whole= normalize by the statistics of each chunk, not of the whole batch; "
    "GroupNorm (lightning_ga.models.to_group_norm) makes it exact"
)
RANDOM_CHUNKS = (
    "the submodules of whole= draw random numbers, and chunks draw others than the whole: whether they treat samples "
    "by themselves was not measured"
)
LEFT_OUT = (
    "training_step returned None for some of a window's micro-batches: these count as nothing, and the gradient is the "
    "mean over the others, where one pass over the window would have been skipped, or trained on them too; let the "
    "loss leave such samples out, and count the others with normalize="
)
LEFT_OUT_WHOLE = (
    "training_step returned None for some of a window's micro-batches, though it trains on some of their samples by "
    "themselves; so the whole window is left out, as one pass is if a sample of it makes the loss NaN"
)
BATCHES_CHANGED = (
    "a callback changes batches in on_train_batch_start, where it sees micro-batches: if it mixes samples, these are "
    'others than in one pass; micro_batching="step" cuts batches after it'
)
GRADIENTS_CHANGED = (
    "a callback changes the gradients of micro-batches in on_after_backward: change those of the batch in "
    'on_before_optimizer_step, or use micro_batching="step"'
)
BY_BATCH = (
    "{hook} runs for each micro-batch if the loader cuts, and changes {what}: let it act if trainer.global_step has "
    'changed, or use micro_batching="step"'
)
HOOKED = (
    "hooks on gradients (Tensor.register_hook, or on_after_backward where the loader cuts) see those of each "
    "micro-batch, not of the whole batch: change gradients in on_before_optimizer_step, or clip them by "
    "Trainer(gradient_clip_val=…)"
)


@dataclass(frozen=True, slots=True)
class Exactness:
    """Result of the exactness check.

    Attributes:
        relative_error: ‖parts − whole‖ ÷ ‖whole‖ of the gradient; ``None`` if it could not be measured.
        tolerance: Largest difference that rounding explains at the precision in use.
        cause: ``"exact"``, or why the difference is above the tolerance or could not be measured.
        layers: Names of BatchNorm layers in training mode.
        reason: Why nothing could be measured, or cut, or which state it is besides tensors.
        micro_steps: Forward and backward passes that the check ran.
        tensors: State that the step changes besides gradients: buffers, untrained parameters, attributes.
        counter: The ``normalize=`` that fits a loss that is a mean over something else than samples.
        whole: Names of submodules that treat samples by themselves, for ``whole=``, where the loss does not.
        bytes_per_sample: Of what these return, which such a loss needs of all samples of a window.
    """

    relative_error: float | None
    tolerance: float
    cause: Cause
    layers: tuple[str, ...] = ()
    reason: str = ""
    micro_steps: int = 0
    tensors: tuple[str, ...] = ()
    counter: str = ""
    whole: tuple[str, ...] = ()
    bytes_per_sample: int = 0

    def __str__(self) -> str:
        of_state = self.reason if self.cause in ("stateful", "batch_norm", "random", "coupled") else ""
        whole = (
            f": whole={self.whole!r} runs them in the memory of a chunk and {format_bytes(self.bytes_per_sample)} for "
            "each sample"
        )
        meaning = of_state or _MEANING[self.cause].format(
            layers=f"BatchNorm layers ({_some(self.layers)})",
            tensors=_some(self.tensors),
            counter=self.counter or "normalize= a function that counts that in a batch",
            reason=self.reason,
            whole=whole if self.whole else "",
        )
        if self.cause == "stateful" and self.layers:
            meaning += f"; besides, BatchNorm layers ({_some(self.layers)}) see each micro-batch by itself"
        is_above = self.relative_error is not None and not self.relative_error <= self.tolerance
        shows_error = self.relative_error is not None and (self.cause == "exact" or is_above)
        return f"relative error {self.relative_error:.1e}: {meaning}" if shows_error else meaning


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The results of the check."""

    training: Exactness  # for the micro-batches that training runs
    splitting: Exactness  # for batches that are cut in the step
    changing: tuple[str, ...] = ()  # names of all that passes change besides gradients
    tables: tuple[str, ...] = ()  # those of them that any pass leaves alike
    kinds: frozenset[tuple[str, str]] = frozenset()  # of samples that were seen

    def unless(self, other: "Verdicts") -> "Verdicts":
        """Return these verdicts, with those of the other check where only that found something inexact."""
        pairs = ((self.training, other.training), (self.splitting, other.splitting))
        steps = other.training.micro_steps
        training, splitting = (b if b.cause in (*INEXACT, "random") and a.cause == "exact" else a for a, b in pairs)
        return Verdicts(replace(training, micro_steps=steps), replace(splitting, micro_steps=steps))


def both(verdict: Exactness) -> Verdicts:
    """Return one verdict for training and for splitting."""
    return Verdicts(verdict, verdict)


def found_to_change(verdict: Exactness | None, tensors: tuple[str, ...]) -> Exactness | None:
    """Return the verdict after training has shown that these tensors change between two passes of a window."""
    if verdict is None or not tensors or verdict.cause in INEXACT:
        return verdict
    return replace(verdict, relative_error=None, cause="stateful", tensors=tensors, reason="")


def splitting_sentence(verdict: Exactness | None) -> str:
    """Return a sentence on whether a batch that is cut in the step has the same gradient, by the verdict on such."""
    if verdict is None:
        return "Whether its gradient is that of the batch in one pass was not measured (verify=False)."
    if verdict.cause == "exact":
        return SAME_RESULT
    if verdict.cause in INEXACT:
        return f"Its gradient is not that of the batch in one pass, {verdict}."
    return f"Whether its gradient is that of the batch in one pass is not known: {verdict}."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def unmeasured(tolerance: float, reason: str) -> Exactness:
    """Return the record of a check that could not be made."""
    return Exactness(None, tolerance, "unmeasured", reason=reason)


def uncuttable(tolerance: float, reason: str) -> Exactness:
    """Return the record of batches that cannot be cut."""
    return Exactness(None, tolerance, "uncuttable", reason=reason)
