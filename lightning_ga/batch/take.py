"""Take neighbouring samples out of one value, along its sample axis: as a view where possible."""

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_ga.batch.pytree import find_splitter, is_plain_sequence, rebuild

Edges = dict[tuple[str, torch.device], tuple[torch.Tensor, torch.Tensor | None]]


def take(node: Any, axis: int, start: int, stop: int, edges: Edges | None = None) -> Any:
    """Return the entries ``start`` to ``stop - 1`` of a value.

    Dense tensors and arrays come as views; packed, sparse and nested tensors copy at most what is taken.

    Args:
        node: A tensor, an array, a list, a packed sequence, or a value of a registered type.
        axis: The axis of the entries; 0 for all but tensors and arrays.
        start: The first.
        stop: One after the last.
        edges: Offsets of jagged tensors taken before: tensors of one raggedness must share them to be added.

    Examples:
        >>> take(torch.arange(6).reshape(2, 3), 1, 0, 2)
        tensor([[0, 1],
                [3, 4]])
    """
    if (splitter := find_splitter(node)) is not None:
        return splitter.take(node, start, stop)
    if isinstance(node, PackedSequence):
        return _take_sequences(node, start, stop)
    if isinstance(node, torch.Tensor):
        return _take_tensor(node, axis, start, stop, {} if edges is None else edges)
    if is_plain_sequence(node):
        return rebuild(node, node[start:stop])
    rows = getattr(node, "iloc", node)  # data frames are indexed by label otherwise
    return rows[(*(slice(None),) * axis, slice(start, stop))]


def _take_tensor(tensor: torch.Tensor, axis: int, start: int, stop: int, edges: Edges) -> torch.Tensor:
    if tensor.layout == torch.jagged:
        return _take_jagged(tensor, start, stop, edges)
    if tensor.is_nested:
        return torch.nested.as_nested_tensor(list(tensor.unbind()[start:stop]))
    if tensor.layout != torch.strided:  # sparse tensors have no views along an axis
        part = torch.narrow_copy(tensor.to_sparse(layout=torch.sparse_coo), axis, start, stop - start)
        return part if tensor.layout == torch.sparse_coo else part.to_sparse(layout=tensor.layout)
    part = tensor.narrow(axis, start, stop - start)
    if type(part) is not type(tensor) and not isinstance(tensor, torch.nn.Parameter):
        part = part.as_subclass(type(tensor))  # views of torchvision's tensors are plain tensors
        vars(part).update(vars(tensor))
    return part


def _take_jagged(tensor: Any, start: int, stop: int, edges: Edges) -> torch.Tensor:
    axis = next(axis for axis, size in enumerate(tensor.shape) if not isinstance(size, int))
    raggedness = str(tensor.shape[axis]), tensor.device
    first, last = (int(tensor.offsets()[edge]) for edge in (start, stop))
    if raggedness not in edges:
        lengths = None if tensor.lengths() is None else tensor.lengths()[start:stop]
        edges[raggedness] = tensor.offsets()[start : stop + 1] - first, lengths
    values = tensor.values().narrow(axis - 1, first, last - first)
    offsets, lengths = edges[raggedness]
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=axis)


def _take_sequences(packed: PackedSequence, start: int, stop: int) -> PackedSequence:
    """Take whole sequences of a packed batch, counted in the order in which the user packed them.

    A packed batch holds one step after another, each with the sequences that are that long, the longest first.
    """
    batch_sizes, unsorted = packed.batch_sizes, packed.unsorted_indices
    wanted = torch.arange(start, stop) if unsorted is None else unsorted[start:stop].cpu()
    places, order = wanted.sort()  # longest first, as they are
    there = places < batch_sizes[:, None]
    rows = (batch_sizes.cumsum(0) - batch_sizes)[:, None] + places
    sizes = there.sum(1)
    data = packed.data[rows[there].to(packed.data.device)]
    if unsorted is None:
        return PackedSequence(data, sizes[sizes > 0])
    indices = order.to(unsorted.device)
    return PackedSequence(data, sizes[sizes > 0], indices, indices.argsort())
