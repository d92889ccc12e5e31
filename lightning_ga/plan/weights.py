"""What a micro-batch must weigh so that a window's gradient is that of its samples in one pass.

A loss is a mean over the samples of one micro-batch. Lightning divides it by the accumulation
factor A (``loops/optimization/automatic.py`` of 2.6.6, ``ClosureResult``) and data parallelism
averages gradients over W ranks, so the optimizer sees Σ gᵢ / (A·W). The mean over the whole window
of N samples is Σ nᵢ gᵢ / N: the micro-batch of nᵢ samples must weigh A·W·nᵢ / N. The same holds
for a mean over tokens, with nᵢ tokens of N.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ga.errors import UserError


def known_weight(count: float, window: float, *, factor: int, world_size: int) -> float:
    """Weight of a micro-batch whose window is known in advance; 1.0 where all are equal.

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
    """Scale for the gradients of a window whose micro-batches weighed ``count / reference``.

    Used where the window is known only when it is over. The reference is near the mean count, so
    that the weights are near one and half precision neither overflows nor loses digits.

    Args:
        total: Samples (or tokens) that the window turned out to hold, over all ranks.
        reference: What the counts were divided by.
        factor: The accumulation factor by which Lightning divided.
        world_size: Ranks over which gradients were averaged.

    Examples:
        >>> window_scale(6, reference=2, factor=4, world_size=1)  # a stream that ended one short
        1.3333333333333333
    """
    return factor * world_size * reference / total


class KnownWindow:
    """Weights of windows whose samples are known in advance; it costs nothing where all are equal.

    Args:
        world_size: Ranks over which gradients are averaged.

    Examples:
        >>> window = KnownWindow(world_size=1)
        >>> window.weigh(43, window=128, factor=3, first=True)
        1.0078125
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._window = self._seen = self._trained = self._pending = self._count = 0.0

    def weigh(self, count: float, *, window: float, factor: int, first: bool, planned: float | None = None) -> float:
        """Weight of the next micro-batch of this rank.

        Args:
            count: Its samples.
            window: Samples of the window as planned, over all ranks.
            factor: The accumulation factor.
            first: Whether it begins the window.
            planned: Its samples as planned, where a collate_fn has dropped some.
        """
        if first:
            self._seen = self._trained = 0.0
        self._window, self._pending, self._count = window, count, count
        self._seen += count if planned is None else planned
        return known_weight(count, window, factor=factor, world_size=self._world_size)

    def take_part(self, share: float) -> None:
        """Only so much of the micro-batch is in the next backward pass."""
        self._pending = share * self._count

    def trained(self) -> None:
        """The micro-batch has reached its backward pass; steps that return ``None`` do not."""
        self._trained += self._pending
        self._pending = 0.0

    def close(self, factor: int) -> float:
        """Scale for the window's gradients: above one where micro-batches were skipped or samples dropped.

        Other ranks are not asked: Lightning allows a step to be skipped on one rank only.
        """
        skipped = self._seen - self._trained
        return self._window / (self._window - skipped) if 0 < skipped < self._window else 1.0


class LateWindow:
    """Weights of windows whose samples or tokens are counted as they come.

    A micro-batch weighs its count ÷ a reference near the mean count, and the window's gradients are
    scaled once when its total is known. The reference is twice the largest mean of a window so far:
    so hardly any weight is above one, and half precision overflows no more often than without.

    Args:
        world_size: Ranks over which gradients are averaged.
        sum_over_ranks: Adds up one number over all ranks.
        reference: Where to start; ``None`` takes it from the first micro-batch that counts anything.

    Examples:
        >>> window = LateWindow(1, sum_over_ranks=float, reference=2)
        >>> for count in (2, 2, 1):
        ...     weight = window.weigh(count, window=8, factor=4, first=count == 2)
        ...     window.trained()
        >>> weight, window.close(factor=4)  # a stream that ended before the window was full
        (0.5, 2.6666666666666665)
    """

    def __init__(
        self, world_size: int, *, sum_over_ranks: Callable[[float], float], reference: float | None = None
    ) -> None:
        self._world_size = world_size
        self._sum_over_ranks = sum_over_ranks
        self._reference = reference
        self._fixed = reference is not None
        self._largest_mean = 0.0
        self._trained = self._pending = self._count = 0.0
        self._any = False

    def weigh(self, count: float, *, window: float, factor: int, first: bool, planned: float | None = None) -> float:
        """Weight of the next micro-batch of this rank; what was planned does not matter here."""
        if first:
            self._trained, self._any = 0.0, False
            if not self._fixed and self._reference is not None:
                self._reference = max(self._reference, 2.0 * self._largest_mean)
        if not 0 <= count < float("inf"):
            raise UserError(f"normalize counted {count} in a micro-batch: a count is a finite number of at least 0.")
        self._pending = self._count = count
        if factor == self._world_size == 1 and count:  # a window of one micro-batch is its own mean, to the bit
            self._reference = count
        if self._reference is None:
            mean = self._sum_over_ranks(count) / self._world_size
            if not mean:
                return 0.0
            self._reference = 2.0 * mean
        return count / self._reference

    def take_part(self, share: float) -> None:
        """Only so much of the micro-batch is in the next backward pass."""
        self._pending = share * self._count

    def trained(self) -> None:
        """The micro-batch has reached its backward pass; steps that return ``None`` do not."""
        self._trained += self._pending
        self._pending, self._any = 0.0, True

    def close(self, factor: int) -> float:
        """Scale for the window's gradients.

        Raises:
            UserError: If the whole window counts nothing.
        """
        if not self._any and self._world_size == 1:
            return 1.0
        total = self._sum_over_ranks(self._trained)
        if not total:
            raise UserError(
                "normalize counted 0 in all micro-batches of a window, so its gradient is no mean of anything: check "
                "what it counts (the key, ignore_index), or leave such samples out."
            )
        assert self._reference is not None
        self._largest_mean = max(self._largest_mean, total / (factor * self._world_size))
        return window_scale(total, reference=self._reference, factor=factor, world_size=self._world_size)


def count_items(normalize: Callable[[Any], Any], batch: Any) -> float:
    """What ``normalize`` counts in a batch.

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
    """Counts samples: the length of the batch's first tensor. What ``normalize="samples"`` does by itself."""

    def __call__(self, batch: Any) -> int:
        """Samples of a batch."""
        first = next(_tensors(batch), None)
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
        """Targets of a batch that count."""
        targets = _pick(batch, self.key)
        return int((targets[..., 1:] if self.shift else targets).ne(self.ignore_index).sum())


@dataclass(frozen=True)
class AttentionMaskTokens:
    """Counts the tokens that are no padding.

    Attributes:
        key: Where the mask (1 for a token, 0 for padding) is in the batch.

    Examples:
        >>> import torch
        >>> AttentionMaskTokens()({"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])})
        3
    """

    key: str | int = "attention_mask"

    def __call__(self, batch: Any) -> int:
        """Tokens of a batch."""
        return int(_pick(batch, self.key).sum())


def _pick(batch: Any, key: str | int) -> Any:
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError):
        if isinstance(key, str) and hasattr(batch, key):
            return getattr(batch, key)
    keys = f" with the keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else ""
    raise UserError(f"normalize looks for {key!r} in a {type(batch).__name__}{keys}: give the right key=…") from None


def _tensors(batch: Any) -> Iterator[Any]:
    if hasattr(batch, "shape") and len(batch.shape):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
