"""Find the counter whose count a loss is a mean over, from the weights that parts of a batch turned out to have."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_ga.batch.pytree import open_container
from lightning_ga.plan.weights import AttentionMaskTokens, TargetTokens

Kind = tuple[str, str]  # the place of values in a batch, and what they are

_OTHERS_IGNORED = (-1, 255, 0)
_NEAR = 1e-3
_EVEN = 0.1
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


def kinds_of(batch: Any, path: str = "") -> Counter[Kind]:
    """Count the values of a batch that losses may leave out or weigh otherwise, by their place and kind.

    These are missing numbers, False, and numbers that stand for padding or for "ignore"; in a tensor of one fraction a
    sample, those other than one, as weights may be. Nothing is said of large tensors.

    Examples:
        >>> kinds_of({"x": torch.tensor([[0.5, float("nan")]]), "y": torch.tensor([3, -100])})
        Counter({("['x']", 'nan'): 1, ("['y']", 'negative'): 1})
    """
    if isinstance(batch, torch.Tensor) and batch.layout is torch.strided and not batch.is_nested:
        if batch.numel() > (_FEW if batch.is_floating_point() else _MANY) or batch.is_complex():
            return Counter()
        counts = {name: int(found.sum()) for name, found in _marks(batch)}
        return Counter({(path, name): count for name, count in counts.items() if count})
    return sum((kinds_of(child, path + name) for name, child in open_container(batch) or ()), start=Counter())


def _marks(values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each kind of value, and where the values are of it."""
    if values.dtype == torch.bool:
        yield "False", ~values
    elif not values.is_floating_point():
        yield from (("0", values == 0), ("255", values == 255), ("negative", values < 0))
    else:
        yield from (("0", values == 0), ("-1", values == -1), ("nan", values.isnan()))
        if values.dim() and values.numel() == len(values):
            yield "other than 1", values != 1


def is_uneven(of_part: float, of_rest: float) -> bool:
    """Return whether two numbers of values a sample differ so much that parts with them differ in weight."""
    return abs(of_part - of_rest) > _EVEN * max(of_part, of_rest)


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
