"""Find which counter a loss is a mean over, from the weights that its parts turned out to have."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_ga.weights import AttentionMaskTokens, TargetTokens

_IGNORED = (-100, -1, 255, 0)
_NEAR = 1e-3


def fitting_counter(batch: Any, parts: Sequence[Any], share: float) -> str:
    """The ``normalize=`` that gives the first of two parts its share, as a user would write it; empty if none does.

    Args:
        batch: The whole batch.
        parts: The two parts that it was cut into.
        share: What the first weighs of both.

    Examples:
        >>> first, second = torch.tensor([[1, 2, -100]]), torch.tensor([[1, -100, -100]])
        >>> fitting_counter({"labels": torch.cat([first, second])}, [{"labels": first}, {"labels": second}], 2 / 3)
        "normalize=TargetTokens('labels')"
    """
    for key, field in _fields(batch):
        if not isinstance(field, torch.Tensor) or field.is_floating_point() or not field.dim():
            continue
        masks = field.dtype == torch.bool or set(field.unique().tolist()) <= {0, 1}
        counters: list[AttentionMaskTokens | TargetTokens] = [AttentionMaskTokens(key)] if masks else []
        ignored = [value for value in _IGNORED if bool((field == value).any())]
        counters += [
            TargetTokens(key, value, shift) for value in ignored for shift in (False, True) if field.dim() > shift
        ]
        for counter in counters:
            counts = [counter(part) for part in parts]
            if sum(counts) and abs(counts[0] / sum(counts) - share) <= _NEAR:
                return f"normalize={_written(counter)}"
    return ""


def _fields(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    return list(enumerate(batch)) if isinstance(batch, (list, tuple)) else []


def _written(counter: AttentionMaskTokens | TargetTokens) -> str:
    settings = [repr(counter.key)]
    if isinstance(counter, TargetTokens):
        settings += [f"ignore_index={counter.ignore_index}"] if counter.ignore_index != -100 else []
        settings += ["shift=True"] if counter.shift else []
    return f"{type(counter).__name__}({', '.join(settings)})"
