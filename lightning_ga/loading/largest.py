"""Find the samples that the largest training batches are made of, as far as a few seconds allow.

A batch is largest with the largest samples of the data set or, if fields are padded, with the longest of every field.
"""

import time
from collections.abc import Iterable
from heapq import nlargest
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler

from lightning_ga.batch.layout import elements, extents_by_axis
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.sample_reader import SAMPLES_AT_ONCE, until_error
from lightning_ga.memory.live_tensors import uncounted

SAMPLES_KEPT = 32  # samples with the most elements, besides the longest of every field
LOOK_SECONDS = 5.0  # of a look at further samples
LEAST_LOOK = 256  # samples that a look must be able to read in this time
_ELEMENTS = ("elements", -1)  # the key beside (field, axis) under which samples are ranked by elements

_Seen = tuple[int, int, int, Any]  # of a sample: its extent, elements, minus its number, which no two share, and itself


class Largest:
    """The samples with the most elements, and the longest of every field along every axis, of those scanned so far.

    The fields are those of the first sample.
    """

    def __init__(self, known: KnownSamples) -> None:
        self._known = known
        self._extents: dict[tuple[str, int], int] = {}  # of the first sample
        self._kept: dict[tuple[str, int], list[_Seen]] = {}  # the largest by field and axis, and by elements
        self._orders: list[list[Any]] = []  # in which samples make batches, once they were asked for
        self._is_uniform = True
        self.seen = 0  # samples that were scanned
        self.total = len(known.reader.indices)
        with uncounted():  # samples lie on the host
            self._see(known.reader.first)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to look for: the samples have one size, or all were scanned."""
        return self._is_uniform or self.seen == self.total

    def look_further(self) -> None:
        """Scan the other samples, too, as far as there is time, unless the first have one size or reading is slow."""
        known = self._known
        if self.complete or known.reader.seconds_each * LEAST_LOOK > LOOK_SECONDS:
            return
        self._orders = []
        started = time.monotonic()
        rest = BatchSampler(islice(known.reader.order(), self.seen, None), SAMPLES_AT_ONCE, drop_last=False)
        with uncounted(), known.reader.fetched(rest, list, workers=known.loader.num_workers) as reads:
            for samples in until_error(reads):
                self._see(samples)
                if time.monotonic() - started > LOOK_SECONDS:
                    break

    def _see(self, samples: Iterable[Any]) -> None:
        """Scan samples, and keep the largest."""
        text = self._known.has_own_collate  # text counts if collating may turn it into tensors
        for sample in samples:
            self.seen += 1
            if sample is None:
                continue
            size = elements(sample, text=text)
            extents = {**extents_by_axis(sample, text=text), _ELEMENTS: size}
            self._extents = self._extents or extents
            self._is_uniform &= extents == self._extents
            for place in extents.keys() & self._extents.keys():
                seen = (extents[place], size, -self.seen, sample)
                most = SAMPLES_KEPT if place == _ELEMENTS else 1
                self._kept[place] = nlargest(most, [*self._kept.get(place, []), seen])

    def batch(self, count: int) -> Any:
        """Return a batch of ``count`` samples as the loader makes it, as large as these samples allow.

        A padded batch is largest with the longest of every field in it; a packed one, with the largest samples.
        """
        if not self._orders:
            with uncounted():
                self._orders = [*self._by_fields_and_by_elements()]
        by_fields, by_elements = self._orders
        chosen = by_fields
        if {*map(id, by_fields[:count])} != {*map(id, by_elements[:count])}:
            with uncounted():
                chosen = max(self._orders, key=lambda order: self._known.elements_of(order, count))
        return self._known.collate(chosen, count)

    def _by_fields_and_by_elements(self) -> tuple[list[Any], list[Any]]:
        """Return the kept samples that collating does not drop in two orders: the longest of fields first, and by size.

        If it drops them all, those of the first are taken. If no batch grows with any of these, none is dropped:
        collating may make one batch of however many.
        """
        known = self._known
        text = known.has_own_collate
        kept: dict[int, Any] = {}
        for place in self._extents:  # the one of elements is the last
            for *_, sample in self._kept[place]:
                kept.setdefault(id(sample), sample)
        by_fields = known.growing(kept.values()) or known.growing(known.reader.first) or [*kept.values()]
        by_elements = sorted(by_fields, key=lambda sample: elements(sample, text=text), reverse=True)
        return by_fields, by_elements
