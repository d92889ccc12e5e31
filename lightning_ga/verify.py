"""The exactness check in a Trainer: one small batch of real samples, once whole and once in halves."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_ga import seams
from lightning_ga.batch_norm import batch_norm_layers
from lightning_ga.exactness import Exactness, judge, unmeasured
from lightning_ga.live import uncounted
from lightning_ga.loaders import kept_samples
from lightning_ga.samples import collate_samples, collect_samples
from lightning_ga.traceless import traceless
from lightning_ga.weights import count_items

SAMPLES = 4  # halves of two: BatchNorm refuses one sample


def measure_exactness(
    trainer: Any,
    loader: "DataLoader[Any]",
    indices: list[Any],
    *,
    count: Callable[[Any], float] | None,
    limit: int,
) -> Exactness:
    """Run the check, dropout off, and leave no trace.

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
        return unmeasured(tolerance, "a micro-batch of one sample has no halves")
    try:
        with traceless(trainer) as prepare:
            samples = collect_samples(loader, indices[:size])
            parts = [samples, samples[: size // 2], samples[size // 2 :]]
            counts: list[float] = []
            held: list[list[torch.Tensor]] = []
            for part in parts:
                prepare()
                batch = collate_samples(loader, part, len(part))
                counts.append(kept_samples(batch, len(part)) if count is None else count_items(count, batch))
                gradients = _gradients(trainer, batch)
                # The last ones stay where they are: nothing runs after them.
                held.append(list(gradients) if len(held) == 2 else [_on_host(gradient) for gradient in gradients])
            if not all(number > 0 for number in counts):
                return unmeasured(tolerance, f"normalize counts {counts} in a batch and its halves")
            share = counts[1] / (counts[1] + counts[2])
            layers = tuple(batch_norm_layers(trainer.lightning_module))
            with uncounted():
                return judge(*held, share=share, tolerance=tolerance, layers=layers)
    except Exception as error:  # the check must never cost a run; what went wrong is said instead
        return unmeasured(tolerance, f"{type(error).__name__}: {error}")


def rounding(trainer: Any) -> float:
    """Relative difference that the precision in use explains."""
    precision = str(trainer.precision)
    if "bf16" in precision:
        return 5e-2
    if "16" in precision or trainer.strategy.root_device.type == "cuda":  # TF32 has fp16's ten bits
        return 1e-2
    return 1e-3


def _gradients(trainer: Any, batch: Any) -> Iterator[torch.Tensor]:
    """Gradients of the module's loss on one batch, one after another; dropout off."""
    _without_dropout(trainer.lightning_module)
    seams.backward_only(trainer, seams.to_device(trainer, batch))
    for parameter in trainer.lightning_module.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            yield gradient.coalesce() if gradient.is_sparse else gradient


def _on_host(gradient: torch.Tensor) -> torch.Tensor:
    with uncounted():
        return gradient.to("cpu", copy=True)


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
