"""Weights of micro-batches, so that a window's gradient is that of its samples in one pass.

A loss is a mean over the samples of one micro-batch. Lightning divides it by the accumulation factor A
(``loops/optimization/automatic.py`` of 2.6.6, ``ClosureResult``) and data parallelism averages gradients over W ranks,
so the optimizer sees Σ gᵢ / (A·W). The mean over the whole window of N samples is Σ nᵢ gᵢ / N: the micro-batch of nᵢ
samples must weigh A·W·nᵢ / N. The same holds for a mean over tokens, with nᵢ tokens of N.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ga.errors import UserError


def known_weight(count: float, window: float, *, factor: int, world_size: int) -> float:
    """Return the weight of a micro-batch whose window is known in advance; 1.0 where all are equal.

    Args:
        count: Samples (or tokens) of this micro-batch.
        window: Samples (or tokens) of the window, over all ranks.
        factor: The accumulation factor by which Lightning divides.
        world_size: Ranks over which gradients are averaged.

    Examples:
        >>> known_weight(43, 128, factor=3, world_size=1)
        1.0078125
    """
    return factor * world_size * count / window


def window_scale(total: float, *, reference: float, factor: int, world_size: int) -> float:
    """Return the scale for the gradients of a window whose micro-batches weighed ``count / reference``.

    Used where the total of the window is known only at its end. The reference is near the mean count, so
    that the weights are near one and half precision neither overflows nor loses digits.

    Args:
        total: Samples (or tokens) that the window turned out to hold, over all ranks.
        reference: The number that the counts were divided by.
        factor: The accumulation factor by which Lightning divided.
        world_size: Ranks over which gradients were averaged.

    Examples:
        >>> window_scale(6, reference=2, factor=4, world_size=1)  # a stream that ended one short
        1.3333333333333333
    """
    return factor * world_size * reference / total


def count_items(normalize: Callable[[Any], Any], batch: Any) -> float:
    """Call ``normalize`` on a batch and return its count.

    Raises:
        UserError: If that is not one number.
    """
    found = normalize(batch)
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(found.shape)}" if hasattr(found, "shape") else ""
        raise UserError(
            f"normalize returned a {type(found).__name__}{shape} for a batch: it has to return one number, how many "
            "items of the batch its loss is a mean over."
        ) from None


@dataclass(frozen=True)
class Samples:
    """Counts samples: the length of the batch's first tensor, as ``normalize="samples"`` does."""

    def __call__(self, batch: Any) -> int:
        """Return the samples of a batch."""
        first = next(tensors_in(batch), None)
        if first is None:
            raise UserError(
                f"normalize=Samples() finds no tensor in a {type(batch).__name__}: give a callable that counts."
            )
        return int(first.shape[0])


@dataclass(frozen=True)
class TargetTokens:
    """Counts the targets that a token-mean loss is a mean over.

    Attributes:
        key: Where the targets are in the batch: a key, an index, or an attribute.
        ignore_index: Targets that the loss leaves out, as in ``torch.nn.CrossEntropyLoss``.
        shift: Whether the model predicts each token from those before it and so leaves out the first
            of every sequence, as Hugging Face's causal language models do with ``labels``.

    Examples:
        >>> import torch
        >>> TargetTokens()({"labels": torch.tensor([[5, 7, -100], [8, -100, -100]])})
        3
    """

    key: str | int = "labels"
    ignore_index: int = -100
    shift: bool = False

    def __call__(self, batch: Any) -> int:
        """Return the targets of a batch that count."""
        targets = _pick(batch, self.key)
        return int((targets[..., 1:] if self.shift else targets).ne(self.ignore_index).sum())


@dataclass(frozen=True)
class AttentionMaskTokens:
    """Counts the tokens that are not padding.

    Attributes:
        key: Where the mask (1 for a token, 0 for padding) is in the batch.

    Examples:
        >>> import torch
        >>> AttentionMaskTokens()({"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])})
        3
    """

    key: str | int = "attention_mask"

    def __call__(self, batch: Any) -> int:
        """Return the tokens of a batch."""
        return int(_pick(batch, self.key).sum())


def _pick(batch: Any, key: str | int) -> Any:
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError):
        if isinstance(key, str) and hasattr(batch, key):
            return getattr(batch, key)
    keys = f" with the keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else ""
    raise UserError(f"normalize looks for {key!r} in a {type(batch).__name__}{keys}: give the right key=…") from None


def tensors_in(batch: Any) -> Iterator[Any]:
    """Yield the tensors of mappings and sequences that are no plain numbers."""
    if hasattr(batch, "shape") and len(batch.shape):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)
