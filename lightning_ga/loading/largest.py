"""Find the samples that the largest training batches are made of, as far as a few seconds allow.

A batch is largest with the largest samples of the data set or, if fields are padded, with the longest of every field.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from math import prod
from typing import Any

from torch.utils.data import default_collate

from lightning_ga.batch.layout import elements, leaves
from lightning_ga.loading.samples import SAMPLES_AT_ONCE, Samples
from lightning_ga.memory.live_tensors import uncounted

SAMPLES_KEPT = 32  # samples with the most elements, besides the largest of every field
LOOK_SECONDS = 5.0  # of a look at further samples
_FIELDS = 32  # more fields are data, not structure: a dictionary keyed by name
_Seen = tuple[int, int, Any]  # elements, number (the higher, the earlier) and sample


class Largest:
    """The samples with the most elements, and the largest of every field along every axis: among the first samples."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._kept = _Kept(text=samples.loader.collate_fn is not default_collate)  # that leaves text as it is
        with uncounted():  # samples lie on the host
            self._kept.see(samples.first)
        self.seen = len(samples.first)  # samples that were scanned
        self.total = len(samples.indices)
        self.complete = self._kept.uniform or self.seen == self.total  # whether the scan was not cut short

    def look_further(self) -> None:
        """Scan the other samples, too, as far as there is time, unless the first have one size."""
        if self.complete:
            return
        started = time.monotonic()
        samples = self._samples
        scan = partial(_scan, _Kept(text=self._kept.text))
        with uncounted(), samples.fetched(self._rest(), scan, workers=samples.loader.num_workers) as reports:
            for count, newcomers in reports:
                self.seen += count
                self._kept.see(newcomers)
                self.complete = self.seen == self.total
                if time.monotonic() - started > LOOK_SECONDS:
                    break

    def _rest(self) -> Iterator[list[Any]]:
        order = islice(self._samples.order(), len(self._samples.first), None)
        while scan := list(islice(order, SAMPLES_AT_ONCE)):
            yield scan

    def batch(self, count: int) -> Any:
        """Return a batch of ``count`` samples as the loader makes it, as large as these samples allow.

        A padded batch is largest with the longest of every field in it; a packed one, with the largest samples.
        """
        chosen = self._kept.by_field()
        other = self._kept.by_weight()
        if set(map(id, chosen[:count])) != set(map(id, other[:count])):
            with uncounted():
                chosen = max(chosen, other, key=lambda order: elements(self._samples.collate(order, count)))
        return self._samples.collate(chosen, count)


class _Kept:
    """The samples that are kept of those seen, here or in a data worker."""

    def __init__(self, *, text: bool) -> None:
        self.text = text  # whether text counts: it does if collating turns it into tensors
        self.uniform = True
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._most: list[_Seen] = []
        self._largest: dict[tuple[str, int], tuple[int, _Seen]] = {}  # extent and sample, by field and axis
        self._count = 0

    def see(self, samples: Sequence[Any]) -> list[Any]:
        """Scan samples; return those that are kept for now."""
        return [sample for sample in samples if self._see(sample)]

    def _see(self, sample: Any) -> bool:
        shapes = dict(leaves(sample, text=self.text))
        self._shapes = self._shapes or shapes
        self.uniform &= shapes == self._shapes
        self._count += 1
        seen = (sum(map(prod, shapes.values())), -self._count, sample)
        self._most = sorted([*self._most, seen], key=_size, reverse=True)[:SAMPLES_KEPT]
        is_kept = any(each is seen for each in self._most)
        large = [path for path, shape in shapes.items() if prod(shape) > 1]  # neither numbers nor labels
        places = [(path, axis) for path in large for axis in range(len(shapes[path]))]
        for place in places:
            path, axis = place
            extent = shapes[path][axis]
            known = self._largest.get(place, (-1, seen))
            is_larger = (extent, *_size(seen)) > (known[0], *_size(known[1]))
            if is_larger and (place in self._largest or len(self._largest) < _FIELDS):
                self._largest[place] = extent, seen
                is_kept = True
        return is_kept

    def by_weight(self) -> list[Any]:
        """Return the samples kept, those with the most elements first."""
        kept = {each[1]: each for each in (*self._most, *(seen for _, seen in self._largest.values()))}
        return [sample for _, _, sample in sorted(kept.values(), key=_size, reverse=True)]

    def by_field(self) -> list[Any]:
        """Return the samples kept; first those that are largest in the most fields."""
        largest = {seen[1]: seen[2] for _, seen in self._largest.values()}
        times = Counter(seen[1] for _, seen in self._largest.values()).most_common()
        chosen = [largest[number] for number, _ in times]
        return [*chosen, *(sample for sample in self.by_weight() if not any(sample is each for each in chosen))]


def _size(seen: _Seen) -> tuple[int, int]:
    return seen[:2]


def _scan(kept: _Kept, samples: list[Any]) -> tuple[int, list[Any]]:
    """Return the number of samples read, and those to keep: a data worker sends only these."""
    return len(samples), kept.see(samples)
