"""The layout of a batch: on which axis of each part its samples lie, how many they are, and how they are cut.

A LightningModule may define ``split_batch(self, batch, sizes)`` for batches whose layout cannot be read.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from typing import Any, Literal

import numpy as np
import torch

from lightning_ga.batch.pytree import (
    REMEDY,
    extents,
    is_constant,
    is_opened,
    is_plain_sequence,
    open_container,
    rebuild,
    walk,
)
from lightning_ga.batch.pytree import LayoutError as LayoutError
from lightning_ga.batch.take import take
from lightning_ga.errors import UserError


@dataclass(frozen=True, slots=True)
class SampleAxis:
    """A part with an entry for each sample of a loader."""

    axis: int = 0  # of the samples; 0 for lists and registered types
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
        sizes: dict[int, int] = {}
        first: dict[int, str] = {}  # the first part with samples of each loader
        for path, node, role in self.parts(batch):
            if not isinstance(role, SampleAxis):
                continue
            shape = extents(node) or ()
            if len(shape) <= role.axis:
                raise _changed(path, node)
            samples = shape[role.axis]
            known = sizes.setdefault(role.loader, samples)
            first.setdefault(role.loader, path)
            if samples != known:
                raise uncuttable(f"{first[role.loader]} has {known} of them and {path} has {samples}")
        if not sizes:
            raise uncuttable("nothing in it grows with them")
        return sizes

    def cut(self, batch: Any, start: int, stop: int) -> Any:
        """Return the samples ``start`` to ``stop - 1`` of a batch; refuse one that does not have the layout."""
        sizes = self.sizes(batch)
        samples = gcd(*sizes.values())
        keeps_no_proportion = samples == 1 and max(sizes.values()) > 1
        if keeps_no_proportion:
            given = " and ".join(map(str, sizes.values()))
            raise uncuttable(f"its loaders give {given} of them, and no smaller batch keeps that proportion")
        spans: dict[int, tuple[int, int]] = {}
        for loader, size in sizes.items():
            each = size // max(1, samples)
            spans[loader] = (start * each, stop * each)
        return self.part_of(batch, spans)

    def parts(self, node: Any, path: str = "batch") -> Iterator[tuple[str, Any, Role]]:
        """Yield path, value and role of each part that has a role as a whole; refuse one of another kind."""
        role = self.roles.get(path)
        if node is None:
            return
        if role == "fields":
            children = open_container(node) if is_opened(node) else None
            if children is None:
                raise _changed(path, node)
            for name, child in children:
                yield from self.parts(child, path + name)
        elif role is None or (role == "constant" and not is_constant(node)):
            raise _changed(path, node)
        else:
            yield path, node, role

    def part_of(self, node: Any, spans: Mapping[int, tuple[int, int]], path: str = "batch") -> Any:
        """Return the part of a value that belongs to some samples of each loader."""
        role = self.roles.get(path)
        if node is None:
            return None
        if isinstance(role, SampleAxis):
            return take(node, role.axis, *spans[role.loader])
        if isinstance(role, SampleCount):
            start, stop = spans[role.loader]
            count = stop - start
            if isinstance(node, np.ndarray):
                return np.full_like(node, count)
            return node.new_tensor(count) if isinstance(node, torch.Tensor) else type(node)(count)
        if role != "fields":
            return node
        return rebuild(node, [self.part_of(child, spans, path + name) for name, child in open_container(node) or []])


def uncuttable(why: str) -> LayoutError:
    """Return the error of a batch that cannot be cut, with the remedy."""
    return LayoutError(f"The batch cannot be cut into samples, as {why}: {REMEDY}.")


def unknown_type(path: str, node: Any) -> LayoutError:
    """Return the error of a value of a type that is not known."""
    name = type(node).__name__
    return LayoutError(
        f"{path} is of the type {name}, of which it is not known how it is cut into samples: call "
        f"lightning_ga.split.register_splitter({name}, count=lambda value: …, take=lambda value, start, stop: …), "
        f"or {REMEDY}."
    )


def _changed(path: str, node: Any) -> LayoutError:
    kind = type(node).__name__
    if extents(node) is not None and not is_plain_sequence(node):
        kind += f" and the shape {extents(node)}"
    return uncuttable(f"{path} is of another kind than in the batches that were read before (now {kind})")


def elements(sample: Any, *, text: bool = True) -> int:
    """Count the elements of all tensors, arrays, images, sequences and text in a sample of any structure."""
    return sum(prod(shape) for _, shape in leaves(sample, text=text))


def extents_by_axis(sample: Any, *, text: bool) -> dict[tuple[str, int], int]:
    """Return the extents of every field of a sample, by its path and axis."""
    return {(path, axis): extent for path, shape in leaves(sample, text=text) for axis, extent in enumerate(shape)}


def leaves(sample: Any, *, text: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the path of every field of a sample and its shape."""
    return walk(sample, partial(_shape, text=text))


