"""The exactness check: does a batch cut in halves give the gradient of the batch in one pass?

One small batch runs once whole and once in halves, dropout off. For a loss that is a mean over
independent samples the weighted halves add up to the whole, to rounding. Where they do not, the
relative difference says by how much, and its shape says why.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from lightning_ga import seams
from lightning_ga.batch_norm import batch_norm_layers
from lightning_ga.live import uncounted
from lightning_ga.loaders import collate_samples, collect_samples
from lightning_ga.probe import traceless

SAMPLES = 4  # halves of two: BatchNorm refuses one sample

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


def measure_exactness(
    trainer: Any,
    loader: "DataLoader[Any]",
    indices: list[Any],
    *,
    count: Callable[[Any], float] | None,
    limit: int,
) -> Exactness:
    """Run the check on a few real samples and leave no trace.

    Args:
        trainer: A Trainer at ``on_train_start``.
        loader: The user's DataLoader.
        indices: Indices of samples to run on.
        count: Counts the items of a batch that the loss is a mean over; ``None`` for samples.
        limit: Largest micro-batch that is known to fit, in samples.
    """
    tolerance = rounding(trainer)
    size = min(SAMPLES, limit, len(indices))
    if size < 2:
        return _unmeasured(tolerance, "a micro-batch of one sample has no halves")
    try:
        with traceless(trainer) as prepare:
            samples = collect_samples(loader, indices[:size])
            parts = [samples, samples[: size // 2], samples[size // 2 :]]
            gradients, counts = [], []
            for part in parts:
                prepare()
                batch = collate_samples(loader, part, len(part))
                counts.append(float(len(part) if count is None else count(batch)))
                gradients.append(_gradient(trainer, batch))
            layers = tuple(batch_norm_layers(trainer.lightning_module))
    except Exception as error:  # the check must never cost a run; what went wrong is said instead
        return _unmeasured(tolerance, f"{type(error).__name__}: {error}")
    if not all(number > 0 for number in counts):
        return _unmeasured(tolerance, f"normalize counts {counts} in a batch and its halves")
    return judge(*gradients, share=counts[1] / (counts[1] + counts[2]), tolerance=tolerance, layers=layers)


def judge(
    whole: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
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
    size = _norm(whole)
    if not 0 < size < float("inf"):
        return _unmeasured(tolerance, f"the gradient's norm is {size}")
    error = _norm(share * a + (1 - share) * b - w for w, a, b in zip(whole, first, second)) / size
    summed = _norm(a + b - w for w, a, b in zip(whole, first, second)) / size
    if error <= tolerance:
        return Exactness(error, tolerance, "exact")
    if summed <= tolerance:
        return Exactness(error, tolerance, "sum")
    return Exactness(error, tolerance, "batch_norm" if layers else "coupled", layers)


def rounding(trainer: Any) -> float:
    """Relative difference that the precision in use explains."""
    precision = str(trainer.precision)
    if "bf16" in precision:
        return 5e-2
    if "16" in precision or trainer.strategy.root_device.type == "cuda":  # TF32 has fp16's ten bits
        return 1e-2
    return 1e-3


def _gradient(trainer: Any, batch: Any) -> list[torch.Tensor]:
    """Gradient of the module's loss on one batch, on the host; dropout off."""
    _without_dropout(trainer.lightning_module)
    seams.backward_only(trainer, seams.to_device(trainer, batch))
    return [_on_host(parameter) for parameter in trainer.lightning_module.parameters() if parameter.requires_grad]


def _on_host(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    with uncounted():
        return gradient.detach().to("cpu", torch.float64, copy=True)


def _without_dropout(module: torch.nn.Module) -> None:
    """Evaluation mode, but for what computes something else there: BatchNorm, and RNNs that cuDNN runs."""
    batch_norms = batch_norm_layers(module).values()
    module.eval()
    for batch_norm in batch_norms:
        batch_norm.train()
    for layer in module.modules():
        if isinstance(layer, torch.nn.RNNBase):
            layer.train()
            layer.dropout = 0.0


def _norm(tensors: list[torch.Tensor] | Iterator[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.pow(2).sum()) for tensor in tensors))


def _unmeasured(tolerance: float, reason: str) -> Exactness:
    return Exactness(None, tolerance, "unmeasured", reason=reason, micro_steps=0)
