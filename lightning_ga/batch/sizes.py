"""Measure a sample: the shape of every field, in any structure."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

Field = tuple[Any, ...]
_POSITIONS = 8  # further items of a sequence count as one field


def elements(sample: Any) -> int:
    """Count the elements of all tensors, arrays, images, sequences and text in a sample of any structure.

    Examples:
        >>> elements({"image": torch.zeros(3, 4), "label": 1})
        13
    """
    return sum(prod(shape) for _, shape in leaves(sample))


def leaves(sample: Any, *, text: bool = True) -> Iterator[tuple[Field, tuple[int, ...]]]:
    """Yield every field of a sample and its shape.

    Examples:
        >>> list(leaves({"image": torch.zeros(3, 4), "ids": [5, 7, 9]}))
        [(('image',), (3, 4)), (('ids',), (3,))]
    """
    return _leaves(sample, (), (), text)


def _leaves(value: Any, field: Field, inside: tuple[int, ...], text: bool) -> Iterator[tuple[Field, tuple[int, ...]]]:
    shape = _shape(value, text)
    if shape is not None:
        yield field, shape
    elif id(value) not in inside:  # an object may contain itself
        for name, inner in _items(value):
            yield from _leaves(inner, (*field, name), (*inside, id(value)), text)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield min(position, _POSITIONS), item
    else:
        yield from vars(value).items()


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
    if isinstance(value, (set, frozenset)) or (isinstance(value, (list, tuple)) and _are_numbers(value)):
        return (len(value),)
    return None if isinstance(value, (Mapping, list, tuple)) or hasattr(value, "__dict__") else ()


def _are_numbers(value: Sequence[Any]) -> bool:
    return len(value) > 0 and all(isinstance(item, (int, float)) for item in value)
