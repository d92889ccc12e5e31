"""Cut a batch of any structure into slices of its samples: one at a time, tensors as views.

A LightningModule may define ``split_batch(self, batch, sizes)`` for batches whose layout cannot be read, for example
nodes of several graphs that its own code has joined::

    def split_batch(self, batch, sizes):
        graphs = iter(batch.graphs())
        return [join(itertools.islice(graphs, size)) for size in sizes]
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Any

import torch

from lightning_ga.batch.layout import Layout, LayoutError, Role, SampleAxis, SampleCount
from lightning_ga.batch.pytree import open_container, rebuild, take
from lightning_ga.errors import UserError


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
