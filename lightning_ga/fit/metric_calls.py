"""Calls of a metric by the pieces of a batch, made again with what all pieces gave it."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import MaxMetric, MeanMetric, Metric, MinMetric, SumMetric

from lightning_ga.batch.merge import mean_of_numbers
from lightning_ga.batch.pytree import same_values
from lightning_ga.errors import ExactnessWarning
from lightning_ga.fit.piece_buffer import Noted, PieceBuffer
from lightning_ga.snapshot.attributes import AttributeSnapshot
from lightning_ga.snapshot.copies import SMALL

_METHODS = ("forward", "update", "compute", "reset")
_EXTENSIVE: dict[type[Metric], Callable[[Tensor], Tensor]] = {
    SumMetric: torch.sum,
    MaxMetric: torch.amax,
    MinMetric: torch.amin,
}
_Given = Noted[Any]  # what one piece gave


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method of a metric; its arguments hold no graph."""

    metric: Metric
    method: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    versions: list[int] | None  # of the tensors among the arguments; ``None`` if these are too large to be kept

    @property
    def is_overwritten(self) -> bool:
        """Whether an argument, of which there is no copy, was written to since."""
        return versions_of(self.arguments, self.named) != self.versions


class CallsOf:
    """Notes the calls of a metric while a batch runs in pieces; what the metric does in them is undone at the end.

    Args:
        metric: The metric.
        calls: Where they are noted.
    """

    def __init__(self, metric: Metric, calls: PieceBuffer[Call]) -> None:
        self._metric, self._calls = metric, calls
        self._before = AttributeSnapshot(metric)
        self._is_within = False  # whether a method runs, which may call others
        self._shadowed = {name: vars(metric)[name] for name in _METHODS if name in vars(metric)}
        vars(metric).update({name: partial(self._call, name, getattr(metric, name)) for name in _METHODS})

    def close(self) -> None:
        """Call the metric for the whole batch."""
        own = [group for group in self._calls.alike(_kind) if group[0].entry.metric is self._metric]
        if not own or self._calls.pieces == 1 or any(map(_has_weights, own)) or _is_by_sample(own, self._calls.pieces):
            return
        noted = [part.entry for group in own for part in group]
        if any(call.versions is None for call in noted):
            self._warn("is too large to be kept")
            return
        if any(call.is_overwritten for call in noted):
            self._warn("was written to")
            return
        merge = partial(_merged, reduce=_reduction(self._metric))
        try:
            merged = [(group[0].entry.method, *merge(_arguments(group))) for group in own]
        except ValueError:
            self._warn("cannot be put together")
            return
        self._before.restore()
        for method, arguments, named in merged:
            getattr(self._metric, method)(*arguments, **named)

    def _warn(self, why: str) -> None:
        name = type(self._metric).__name__
        warnings.warn(
            f"What pieces of a batch gave to {name} {why}: it has seen pieces.", ExactnessWarning, stacklevel=3
        )

    def release(self) -> None:
        """Restore the metric's own methods."""
        for name in _METHODS:
            vars(self._metric).pop(name, None)
        vars(self._metric).update(self._shadowed)

    def _call(self, name: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Let a piece call a method."""
        if self._is_within:
            return method(*arguments, **named)
        given, by_name = apply_to_collection((arguments, named), Tensor, Tensor.detach)
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(given, by_name)) <= SMALL:
            call = Call(self._metric, name, given, by_name, versions_of(given, by_name))
        else:
            call = Call(self._metric, name, (), {}, None)
        self._calls.add(call)
        self._is_within = True
        try:
            return method(*arguments, **named)
        finally:
            self._is_within = False


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors in values of any structure."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def versions_of(*values: Any) -> list[int]:
    """Return how often the tensors in values were written to; those of inference mode do not tell."""
    return [tensor._version for tensor in tensors_in(*values) if not tensor.is_inference()]


def _is_by_sample(own: Sequence[Sequence[Noted[Call]]], pieces: int) -> bool:
    """Return whether samples have calls of their own, or pieces unequal numbers of them: they are not to be merged."""
    updates = [group for group in own if group[0].entry.method in ("forward", "update")]
    if any(len(group) != pieces for group in updates):
        return True
    return len(updates) > 1 and all(part.samples == len(updates) for part in updates[0])


def _kind(call: Call) -> tuple[int, str]:
    return id(call.metric), call.method


def _has_weights(group: Sequence[Noted[Call]]) -> bool:
    """Return whether calls of a mean say what each of them weighs: pieces add up to the batch then."""
    return any(
        len(c.entry.arguments) + len(c.entry.named) > 1 and isinstance(c.entry.metric, MeanMetric) for c in group
    )


def _reduction(metric: Metric) -> Callable[[Tensor], Tensor] | None:
    """Return how a metric reduces numbers, if that is not a mean."""
    kinds = {type(part) for part in metric.modules()}
    return next((reduce for kind, reduce in _EXTENSIVE.items() if kind in kinds), None)


def _arguments(group: Sequence[Noted[Call]]) -> list[_Given]:
    return [Noted((call.entry.arguments, call.entry.named), call.weight, call.samples) for call in group]


def _merged(given: Sequence[_Given], reduce: Callable[[Tensor], Tensor] | None) -> Any:
    """Put together what pieces gave: rows are joined, numbers averaged by weight, or reduced.

    Raises:
        ValueError: If that cannot be done.
    """
    values = [part.entry for part in given]
    first = values[0]
    if all(isinstance(value, (tuple, dict)) and len(value) == len(first) for value in values):
        names = first if isinstance(first, dict) else range(len(first))
        within = {name: [Noted(_of(v.entry, name), v.weight, v.samples) for v in given] for name in names}
        merged = {name: _merged(parts, reduce) for name, parts in within.items()}
        return merged if isinstance(first, dict) else tuple(merged.values())
    if all(map(_is_number, values)) or _is_one_number(given):
        return _number(given, reduce)
    if all(isinstance(value, Tensor) and value.dim() for value in values):
        return _joined(torch.cat, values)
    if all(isinstance(value, np.ndarray) and value.ndim for value in values):
        return _joined(np.concatenate, values)
    if all(isinstance(value, list) for value in values):
        return [thing for value in values for thing in value]
    if all(same_values(value, first) for value in values):
        return first
    raise ValueError(f"{type(first).__name__} cannot be put together")


def _of(container: Any, name: Any) -> Any:
    try:
        return container[name]
    except LookupError:
        raise ValueError(f"{name} is not in all pieces") from None


def _joined(join: Callable[[Any], Any], values: Sequence[Any]) -> Any:
    if len({tuple(value.shape[1:]) for value in values}) > 1:
        raise ValueError("rows are of different shapes")
    return join(values)


def _is_number(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and not value.dim()
    return is_tensor or (isinstance(value, (int, float, np.number)) and not isinstance(value, bool))


def _is_one_number(given: Sequence[_Given]) -> bool:
    """Return whether each piece of several samples gave a vector of one number."""
    return all(isinstance(part.entry, Tensor) and part.entry.numel() == 1 < part.samples for part in given)


def _number(given: Sequence[_Given], reduce: Callable[[Tensor], Tensor] | None) -> Any:
    first = given[0].entry
    # To compare tensors would wait for the device.
    if reduce is None and all(not isinstance(part.entry, Tensor) and part.entry == first for part in given):
        return first
    values = [torch.as_tensor(part.entry) for part in given]
    if reduce is not None:
        return reduce(torch.stack(values))
    return mean_of_numbers(values, [part.weight for part in given])
