"""Find the samples that the largest training batches are made of, as far as a few seconds allow.

A batch is largest with the largest samples of the data set or, if fields are padded, with the longest of every field.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from math import prod
from typing import Any

from torch.utils.data import DataLoader, default_collate

from lightning_ga.batch.layout import Field, elements, leaves
from lightning_ga.loading.samples import SAMPLES_PER_READ, collate_samples, fetched, spread
from lightning_ga.memory.live_tensors import uncounted

SAMPLES_KEPT = 32  # samples with the most elements, besides the largest of every field
SAMPLES_AT_ONCE = 64
FIRST_SECONDS, LOOK_SECONDS = 3.0, 5.0  # time limits of the first scan, and of all
_FIELDS = 32  # more fields are data, not structure: a dictionary keyed by name


class ScanOrder:
    """Order in which samples are scanned: from all over the data set first, then ever more densely.

    The first scan includes the first and the last sample, and so the largest of a sorted data set.
    """

    def __init__(self, loader: "DataLoader[Any]", indices: Sequence[Any]) -> None:
        self.total, self._loader, self._indices = len(indices), loader, indices

    @cached_property
    def first(self) -> list[Any]:
        """The samples of the first scan, read once; fewer if reading is slow."""
        indices, started, found = list(islice(self._order(), SAMPLES_AT_ONCE)), time.monotonic(), list[Any]()
        lists = (indices[at : at + SAMPLES_PER_READ] for at in range(0, len(indices), SAMPLES_PER_READ))
        with uncounted(), fetched(self._loader, lists, list) as reads:  # samples lie on the host
            for samples in reads:
                found += samples
                if time.monotonic() - started > FIRST_SECONDS:
                    break
        return found

    def rest(self) -> Iterator[list[Any]]:
        """Yield the indices of the further scans."""
        order = islice(self._order(), len(self.first), None)
        while scan := list(islice(order, SAMPLES_AT_ONCE)):
            yield scan

    def _order(self) -> Iterator[Any]:
        size = len(self._indices)
        first = [0, size - 1] if size > SAMPLES_AT_ONCE else []
        places = chain(first, (place for place in spread(size) if place not in first))
        return map(self._indices.__getitem__, places)


class Largest:
    """The samples with the most elements, and the largest of every field along every axis."""

    def __init__(self, *, text: bool = True) -> None:
        self.uniform = True  # whether all samples had the same shapes
        self.seen, self.complete = 0, True  # samples that were scanned, and whether the scan was not cut short
        self._text = text  # whether text counts: it does if collating turns it into tensors
        self._shapes: dict[Field, tuple[int, ...]] | None = None
        self._most: list[tuple[int, int, Any]] = []  # elements, number (the higher, the earlier) and sample
        self._largest: dict[
            Field, tuple[int, int, int, Any]
        ] = {}  # by field and axis: extent, elements, number, sample
        self._count = 0

    def see(self, samples: Sequence[Any]) -> list[Any]:
        """Scan samples; return those that are kept for now."""
        return [sample for sample in samples if self._see(sample)]

    def _see(self, sample: Any) -> bool:
        shapes, total = dict[Field, tuple[int, ...]](), 0
        for field, shape in leaves(sample, text=self._text):
            total += prod(shape)
            known = shapes.get(field, shape)
            shapes[field] = tuple(map(max, shape, known)) if len(known) == len(shape) else max(known, shape)
        self._shapes = shapes if self._shapes is None else self._shapes
        self.uniform &= shapes == self._shapes
        self._count += 1
        seen, kept = (total, -self._count, sample), False
        if len(self._most) < SAMPLES_KEPT or seen[:2] > self._most[-1][:2]:
            self._most = sorted([*self._most, seen], key=lambda each: each[:2], reverse=True)[:SAMPLES_KEPT]
            kept = True
        large = [(field, shape) for field, shape in shapes.items() if prod(shape) > 1]  # neither numbers nor labels
        for direction, extent in (
            ((*field, axis), extent) for field, shape in large for axis, extent in enumerate(shape)
        ):
            known_extent = self._largest.get(direction, (-1, 0, 0))[:3]
            if (extent, *seen[:2]) > known_extent and (direction in self._largest or len(self._largest) < _FIELDS):
                self._largest[direction], kept = (extent, *seen), True
        return kept

    def batch(self, loader: "DataLoader[Any]", count: int) -> Any:
        """Return a batch of ``count`` samples as the loader makes it, as large as these samples allow.

        A padded batch is largest with the longest of every field in it; a packed one, with the largest samples.
        """
        chosen, other = self._by_field(), self._by_weight()
        if set(map(id, chosen[:count])) != set(map(id, other[:count])):
            with uncounted():
                chosen = max(chosen, other, key=lambda order: elements(collate_samples(loader, order, count)))
        return collate_samples(loader, chosen, count)

    def _by_weight(self) -> list[Any]:
        """Return the samples kept, those with the most elements first."""
        kept = {each[1]: each for each in (*self._most, *(found[1:] for found in self._largest.values()))}
        return [sample for _, _, sample in sorted(kept.values(), key=lambda each: each[:2], reverse=True)]

    def _by_field(self) -> list[Any]:
        """Return the samples kept; first those that are largest in the most fields."""
        times = Counter(number for _, _, number, _ in self._largest.values())
        first = {found[2]: found[3] for found in self._largest.values()}
        chosen = [first[number] for number, _ in sorted(times.items(), key=lambda each: (-each[1], -each[0]))]
        return [*chosen, *(sample for sample in self._by_weight() if not any(sample is each for each in chosen))]


def _scan(kept: Largest, samples: list[Any]) -> tuple[int, list[Any]]:
    """Return the number of samples read, and those to keep: a data worker sends only these."""
    return len(samples), kept.see(samples)


@uncounted()  # samples lie on the host
def largest_samples(loader: "DataLoader[Any]", order: ScanOrder) -> Largest:
    """Find the largest samples behind a loader: among a few if these have one size, otherwise among all."""
    started = time.monotonic()
    text = loader.collate_fn is not default_collate  # that leaves text as it is
    kept = Largest(text=text)
    kept.see(order.first)
    kept.seen = len(order.first)
    if kept.uniform or order.total <= kept.seen:
        return kept
    scan = partial(_scan, Largest(text=text))
    with fetched(loader, order.rest(), scan, workers=loader.num_workers) as reports:
        for count, newcomers in reports:
            kept.seen += count
            kept.see(newcomers)
            kept.complete = kept.seen == order.total or time.monotonic() - started <= LOOK_SECONDS
            if not kept.complete:
                break
    return kept
