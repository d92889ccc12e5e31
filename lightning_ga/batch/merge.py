"""Merge the outputs of a step, of training or evaluation, for the pieces of a batch into that for the whole batch."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_ga.batch.pytree import extents, is_constant, is_plain_sequence, open_container, rebuild, same_values
from lightning_ga.errors import UserError


@dataclass(frozen=True, slots=True)
class _Part:
    """The value of one piece, the samples of the piece, and its weight in a mean."""

    value: Any
    size: int
    weight: float
    averages: bool = True  # whether tensors and arrays may be means


def merge_outputs(
    outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float] | None = None, *, averages: bool = True
) -> Any:
    """Merge the outputs of the pieces of a batch into one; as in Lightning, nothing keeps its graph.

    - A tensor alone and ``output["loss"]`` are losses: the mean by weight.
    - Tensors and arrays whose first axis is as long as their piece are concatenated in order, lists too.
    - Other numbers and tensors of one shape: equal ones stay, others are averaged by weight, whole
      numbers giving floats. A number that counts the piece's samples becomes their sum. Tensors with another axis as
      long as their piece are no means, and without ``averages`` (predictions) none of several elements is.
    - Containers of fields are merged field by field. ``None`` in some pieces is skipped.
    - Anything else: the value if it is equal in all pieces, otherwise the list of the values.

    ``sizes`` are the samples of each piece, and by default its weight in means. Pieces of no samples are skipped, and
    means skip pieces of no weight, unless none has any.

    Examples:
        >>> parts = [
        ...     {"loss": torch.tensor(1.0), "logits": torch.zeros(3, 10)},
        ...     {"loss": torch.tensor(5.0), "logits": torch.ones(1, 10)},
        ... ]
        >>> whole = merge_outputs(parts, sizes=[3, 1])
        >>> whole["loss"], whole["logits"].shape
        (tensor(2.), torch.Size([4, 10]))
    """
    weights = sizes if weights is None else weights
    if not len(outputs) == len(sizes) == len(weights) or not outputs:
        counts = f"{len(outputs)} outputs, {len(sizes)} sizes and {len(weights)} weights"
        raise UserError(f"{counts}: each of at least one output needs a size and a weight.")
    parts = [_Part(*part, averages) for part in zip(outputs, sizes, weights)]
    parts = [part for part in parts if part.size] or parts[:1]
    return _merge(parts, is_loss=True, losses=("['loss']",))


def in_order(whole: Any, part: tuple[Any, int, float], order: Sequence[int]) -> Any:
    """Bring what was merged by sample into the order of the batch; ``part`` are output, size and weight of one piece.

    Examples:
        >>> in_order({"ids": torch.tensor([5, 7, 6])}, ({"ids": torch.tensor([5])}, 1, 1.0), [0, 2, 1])
        {'ids': tensor([5, 6, 7])}
    """
    value, size, _ = part
    shape, shape_of_part = extents(whole), extents(value)
    if shape and shape_of_part and (shape[0], shape_of_part[0]) == (len(order), size) and type(whole) is type(value):
        places = sorted(range(len(order)), key=order.__getitem__)
        return rebuild(whole, [whole[place] for place in places]) if is_plain_sequence(whole) else whole[places]
    children, of_part = open_container(whole), dict(open_container(value) or ())
    if children is None or type(whole) is not type(value):
        return whole
    return rebuild(whole, [in_order(child, (of_part.get(name), size, 1.0), order) for name, child in children])


def _merge(parts: list[_Part], *, is_loss: bool = False, losses: tuple[str, ...] = ()) -> Any:
    """Merge values of any kind. A loss is a tensor of one element; ``losses`` names the fields that may hold one."""
    parts = [part for part in parts if part.value is not None]
    values = [part.value for part in parts]
    if not values:
        return None
    first = values[0]
    if is_loss and all(isinstance(x, torch.Tensor) and not x.is_nested and x.numel() == 1 for x in values):
        return _average(parts)
    if all(isinstance(value, PackedSequence) for value in values):
        sequences = [sequence.detach() for value in values for sequence in unpack_sequence(value)]
        return pack_sequence(sequences, enforce_sorted=all(value.sorted_indices is None for value in values))
    if all(isinstance(value, torch.Tensor) for value in values):
        return _merge_tensors(parts)
    if all(isinstance(value, np.ndarray) for value in values):
        return _merge_arrays(parts)
    if all(isinstance(value, Number) for value in values):
        return _merge_numbers(parts)
    if any(type(value) is not type(first) for value in values) or open_container(first) is None:
        return _same(values)
    return _merge_lists(parts) if is_plain_sequence(first) else _merge_fields(parts, losses)


def _merge_fields(parts: list[_Part], losses: tuple[str, ...] = ()) -> Any:
    """Merge containers field by field; keys of a mapping may be missing in some."""
    whole = parts[0].value
    if isinstance(whole, dict):
        whole = copy.copy(whole)
        for part in parts:
            whole.update({key: value for key, value in part.value.items() if key not in whole})
    fields: dict[str, list[_Part]] = {name: [] for name, _ in open_container(whole) or ()}
    for part in parts:
        for name, value in open_container(part.value) or ():
            if name not in fields:
                return _same([part.value for part in parts])
            fields[name].append(replace(part, value=value))
    return rebuild(whole, [_merge(parts, is_loss=name in losses) for name, parts in fields.items()])


def _merge_lists(parts: list[_Part]) -> Any:
    """Join lists with one entry for each sample, or of unequal lengths; merge lists of fields field by field."""
    first = parts[0].value
    lengths = [len(part.value) for part in parts]
    samples = lengths == [part.size for part in parts] and not _are_fields(parts)
    if not samples and len(set(lengths)) == 1:
        return _merge_fields(parts)
    return rebuild(first, [_detached(thing) for part in parts for thing in part.value])


def _are_fields(parts: list[_Part]) -> bool:
    """Return whether lists as long as their pieces hold fields all the same, such as two outputs for two samples."""
    if len({part.size for part in parts}) > 1:
        return False
    return any(not _are_alike(part.value) or all(_length(x) == part.size for x in part.value) for part in parts)


def _are_alike(things: Sequence[Any]) -> bool:
    """Return whether things are of one kind, as samples are; ``None`` may stand for any."""
    things = [thing for thing in things if thing is not None]
    if all(isinstance(thing, Mapping) for thing in things) and any(things):
        return bool(set.intersection(*map(set, things)))  # (inputs, targets) have no key in common
    return len(set(map(_kind, things))) <= 1


def _kind(thing: Any) -> Any:
    if is_constant(thing):
        return "constant"
    dtype = thing.dtype if isinstance(thing, torch.Tensor) else None
    return type(thing), dtype, len(extents(thing) or ())


def _length(thing: Any) -> int | None:
    """Return the length of the first axis of a tensor or an array."""
    lengths = None if is_plain_sequence(thing) else extents(thing)
    return None if lengths is None else lengths[0]


def _merge_tensors(parts: list[_Part]) -> Any:
    tensors = [part.value.detach() for part in parts]
    if any(tensor.is_nested for tensor in tensors):
        rows = [row for tensor in tensors for row in tensor.unbind()]
        return torch.nested.as_nested_tensor(rows, layout=tensors[0].layout)
    if _is_by_sample(parts):
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if all(part.value is parts[0].value for part in parts):
        return tensors[0]
    if any(tensor.shape != tensors[0].shape for tensor in tensors) or _may_be_by_sample(parts):
        return _same(tensors)
    return _average(parts)


def _is_by_sample(parts: list[_Part]) -> bool:
    shapes = [part.value.shape for part in parts]
    leading = all(shape and shape[0] == part.size for shape, part in zip(shapes, parts))
    return leading and len({tuple(shape[1:]) for shape in shapes}) == 1


def _may_be_by_sample(parts: list[_Part]) -> bool:
    """Return whether several entries for each sample cannot be distinguished from entries for something else."""
    first = parts[0]
    shape = first.value.shape
    if not first.averages and math.prod(shape) > 1:
        return True
    along = bool(shape) and (shape[0] % max(first.size, 1) == 0 or first.size in shape[1:])
    return along and len({part.size for part in parts}) == 1


def _average(parts: list[_Part]) -> Any:
    """Average tensors of one shape by weight; whole numbers that are equal stay."""
    tensors = [part.value.detach() for part in parts]
    first = tensors[0]
    if not (first.is_floating_point() or first.is_complex()):
        if _all_equal(tensors):
            return first
        if first.dtype == torch.bool:
            return tensors
    return weighted_mean(tensors, [part.weight for part in parts])


def weighted_mean(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Average tensors of one shape in at least single precision; those of no weight are means over nothing, left out.

    Examples:
        >>> weighted_mean([torch.tensor(1), torch.tensor(4), torch.tensor(float("nan"))], [2, 1, 0])
        tensor(2.)
    """
    first, total = tensors[0], sum(weights)
    dtype = first.dtype if first.is_floating_point() or first.is_complex() else torch.get_default_dtype()
    if len(tensors) == 1 or not total:
        return tensors[-1].to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    weighted = [(tensor.to(wide), weight / total) for tensor, weight in zip(tensors, weights) if weight]
    values, shares = map(list, zip(*weighted))
    if first.numel() > 1:  # large ones are not held twice
        return sum((tensor * share for tensor, share in weighted[1:]), start=values[0] * shares[0]).to(dtype)
    if len(set(shares)) == 1:
        return torch.stack(values).mean(0).to(dtype)
    return torch.stack(torch._foreach_mul(values, shares)).sum(0).to(dtype)


