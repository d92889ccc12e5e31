"""Cut a batch of any structure into slices of its samples: one at a time, tensors as views.

A LightningModule may define ``split_batch(self, batch, sizes)`` for batches whose layout cannot be read, for example
nodes of several graphs that its own code has joined::

    def split_batch(self, batch, sizes):
        graphs = iter(batch.graphs())
        return [join(itertools.islice(graphs, size)) for size in sizes]
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from lightning_ga.batch.layout import Layout, LayoutError, SampleAxis, SampleCount, Slice
from lightning_ga.batch.pytree import Edges, is_plain_sequence, open_container, rebuild, take
from lightning_ga.errors import UserError

SplitBatch = Callable[[Any, Sequence[int]], Iterable[Any]]


def split_batch(batch: Any, sizes: Sequence[int], *, layout: Layout) -> Iterator[Any]:
    """Cut a batch into slices of these sizes, in order, each when it is asked for.

    Structure and types are kept. Dense tensors and arrays are views of the batch, so a slice costs
    no memory until it is moved; packed, sparse and nested tensors copy at most the slice.

    Args:
        batch: Tensors in any structure.
        sizes: Samples of each slice; one of no samples holds empty tensors.
        layout: Where its samples lie.

    Raises:
        UserError: At once, if the sizes do not add up to the samples of the batch, or it does not have this layout.

    Examples:
        >>> layout = Layout({"batch": "fields", "batch['ids']": SampleAxis(0), "batch['scale']": "constant"})
        >>> batch = {"ids": torch.arange(5), "scale": 0.5}
        >>> [part["ids"].tolist() for part in split_batch(batch, [3, 2], layout=layout)]
        [[0, 1, 2], [3, 4]]
    """
    if any(size < 0 for size in sizes):
        raise UserError(f"sizes={list(sizes)} must not be negative.")
    whole = layout.whole(batch)
    if sum(sizes) != whole.stop:
        raise UserError(f"sizes={list(sizes)} add up to {sum(sizes)}, and the batch holds {whole.stop} samples.")
    ends = accumulate(sizes)
    slices = [Slice(end - size, end, whole.sizes) for size, end in zip(sizes, ends)]
    return (cut(batch, layout, part) for part in slices)


def cut(batch: Any, layout: Layout, part: Slice) -> Any:
    """Cut one slice out of a batch whose samples lie as the layout says."""
    edges: Edges = {}
    return _rebuilt("batch", batch, layout, part, lambda _, node, role: take(node, role.axis, *part.rows(role), edges))


def gather(batch: Any, layout: Layout, count: int) -> Any:
    """Return a batch of ``count`` samples of another, repeated in turn, in memory of its own where that is possible."""
    whole = layout.whole(batch)
    if not whole.stop:
        raise LayoutError("The batch holds no samples to make another of.")
    rounds, left = divmod(count, whole.stop)
    rest, edges = Slice(0, left, whole.sizes), Edges()

    def repeat(path: str, node: Any, role: SampleAxis) -> Any:
        taken = [take(node, role.axis, *rest.rows(role), edges)] if left else []
        return _concatenated(path, [node] * rounds + taken, role.axis)

    return _rebuilt("batch", batch, layout, Slice(0, count, whole.sizes), repeat)


def _rebuilt(path: str, node: Any, layout: Layout, part: Slice, change: Callable[[str, Any, SampleAxis], Any]) -> Any:
    """Return a batch whose parts with entries for each sample are changed, and whose counts are those of a slice."""
    role = layout.roles.get(path)
    if node is None:
        return None
    if isinstance(role, SampleAxis):
        return change(path, node, role)
    if isinstance(role, SampleCount):
        start, stop = part.rows(role)
        counted = stop - start
        return node.new_tensor(counted) if isinstance(node, torch.Tensor) else type(node)(counted)
    children = open_container(node) if role == "fields" else None
    if children is None:
        return node
    return rebuild(node, [_rebuilt(path + name, child, layout, part, change) for name, child in children])


def _concatenated(path: str, nodes: list[Any], axis: int) -> Any:
    first = nodes[0]
    if isinstance(first, torch.Tensor) and first.layout == torch.strided and not first.is_nested:
        return torch.cat(nodes, dim=axis)
    if isinstance(first, np.ndarray):
        return np.concatenate(nodes, axis=axis)
    if is_plain_sequence(first):
        return rebuild(first, [thing for node in nodes for thing in node])
    if len(nodes) == 1:
        return first
    raise LayoutError(f"{path} is of the type {type(first).__name__}, which cannot be made longer than it is.")


def split_by_hook(
    hook: Any, batch: Any, sizes: Sequence[int], *, count: Callable[[Any], int] | None = None
) -> Iterator[Any]:
    """Cut a batch by a module's own ``split_batch``; ``count`` returns the samples of a slice if they can be read."""
    if not callable(hook):
        raise UserError(
            f"{hook=} must be a method, split_batch(self, batch, sizes), that returns one chunk for each size."
        )
    parts = hook(batch, list(sizes))
    if not isinstance(parts, Iterable):
        raise UserError(f"split_batch returned {parts!r} for {sizes=}: it must return one chunk for each size.")
    return _checked(parts, list(sizes), count)


def _checked(parts: Iterable[Any], sizes: list[int], count: Callable[[Any], int] | None) -> Iterator[Any]:
    number = 0
    for number, part in enumerate(parts, start=1):
        if number <= len(sizes):
            size = sizes[number - 1]
            if count is not None and _counted(count, part) not in (None, size):
                raise UserError(
                    f"split_batch returned a chunk that does not hold {size} samples for {sizes=} "
                    f"(chunk {number}): each chunk holds as many samples as its size says."
                )
            yield part
    if number != len(sizes):
        raise UserError(f"split_batch returned {number} chunks for {sizes=}: it must return one for each size.")


def _counted(count: Callable[[Any], int], part: Any) -> int | None:
    try:
        return count(part)
    except LayoutError:
        return None
