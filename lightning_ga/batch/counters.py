"""Find the counter whose count a loss is a mean over, from the weights that parts of a batch turned out to have."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_ga.batch.pytree import open_container
from lightning_ga.plan.weights import AttentionMaskTokens, TargetTokens

_OTHERS_IGNORED = (-1, 255, 0)
_NEAR = 1e-3
_FEW, _MANY = 2**14, 2**20  # numbers of a tensor of which kinds are looked for: fractions, whole numbers


def fitting_counter(batch: Any, parts: Sequence[Any], share: float) -> str:
    """Return the ``normalize=`` that gives the first of a batch's two parts its share of one; empty if none does.

    Examples:
        >>> first, second = torch.tensor([[1, 2, -100]]), torch.tensor([[1, -100, -100]])
        >>> fitting_counter({"labels": torch.cat([first, second])}, [{"labels": first}, {"labels": second}], 2 / 3)
        "normalize=TargetTokens('labels')"
    """
    for counter in _counters(_whole_numbers(batch)):
        counts = [counter(part) for part in parts]
        if sum(counts) and abs(counts[0] / sum(counts) - share) <= _NEAR:
            return f"normalize={_written(counter)}"
    return ""


def kinds_of(batch: Any, path: str = "") -> set[tuple[str, str]]:
    """Return what kinds of values a batch holds that losses may leave out, each with its place.

    These are missing numbers, False, and numbers that stand for padding or for "ignore"; of large tensors nothing is
    said.

    Examples:
        >>> sorted(kinds_of({"x": torch.tensor([0.5, float("nan")]), "y": torch.tensor([3, -100])}))
        [("['x']", 'nan'), ("['y']", 'negative')]
    """
    if isinstance(batch, torch.Tensor) and batch.layout is torch.strided and not batch.is_nested:
        if batch.numel() > (_FEW if batch.is_floating_point() else _MANY) or batch.is_complex():
            return set()
        if batch.dtype == torch.bool:
            return set() if bool(batch.all()) else {(path, "False")}
        marks = {str(mark): batch == mark for mark in ((0, -1) if batch.is_floating_point() else (0, 255))}
        marks |= {"nan": batch.isnan()} if batch.is_floating_point() else {"negative": batch < 0}
        return {(path, name) for name, found in marks.items() if bool(found.any())}
    return set().union(*(kinds_of(child, path + name) for name, child in open_container(batch) or ()))


def _counters(fields: Mapping[Any, torch.Tensor]) -> Iterator[AttentionMaskTokens | TargetTokens]:
    """Yield possible counters: targets other than -100, tokens of a mask, targets with other ignored values."""
    for ignored in (-100, *_OTHERS_IGNORED):
        for key, field in fields.items():
            if bool((field == ignored).any()):
                yield from (TargetTokens(key, ignored, shift) for shift in (False, True) if field.dim() > shift)
        if ignored == -100:
            masks = (key for key, field in fields.items() if bool(((field == 0) | (field == 1)).all()))
            yield from map(AttentionMaskTokens, masks)


def _whole_numbers(batch: Any) -> dict[Any, torch.Tensor]:
    """Return the tensors of whole numbers in a mapping or a sequence."""
    fields = dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else batch
    tensors = fields.items() if isinstance(fields, Mapping) else ()
    return {key: x for key, x in tensors if isinstance(x, torch.Tensor) and not x.is_floating_point() and x.dim()}


def _written(counter: AttentionMaskTokens | TargetTokens) -> str:
    settings = [repr(counter.key)]
    if isinstance(counter, TargetTokens):
        settings += [f"ignore_index={counter.ignore_index}"] if counter.ignore_index != -100 else []
        settings += ["shift=True"] if counter.shift else []
    return f"{type(counter).__name__}({', '.join(settings)})"