def _merge_arrays(parts: list[_Part]) -> Any:
    values = [part.value for part in parts]
    if _is_by_sample(parts):
        return np.concatenate(values)
    alike = values[0].dtype.kind in "fiuc" and all(value.shape == values[0].shape for value in values)
    if not alike or _may_be_by_sample(parts) or not any(part.weight for part in parts) or _all_equal(values):
        return _same(values)
    return np.average(values, axis=0, weights=[part.weight for part in parts])


def _merge_numbers(parts: list[_Part]) -> Any:
    values: list[Any] = [part.value for part in parts]
    if any(isinstance(value, bool) for value in values):
        return _same(values)
    sizes = [part.size for part in parts]
    # In pieces of one sample each, any number may happen to be one.
    if values == sizes and max(sizes) > 1:
        return sum(sizes)
    if _all_equal(values):
        return values[0]
    weighted = [part for part in parts if part.weight]  # the others are means over nothing
    total = sum(part.weight for part in weighted)
    return sum(part.value * part.weight for part in weighted) / total if weighted else values[-1]


def _same(values: list[Any]) -> Any:
    """Return the value if all are equal, otherwise the list of all."""
    return _detached(values[0]) if _all_equal(values) else [_detached(value) for value in values]


def _all_equal(values: list[Any]) -> bool:
    return all(same_values(value, values[0]) for value in values[1:])


def _detached(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return node.detach()
    if isinstance(node, PackedSequence):
        return node._replace(data=node.data.detach())
    children = open_container(node)
    return node if children is None else rebuild(node, [_detached(child) for _, child in children])
