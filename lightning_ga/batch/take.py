"""Take neighbouring samples out of one value: a tensor of any layout, an array, a list, a registered type."""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_ga.batch.pytree import REMEDY, LayoutError, find_splitter, is_constant, is_plain_sequence, rebuild

_OFFSETS = WeakValueDictionary[Any, torch.Tensor]()  # of parts of jagged tensors


def take(node: Any, axis: int, start: int, stop: int) -> Any:
    """Return the entries ``start`` to ``stop - 1`` of a value; the axis is 0 for all but tensors and arrays.

    Dense tensors and arrays come as views; sparse and nested tensors copy what is taken, and packed ones are padded for
    a moment.
    """
    splitter = find_splitter(node)
    if splitter is not None:
        return splitter.take(node, start, stop)
    if isinstance(node, PackedSequence):
        return pack_sequence(unpack_sequence(node)[start:stop], enforce_sorted=node.sorted_indices is None)
    if isinstance(node, torch.Tensor):
        return _take_tensor(node, axis, start, stop)
    if is_plain_sequence(node):
        return rebuild(node, node[start:stop])
    # Data frames are indexed by label otherwise.
    return getattr(node, "iloc", node)[_place(axis, start, stop)]


def _place(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(start, stop))


def _take_tensor(tensor: torch.Tensor, axis: int, start: int, stop: int) -> torch.Tensor:
    if tensor.layout is torch.jagged and tensor.lengths() is None:  # type: ignore[attr-defined]  # of nested tensors
        return _take_jagged(tensor, start, stop)
    if tensor.is_nested:
        return torch.nested.as_nested_tensor(list(tensor.unbind()[start:stop]), layout=tensor.layout)
    if tensor.layout != torch.strided:  # sparse tensors have no views along an axis
        part = torch.narrow_copy(tensor.to_sparse(layout=torch.sparse_coo), axis, start, stop - start)
        return part.to_sparse(layout=tensor.layout)
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.narrow(axis, start, stop - start)
    return _take_by_indexing(tensor, axis, start, stop)


def _take_by_indexing(tensor: torch.Tensor, axis: int, start: int, stop: int) -> torch.Tensor:
    """Take from a tensor of a class of its own, which may have attributes."""
    part = tensor[_place(axis, start, stop)]
    if type(part) is not type(tensor):
        part = part.as_subclass(type(tensor))  # views of torchvision's tensors are plain tensors
    for name in vars(tensor).keys() - vars(part).keys():
        value = vars(tensor)[name]
        # An image size or a format is that of any samples; what else a slice lacks may be by sample.
        if not is_constant(value) and not (isinstance(value, tuple) and all(map(is_constant, value))):
            raise LayoutError(
                f"Slices of a {type(tensor).__name__} lack its attribute {name!r}, so the batch cannot be cut: let its "
                f"__getitem__ cut that, too, or {REMEDY}."
            )
        setattr(part, name, value)
    return part


def _take_jagged(tensor: Any, start: int, stop: int) -> torch.Tensor:
    """Return samples of a jagged tensor as a view; parts of tensors that share their offsets share theirs, too.

    Otherwise torch would refuse to compute with both.
    """
    axis = tensor._ragged_idx
    offsets = tensor.offsets()
    # The ragged size is a symbol, the same for tensors with the same offsets, also after a move.
    key = (tensor.shape[axis], start, stop, offsets.device)
    part = _OFFSETS.get(key)
    if part is None:
        part = offsets[start : stop + 1] - offsets[start]
        _OFFSETS[key] = part
    first, end = offsets[[start, stop]].tolist()
    values = torch.narrow(tensor.values(), axis - 1, first, end - first)
    return torch.nested.nested_tensor_from_jagged(values, offsets=part, jagged_dim=axis)
