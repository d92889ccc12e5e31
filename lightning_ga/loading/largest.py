"""Find the samples that the largest training batches are made of, as far as a few seconds allow.

A batch is largest with the largest samples of the data set or, if fields are padded, with the longest of every field.
"""

import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from heapq import nlargest
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler

from lightning_ga.batch.layout import elements, leaves
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.sample_reader import SAMPLES_AT_ONCE, until_error
from lightning_ga.memory.live_tensors import uncounted

SAMPLES_KEPT = 32  # samples with the most elements, besides the largest of every field
LOOK_SECONDS = 5.0  # of a look at further samples
LEAST_LOOK = 256  # samples that a look must be able to read in this time
_PLACES = 32  # axes of fields; more are data, not structure: a dictionary keyed by name


class _Seen(NamedTuple):
    """A sample that was seen; of two, the larger is the one with more elements, or else the earlier one."""

    elements: int
    earliness: int  # no two have the same
    sample: Any


class Largest:
    """The samples with the most elements, and the largest of every field along every axis, of those scanned so far."""

    def __init__(self, known: KnownSamples) -> None:
        self._known = known
        self._collated: _Kept | None = None  # those of the scanned that batches are made of, once they were asked for
        self._kept = _Kept(text=known.has_own_collate)
        with uncounted():  # samples lie on the host
            self._kept.see(known.reader.first)
        self.seen = len(known.reader.first)  # samples that were scanned
        self.total = len(known.reader.indices)
        self.complete = self._kept.uniform or self.seen == self.total  # whether nothing is left to look for

    def look_further(self) -> None:
        """Scan the other samples, too, as far as there is time, unless the first have one size or reading is slow."""
        known = self._known
        if self.complete or known.reader.seconds_each * LEAST_LOOK > LOOK_SECONDS:
            return
        self._collated = None
        started = time.monotonic()
        rest = BatchSampler(islice(known.reader.order(), self.seen, None), SAMPLES_AT_ONCE, drop_last=False)
        scan = partial(_scan, _Kept(text=self._kept.text))
        with uncounted(), known.reader.fetched(rest, scan, workers=known.loader.num_workers) as reports:
            for count, newcomers in until_error(reports):
                self.seen += count
                self._kept.see(newcomers)
                if time.monotonic() - started > LOOK_SECONDS:
                    break
        self.complete = self.seen == self.total

    def batch(self, count: int) -> Any:
        """Return a batch of ``count`` samples as the loader makes it, as large as these samples allow.

        A padded batch is largest with the longest of every field in it; a packed one, with the largest samples.
        """
        collate = self._known.collate
        if self._collated is None:
            with uncounted():
                self._collated = self._left_in_batches()
        by_fields, by_elements = self._collated.orders()
        chosen = by_fields
        if {*map(id, by_fields[:count])} != {*map(id, by_elements[:count])}:
            with uncounted():
                chosen = max(by_fields, by_elements, key=lambda order: elements(collate(order, count)))
        return collate(chosen, count)

    def _left_in_batches(self) -> "_Kept":
        """Return the largest samples that collating does not drop; if it drops them all, those of the first.

        If no batch grows with any of these, they are not dropped: collating may make one batch of however many.
        """
        known = self._known
        if not known.has_own_collate:
            return self._kept
        _, by_elements = self._kept.orders()
        left = _Kept(text=self._kept.text)
        left.see(known.left(by_elements) or known.left_of_first)
        return left


class _Kept:
    """The samples that are kept of those seen, here or in a data worker."""

    def __init__(self, *, text: bool) -> None:
        self.text = text  # whether text counts: it does if collating turns it into tensors
        self.uniform = True
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._most: list[_Seen] = []
        self._largest: dict[tuple[str, int], tuple[int, _Seen]] = {}  # extent and sample, by field and axis
        self._count = 0

    def see(self, samples: Iterable[Any]) -> list[Any]:
        """Scan samples; return those that are kept for now."""
        return list(filter(self._see, samples))

    def _see(self, sample: Any) -> bool:
        shapes = dict(leaves(sample, text=self.text))
        self._shapes = self._shapes or shapes
        self.uniform &= shapes == self._shapes
        self._count += 1
        seen = _Seen(sum(map(prod, shapes.values())), -self._count, sample)
        self._most = nlargest(SAMPLES_KEPT, [*self._most, seen])
        is_kept = any(each is seen for each in self._most)
        for path, shape in shapes.items():
            if prod(shape) > 1:  # neither a number nor a label
                for axis, extent in enumerate(shape):
                    is_kept |= self._is_largest((path, axis), extent, seen)
        return is_kept

    def _is_largest(self, place: tuple[str, int], extent: int, seen: _Seen) -> bool:
        """Return whether a sample is the largest so far along an axis of a field, and then keep it."""
        known = self._largest.get(place)
        if known is None:
            is_larger = len(self._largest) < _PLACES
        else:
            is_larger = (extent, seen) > known
        if is_larger:
            self._largest[place] = (extent, seen)
        return is_larger

    def orders(self) -> tuple[list[Any], list[Any]]:
        """Return the kept samples in two orders: those that are largest in the most fields first, and by elements."""
        times: Counter[int] = Counter()
        kept = {seen.earliness: seen for seen in self._most}
        for _, seen in self._largest.values():
            times[seen.earliness] += 1
            kept[seen.earliness] = seen
        by_elements = sorted(kept.values(), reverse=True)
        by_fields = sorted(by_elements, key=lambda seen: -times[seen.earliness])
        return [seen.sample for seen in by_fields], [seen.sample for seen in by_elements]


def _scan(kept: _Kept, samples: list[Any]) -> tuple[int, list[Any]]:
    """Return the number of samples read, and those to keep: a data worker sends only these."""
    return len(samples), kept.see(samples)
