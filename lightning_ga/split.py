"""Split a batch of any structure along the sample axis: one chunk at a time, tensors as views.

What a batch is and where its samples are is found in ``sample_axis``; here it is cut. A LightningModule
may define ``split_batch(self, batch, sizes)`` for what cannot be told from lengths, for example
graphs that torch_geometric has joined to one::

    def split_batch(self, batch, sizes):
        graphs = iter(batch.to_data_list())
        return [Batch.from_data_list(list(itertools.islice(graphs, size))) for size in sizes]
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_ga.errors import UserError
from lightning_ga.sample_axis import Layout, Role, batch_samples, read_layout
from lightning_ga.structures import find_splitter, is_plain_sequence, open_container, rebuild, register_splitter

__all__ = ["Layout", "SplitBatch", "batch_samples", "read_layout", "register_splitter", "split_batch"]

SplitBatch = Callable[[Any, Sequence[int]], Iterable[Any]]


def split_batch(
    batch: Any, sizes: Sequence[int], *, hook: SplitBatch | None = None, like: Layout | None = None
) -> Iterator[Any]:
    """Cut a batch into chunks of these sizes, in order, each when it is asked for.

    Structure and types are kept. Dense tensors and arrays are views of the batch, so a chunk costs
    no memory until it is moved; packed, sparse and nested tensors copy at most the chunk.

    Args:
        batch: Tensors in any structure.
        sizes: Samples of each chunk; a chunk of no samples is one of empty tensors.
        hook: What cuts instead: called with the batch and the sizes, it returns one chunk for each.
        like: The layout of an earlier batch of the same loader.

    Raises:
        UserError: If the sizes do not add up to the samples of the batch, if lengths do not tell where
            the samples are, or if the hook returns another number of chunks. All but the last at once.

    Examples:
        >>> batch = {"ids": torch.arange(5), "file": ["a", "b", "c", "d", "e"], "scale": 0.5}
        >>> [chunk["file"] for chunk in split_batch(batch, [3, 2])]
        [['a', 'b', 'c'], ['d', 'e']]
    """
    sizes = list(sizes)
    if any(size < 0 for size in sizes):
        raise UserError(f"{sizes=} must not be negative.")
    if hook is not None:
        return _checked(_called(hook, batch, sizes), sizes, counted=_counts(batch, sum(sizes)))
    layout = read_layout(batch, expected=sum(sizes), like=like)
    if sum(sizes) != layout.samples:
        raise UserError(f"{sizes=} add up to {sum(sizes)}, and the batch holds {layout.samples} samples.")
    ends = list(accumulate(sizes))
    return (_Cutter(layout.roles, end - size, end).cut("batch", batch) for size, end in zip(sizes, ends))


def _called(hook: Any, batch: Any, sizes: list[int]) -> Iterable[Any]:
    """What the hook returns, if it is one."""
    if not callable(hook):
        raise UserError(
            f"{hook=} must be a method, split_batch(self, batch, sizes), that returns one chunk for each size."
        )
    chunks = hook(batch, sizes)
    if not isinstance(chunks, Iterable):
        raise UserError(f"split_batch returned {chunks!r} for {sizes=}: it must return one chunk for each size.")
    return chunks


def _counts(batch: Any, samples: int) -> bool:
    """Whether a batch shows how many samples it holds, so that its chunks must too."""
    try:
        return read_layout(batch, expected=samples).samples == samples
    except UserError:
        return False


def _checked(chunks: Iterable[Any], sizes: list[int], *, counted: bool) -> Iterator[Any]:
    number = 0
    for number, chunk in enumerate(chunks, start=1):
        if number <= len(sizes):
            if counted and not _counts(chunk, sizes[number - 1]):
                raise UserError(
                    f"split_batch returned a chunk that does not hold {sizes[number - 1]} samples for {sizes=} "
                    f"(chunk {number}): each chunk holds as many samples as its size says."
                )
            yield chunk
    if number != len(sizes):
        raise UserError(f"split_batch returned {number} chunks for {sizes=}: it must return one for each size.")


class _Cutter:
    """Takes the samples ``start`` to ``stop - 1`` of a batch."""

    def __init__(self, roles: Mapping[str, Role], start: int, stop: int) -> None:
        self._roles = roles
        self._start, self._stop = start, stop
        self._edges: dict[tuple[str, torch.device], tuple[torch.Tensor, torch.Tensor | None]] = {}

    def cut(self, path: str, node: Any) -> Any:
        role = self._roles.get(path)
        if role == "samples":
            return self._take(node)
        children = None if role == "shared" else open_container(node)
        if children is None:
            return node
        return rebuild(node, [self.cut(path + name, child) for name, child in children])

    def _take(self, node: Any) -> Any:
        if (splitter := find_splitter(node)) is not None:
            return splitter.take(node, self._start, self._stop)
        if isinstance(node, PackedSequence):
            return _take_sequences(node, self._start, self._stop)
        if isinstance(node, torch.Tensor):
            return self._take_tensor(node)
        part = node[self._start : self._stop]
        return rebuild(node, part) if is_plain_sequence(node) else part

    def _take_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        length = self._stop - self._start
        if tensor.layout == torch.jagged:
            return self._take_jagged(tensor)
        if tensor.is_nested:
            return torch.nested.as_nested_tensor(list(tensor.unbind()[self._start : self._stop]))
        if tensor.layout != torch.strided:  # sparse tensors have no views along an axis
            part = torch.narrow_copy(tensor.to_sparse(layout=torch.sparse_coo), 0, self._start, length)
            return part if tensor.layout == torch.sparse_coo else part.to_sparse(layout=tensor.layout)
        part = tensor.narrow(0, self._start, length)
        if type(part) is not type(tensor) and not isinstance(tensor, torch.nn.Parameter):
            part = part.as_subclass(type(tensor))  # those of torchvision come out of a view as plain tensors
            vars(part).update(vars(tensor))
        return part

    def _take_jagged(self, tensor: Any) -> torch.Tensor:
        """A view of the values, with offsets that all tensors of one raggedness share: else they would not add."""
        axis = next(axis for axis, size in enumerate(tensor.shape) if not isinstance(size, int))
        raggedness = str(tensor.shape[axis]), tensor.device
        first, last = (int(tensor.offsets()[edge]) for edge in (self._start, self._stop))
        if raggedness not in self._edges:
            lengths = None if tensor.lengths() is None else tensor.lengths()[self._start : self._stop]
            self._edges[raggedness] = tensor.offsets()[self._start : self._stop + 1] - first, lengths
        values = tensor.values().narrow(axis - 1, first, last - first)
        offsets, lengths = self._edges[raggedness]
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=axis)


def _take_sequences(packed: PackedSequence, start: int, stop: int) -> PackedSequence:
    """Whole sequences of a packed batch, counted in the order in which the user packed them.

    A packed batch holds step after step, in each the sequences that are that long, the longest first.
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
