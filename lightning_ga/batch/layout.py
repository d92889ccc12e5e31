"""Where the samples of a batch lie, by the part of the batch, how many there are, and how large."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Literal

import torch

from lightning_ga.batch.pytree import extents, is_constant, is_plain_sequence, open_container
from lightning_ga.errors import UserError

WAY_OUT = "define split_batch(self, batch, sizes) on the LightningModule"


class LayoutError(UserError):
    """A batch whose samples cannot be separated."""


@dataclass(frozen=True, slots=True)
class SampleAxis:
    """A part with entries for each sample of a loader."""

    axis: int = 0  # of the samples; 0 for lists and registered types
    per: int = 1  # entries for each sample, neighbours of one another: several where a collate function joins crops
    loader: int = 0  # which of several


@dataclass(frozen=True, slots=True)
class SampleCount:
    """A number that counts the samples of a loader."""

    loader: int = 0


Role = SampleAxis | SampleCount | Literal["shared", "fields", "constant"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the samples lie in the batches of a loader.

    A batch of several loaders, with 8 and 24 samples, counts as 8 of one and three: micro-batches keep its proportions.
    """

    roles: Mapping[str, Role]  # by the path of each part

    def samples(self, batch: Any) -> int:
        """Return the samples of a batch; of several loaders with different numbers, the greatest common divisor."""
        return gcd(*self.sizes(batch).values())

    def sizes(self, batch: Any) -> dict[int, int]:
        """Return the samples of a batch from each loader that has any in it; refuse one whose parts disagree."""
        found: dict[int, tuple[int, str]] = {}
        for loader, here, path in self._counts("batch", batch):
            there, first = found.setdefault(loader, (here, path))
            if here != there:
                raise uncuttable(f"{first} holds {there} of them and {path} {here}")
        if not found:
            raise uncuttable("nothing in it grows with them")
        return {loader: samples for loader, (samples, _) in found.items()}

    def _counts(self, path: str, node: Any) -> Iterator[tuple[int, int, str]]:
        """Yield loader, number of samples and path of each part with entries for each sample."""
        role = self.roles.get(path)
        if node is None:
            return
        if isinstance(role, SampleAxis):
            shape = extents(node) or ()
            if len(shape) <= role.axis or shape[role.axis] % role.per:
                raise _changed(path, node)
            yield role.loader, shape[role.axis] // role.per, path
        elif role == "fields":
            children = open_container(node) if extents(node) is None or is_plain_sequence(node) else None
            if children is None:
                raise _changed(path, node)
            for name, child in children:
                yield from self._counts(path + name, child)
        elif role is None or (role == "constant" and not is_constant(node)):
            raise _changed(path, node)


def uncuttable(why: str) -> LayoutError:
    """Return the error of a batch that cannot be cut, with the way out."""
    return LayoutError(f"The batch cannot be cut into samples, as {why}: {WAY_OUT}.")


def unknown_type(path: str, node: Any) -> LayoutError:
    """Return the error of a value of a type that is not known."""
    name = type(node).__name__
    return LayoutError(
        f"{path} is of the type {name}, of which it is not known how it is cut into samples: call "
        f"lightning_ga.split.register_splitter({name}, count=lambda value: …, take=lambda value, start, stop: …), "
        f"or {WAY_OUT}."
    )


def _changed(path: str, node: Any) -> LayoutError:
    shape = extents(node)
    now = f" and the shape {shape}" if shape is not None and not is_plain_sequence(node) else ""
    kind = f"now {type(node).__name__}{now}"
    return uncuttable(f"{path} is of another kind than in the batches that were read before ({kind})")


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
