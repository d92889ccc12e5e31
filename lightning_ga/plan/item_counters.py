"""Count the items of a batch that a loss is a mean over: targets, or tokens of an attention mask. Pure.

Tested in tests/plan/test_window_weights.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ga.errors import UserError


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
        """Return the number of targets that are not ignored."""
        targets = _pick(batch, self.key)
        sequences = targets.unbind() if getattr(targets, "is_nested", False) else [targets]
        return int(sum((each[..., int(self.shift) :] != self.ignore_index).sum() for each in sequences))


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
        # A sum of the mask would be rounded to its type, maybe half precision.
        return int((_pick(batch, self.key) != 0).sum())


def _pick(batch: Any, key: str | int) -> Any:
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError):
        if isinstance(key, str) and hasattr(batch, key):
            return getattr(batch, key)
    keys = f" with the keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else ""
    raise UserError(f"normalize looks for {key!r} in a {type(batch).__name__}{keys}: give the right key=…") from None
