"""Where the samples of a batch lie, by the part of the batch, how many there are, how large, and how they are cut.

A LightningModule may define ``split_batch(self, batch, sizes)`` for batches whose layout cannot be read, for example
nodes of several graphs that its own code has joined::

    def split_batch(self, batch, sizes):
        graphs = iter(batch.graphs())
        return [join(itertools.islice(graphs, size)) for size in sizes]
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, prod
from typing import Any, Literal

import torch

from lightning_ga.batch.pytree import extents, is_constant, is_plain_sequence, open_container, rebuild, take
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


@dataclass(frozen=True, slots=True)
class BatchSlices:
    """A batch of so many samples, of which ``take(start, stop)`` cuts out those from ``start`` to ``stop - 1``."""

    samples: int
    take: Callable[[int, int], Any]


def split_batch(batch: Any, sizes: Sequence[int], *, layout: Layout) -> Iterator[Any]:
    """Cut a batch into slices of these sizes, in order, each when it is asked for.

    Structure and types are kept. Dense tensors and arrays are views of the batch, so a slice costs
    no memory until it is moved; packed, sparse and nested tensors copy at most the slice.

    Args:
        batch: Tensors in any structure.
        sizes: Samples of each slice; one of no samples holds empty tensors, but no jagged ones, which torch lacks.
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
    slices = slices_of(batch, layout)
    if sum(sizes) != slices.samples:
        raise UserError(f"sizes={list(sizes)} add up to {sum(sizes)}, and the batch holds {slices.samples} samples.")
    return (slices.take(end - size, end) for size, end in zip(sizes, accumulate(sizes)))


def slices_of(batch: Any, layout: Layout) -> BatchSlices:
    """Return the slices of a batch whose samples lie as the layout says."""
    sizes = layout.sizes(batch)
    samples = gcd(*sizes.values())
    each = {loader: size // max(1, samples) for loader, size in sizes.items()}
    return BatchSlices(samples, lambda start, stop: _Slice(layout.roles, each, start, stop).of("batch", batch))


@dataclass(frozen=True, slots=True)
class _Slice:
    """The samples ``start`` to ``stop - 1`` of a batch that holds ``each`` times as many of its loaders."""

    roles: Mapping[str, Role]
    each: Mapping[int, int]
    start: int
    stop: int

    def of(self, path: str, node: Any) -> Any:
        """Return what belongs to these samples in a part of the batch."""
        role = self.roles.get(path)
        if node is None:
            return None
        if isinstance(role, SampleAxis):
            entries = self.each[role.loader] * role.per
            return take(node, role.axis, self.start * entries, self.stop * entries)
        if isinstance(role, SampleCount):
            count = (self.stop - self.start) * self.each[role.loader]
            return node.new_tensor(count) if isinstance(node, torch.Tensor) else type(node)(count)
        children = open_container(node) if role == "fields" else None
        if children is None:
            return node
        return rebuild(node, [self.of(path + name, child) for name, child in children])


def slices_by_hook(hook: Any, batch: Any, samples: int, layout: Layout | None = None) -> BatchSlices:
    """Return the slices that a module's own ``split_batch`` cuts; a ``layout`` tells how many samples each holds."""
    if not callable(hook):
        raise UserError(
            f"{hook=} must be a method, split_batch(self, batch, sizes), that returns one chunk for each size."
        )

    def take(start: int, stop: int) -> Any:
        sizes = [size for size in (start, stop - start, samples - stop) if size]
        parts = hook(batch, list(sizes))
        if not isinstance(parts, Iterable):
            raise UserError(f"split_batch returned {parts!r} for {sizes=}: it must return one chunk for each size.")
        parts = list(parts)
        if len(parts) != len(sizes):
            raise UserError(f"split_batch returned {len(parts)} chunks for {sizes=}: it must return one for each size.")
        _check_sizes(parts, sizes, layout)
        return parts[1 if start else 0]

    return BatchSlices(samples, take)


def _check_sizes(parts: Sequence[Any], sizes: list[int], layout: Layout | None) -> None:
    """Refuse chunks of other sizes than were asked for, as far as their samples can be counted."""
    for number, (part, size) in enumerate(zip(parts, sizes), start=1):
        found = size
        with suppress(LayoutError):
            found = size if layout is None else layout.samples(part)
        if found != size:
            raise UserError(
                f"split_batch returned a chunk that does not hold {size} samples for {sizes=} "
                f"(chunk {number}): each chunk holds as many samples as its size says."
            )