def _shape(value: Any, *, text: bool) -> tuple[int, ...] | None:
    """Return the shape of a leaf; ``None`` for a container."""
    if isinstance(value, torch.Tensor):
        if "sparse" in str(value.layout):
            return (value._nnz(),)
        return (value.numel(),) if value.is_nested else tuple(value.shape)
    if isinstance(value, (str, bytes)):
        return (len(value),) if text else ()
    for name in ("shape", "size"):  # of an array; of a picture
        found = getattr(value, name, None)
        if isinstance(found, tuple) and all(isinstance(extent, int) for extent in found):
            return found
    if isinstance(value, (set, frozenset)) or _has_only_numbers(value):
        return (len(value),)
    if isinstance(value, (Mapping, list, tuple)) or hasattr(value, "__dict__"):
        return None
    return ()


def _has_only_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, (int, float)) for item in value)


def length_of_first(batch: Any) -> int:
    """Return the length of a batch's first tensor, else of a list: what shows its samples without a layout."""
    for _, length in walk(batch, _length):
        return int(length)
    if isinstance(batch, (list, tuple)):
        return len(batch)
    name = type(batch).__name__
    raise LayoutError(
        f"How many samples a {name} has is not known: call "
        f"lightning_ga.split.register_splitter({name}, count=…, take=…), also beside a split_batch."
    )


@dataclass(frozen=True)
class Samples:
    """Counts samples, as ``normalize="samples"`` does: the length of the batch's first tensor, else of a list."""

    def __call__(self, batch: Any) -> int:
        """Return the samples of a batch."""
        return length_of_first(batch)


def _length(value: Any) -> int | None:
    shape = extents(value)
    if shape is None or is_plain_sequence(value):
        return None
    return shape[0]


@dataclass(frozen=True, slots=True)
class HookLayout:
    """Batches that a module's own ``split_batch`` cuts; a sample has so many ``rows`` of their first tensor."""

    hook: Any
    rows: int = 1

    def sizes(self, batch: Any) -> dict[int, int]:
        """Return the samples of a batch, as those of a single loader."""
        return {0: self.samples(batch)}

    def samples(self, batch: Any) -> int:
        """Return the samples of a batch."""
        return length_of_first(batch) // self.rows

    def cut(self, batch: Any, start: int, stop: int) -> Any:
        """Return the samples ``start`` to ``stop - 1`` of a batch."""
        hook = self.hook
        if not callable(hook):
            raise UserError(
                f"{hook=} must be a method, split_batch(self, batch, sizes), that returns one chunk for each size."
            )
        before = [start] if start else []
        after = [self.samples(batch) - stop] if stop < self.samples(batch) else []
        sizes = [*before, stop - start, *after]
        result = hook(batch, list(sizes))
        chunks = list(result) if isinstance(result, Iterable) else []
        if len(chunks) != len(sizes):
            returned = f"{len(chunks)} chunks" if chunks else repr(result)
            raise UserError(f"split_batch returned {returned} for {sizes=}: it must return one chunk for each size.")
        return chunks[len(before)]
