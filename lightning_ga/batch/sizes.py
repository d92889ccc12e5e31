"""Measure samples and batches of any structure."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch

from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.pytree import extents, is_constant, open_container

Field = tuple[Any, ...]
_POSITIONS = 8  # further items of a sequence count as one field


def elements(sample: Any) -> int:
    """Count the elements of all tensors, arrays, images, sequences and text in a sample of any structure.

    Examples:
        >>> elements({"image": torch.zeros(3, 4), "label": 1})
        13
    """
    return sum(prod(shape) for _, shape in leaves(sample))


def leaves(
    sample: Any, *, text: bool = True, field: Field = (), inside: tuple[int, ...] = ()
) -> Iterator[tuple[Field, tuple[int, ...]]]:
    """Yield every field of a sample and its shape; names begin with ``field``, objects ``inside`` are left out.

    Examples:
        >>> list(leaves({"image": torch.zeros(3, 4), "ids": [5, 7, 9]}))
        [(('image',), (3, 4)), (('ids',), (3,))]
    """
    shape = _shape(sample, text)
    if shape is not None:
        yield field, shape
    elif id(sample) not in inside:  # an object may contain itself
        for name, value in _items(sample):
            yield from leaves(value, text=text, field=(*field, name), inside=(*inside, id(sample)))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return ((min(position, _POSITIONS), item) for position, item in enumerate(value))
    return value.items() if isinstance(value, Mapping) else vars(value).items()


def _shape(value: Any, text: bool) -> tuple[int, ...] | None:
    """Return the shape of a leaf; ``None`` for a container."""
    if isinstance(value, torch.Tensor):
        sparse = "sparse" in str(value.layout)
        return (value._nnz() if sparse else value.numel(),) if sparse or value.is_nested else tuple(value.shape)
    if isinstance(value, (str, bytes)):
        return (len(value),) if text else ()
    for name in ("shape", "size"):  # of an array; of a picture
        found = getattr(value, name, None)
        if isinstance(found, tuple) and all(isinstance(extent, int) for extent in found):
            return found
    numbers = isinstance(value, (list, tuple)) and value and all(isinstance(item, (int, float)) for item in value)
    if numbers or isinstance(value, (set, frozenset)):
        return (len(value),)
    return None if isinstance(value, (Mapping, list, tuple)) or hasattr(value, "__dict__") else ()


def length_of_first(batch: Any) -> int:
    """Return the length of a batch's first tensor, for the sizes that ``split_batch`` is called with."""
    pending, seen = [batch], set[int]()
    while pending:
        node = pending.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(getattr(node, "num_graphs", None), int):
            return int(node.num_graphs)
        shape = extents(node)
        if shape is not None and not isinstance(node, (list, tuple)):
            return shape[0]
        children = open_container(node)
        pending[:0] = getattr(node, "__dict__", {}).values() if children is None else [child for _, child in children]
    if isinstance(batch, (list, tuple)):
        return len(batch)
    name = type(batch).__name__
    raise LayoutError(
        f"How many samples a {name} holds is not known, so split_batch cannot be told their sizes: call "
        f"lightning_ga.split.register_splitter({name}, count=…, take=…) as well."
    )


def largest_extent(batch: Any) -> int:
    """Return the largest extent of any part of a batch; unbounded if it holds an unknown type.

    Examples:
        >>> largest_extent({"x": torch.zeros(8, 3), "names": ["a", "b"]})
        8
    """
    if is_constant(batch):
        return 1
    shape, children = extents(batch), open_container(batch)
    if shape is None and children is None:
        graphs = getattr(batch, "num_graphs", None)
        return graphs if isinstance(graphs, int) else sys.maxsize
    return max([*(shape or ()), *(largest_extent(child) for _, child in children or ())], default=1)
