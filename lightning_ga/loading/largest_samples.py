"""Find the samples that the largest training batches are made of, as far as a few seconds allow.

A batch is largest with the largest samples of the data set or, if fields are padded, with the longest of every field.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from math import prod
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, default_collate

from lightning_ga.batch.layout import Field, elements, leaves
from lightning_ga.loading.samples import FirstSamples, collate_samples, fetched, spread
from lightning_ga.memory.live_tensors import uncounted

SAMPLES_KEPT = 32  # samples with the most elements, besides the largest of every field
SAMPLES_AT_ONCE = 64
LOOK_SECONDS = 5.0  # time limit of a scan
_FIELDS = 32  # more fields are data, not structure: a dictionary keyed by name


class ScanOrder:
    """Order in which samples are scanned: from all over the data set first, then more and more between them.

    The first scan holds the first and the last sample, so that it meets the largest of a sorted data set. A stream has
    no indices, and is read from its start.

    Examples:
        >>> looks = ScanOrder(DataLoader(range(200)), range(200), total=200)
        >>> looks.first.read(4), [len(look) for look in looks.rest()]
        ([0, 199, 127, 54], [64, 64, 8])
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        indices: Sequence[Any] | None,
        total: int | None,
        together: Sequence[Any] | None = None,
    ) -> None:
        self.total, self._indices = total, indices
        self.streams = indices is None  # whether samples have no index and are read from the start
        self.first = FirstSamples(loader, list(islice(self._order(), SAMPLES_AT_ONCE)))  # of the first scan
        # Samples that a batch may be made of: those that are ``together``, if not any will do.
        self.some = self.first if together is None else FirstSamples(loader, list(together))

    def rest(self) -> Iterator[list[Any]]:
        """Yield the indices of the further scans; of a stream, from its start."""
        order = islice(self._order(), 0 if self.streams else SAMPLES_AT_ONCE, None)
        while look := list(islice(order, SAMPLES_AT_ONCE)):
            yield look

    def _order(self) -> Iterator[Any]:
        if self._indices is None:
            return repeat(None)
        size = len(self._indices)
        first = [0, size - 1] if size > SAMPLES_AT_ONCE else []
        places = chain(first, (place for place in spread(size) if place not in first))
        return map(self._indices.__getitem__, places)


class _Seen(NamedTuple):
    elements: int
    order: int  # the higher, the earlier
    extents: dict[Field, int]  # of every field along every axis, but for numbers and labels
    sample: Any

    @property
    def rank(self) -> tuple[int, int]:
        return self.elements, self.order


class Largest:
    """The samples with the most elements, and the largest of every field along every axis.

    Examples:
        >>> import torch
        >>> kept = Largest()
        >>> _ = kept.see([torch.zeros(2, 2), torch.zeros(3, 3), torch.zeros(1, 9), torch.zeros(7, 1)])
        >>> [tuple(sample.shape) for sample in kept.by_field]
        [(1, 9), (7, 1), (3, 3), (2, 2)]
    """

    def __init__(self, *, text: bool = True) -> None:
        self.uniform = True  # whether all samples had the same shapes
        self._text = text  # whether text counts: it does if collating turns it into tensors
        self._shapes: dict[Field, tuple[int, ...]] | None = None
        self._count = 0
        self._most: list[_Seen] = []
        self._largest: dict[Field, _Seen] = {}

    def see(self, samples: Sequence[Any]) -> list[Any]:
        """Scan samples; return those that are kept for now."""
        return [sample for sample in samples if self._see(sample)]

    def _see(self, sample: Any) -> bool:
        shapes: dict[Field, tuple[int, ...]] = {}
        total = 0
        for field, shape in leaves(sample, text=self._text):
            total += prod(shape)
            known = shapes.get(field, shape)
            shapes[field] = tuple(map(max, shape, known)) if len(known) == len(shape) else max(known, shape)
        self._shapes = shapes if self._shapes is None else self._shapes
        self.uniform &= shapes == self._shapes
        self._count += 1
        large = {field: shape for field, shape in shapes.items() if prod(shape) > 1}  # neither numbers nor labels
        extents = {(*field, axis): extent for field, shape in large.items() for axis, extent in enumerate(shape)}
        seen = _Seen(total, -self._count, extents, sample)
        most = len(self._most) < SAMPLES_KEPT or seen.rank > self._most[-1].rank
        if most:
            self._most = sorted([*self._most, seen], key=lambda kept: kept.rank, reverse=True)[:SAMPLES_KEPT]
        enlarged = [self._enlarge(direction, extent, seen) for direction, extent in extents.items()]
        return most or any(enlarged)

    def _enlarge(self, direction: Field, extent: int, seen: _Seen) -> bool:
        known = self._largest.get(direction)
        if known is None:
            larger = len(self._largest) < _FIELDS
        else:
            larger = (extent, *seen.rank) > (known.extents[direction], *known.rank)
        if larger:
            self._largest[direction] = seen
        return larger

    @property
    def by_weight(self) -> list[Any]:
        """The samples kept, those with the most elements first."""
        return [seen.sample for seen in self._kept()]

    @property
    def by_field(self) -> list[Any]:
        """The samples kept; first as few as together hold the largest of every field."""
        missing = {direction: seen.extents[direction] for direction, seen in self._largest.items()}
        first, rest = list[_Seen](), self._kept()
        while missing:
            best = max(rest, key=lambda seen: len(missing.items() & seen.extents.items()))
            first.append(best)
            rest = [seen for seen in rest if seen is not best]
            missing = dict(missing.items() - best.extents.items())
        return [seen.sample for seen in (*first, *rest)]

    def _kept(self) -> list[_Seen]:
        """Return all that is kept, each sample once, the largest first."""
        kept = {seen.order: seen for seen in (*self._most, *self._largest.values())}
        return sorted(kept.values(), key=lambda seen: seen.rank, reverse=True)


def _scan(kept: Largest, samples: list[Any]) -> tuple[int, list[Any]]:
    """Return the number of samples read, and those to keep: of a data worker's, only these are sent."""
    return len(samples), kept.see(samples)


@dataclass(frozen=True, slots=True)
class LargestSamples:
    """Samples to make the largest batches of."""

    by_field: list[Any]  # first as few as together hold the largest of every field, then the others
    by_weight: list[Any]  # the same samples, those with the most elements first
    seen: int  # samples that were scanned
    complete: bool  # whether these are all there are, or all that were scanned are of one size

    def batch(self, loader: "DataLoader[Any]", count: int) -> Any:
        """Return a batch of ``count`` samples as the loader makes it, as large as these samples allow.

        A padded batch is largest with the longest of every field in it; a packed one, with the largest samples.
        """
        chosen, other = self.by_field, self.by_weight
        if set(map(id, chosen[:count])) != set(map(id, other[:count])):
            with uncounted():
                chosen = max(chosen, other, key=lambda order: elements(collate_samples(loader, order, count)))
        return collate_samples(loader, chosen, count)


@uncounted()  # samples lie on the host
def largest_samples(loader: "DataLoader[Any]", looks: ScanOrder) -> LargestSamples:
    """Find the largest samples behind a loader: among a few if these are of one size, otherwise among all."""
    started = time.monotonic()
    text = loader.collate_fn is not default_collate  # which leaves text as it is
    kept, first = Largest(text=text), looks.first.read()
    kept.see(first)
    seen, complete = len(first), True
    if not kept.uniform and (looks.total is None or looks.total > seen):
        seen, workers = (0, 1) if looks.streams else (seen, loader.num_workers)
        with fetched(loader, looks.rest(), partial(_scan, Largest(text=text)), workers=workers) as reports:
            for count, newcomers in reports:
                seen += count
                kept.see(newcomers)
                complete = seen == looks.total or time.monotonic() - started <= LOOK_SECONDS
                if not complete:
                    break
    return LargestSamples(kept.by_field, kept.by_weight, seen, complete)
