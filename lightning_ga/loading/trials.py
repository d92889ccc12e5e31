"""Batches for the probe and the measurement: collated from samples, or cut out of a batch that training will see."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

from torch.utils.data import DataLoader

from lightning_ga.batch.layout import LayoutError, elements, leaves, length_of_first
from lightning_ga.batch.pytree import tensors_in
from lightning_ga.loading.cutter import BatchCutter, CutBatch
from lightning_ga.loading.largest import Largest, ScanOrder, largest_samples
from lightning_ga.loading.samples import collate_samples, copied_if_possible, is_kept
from lightning_ga.memory.oom import attempt
from lightning_ga.plan.accumulation import split_evenly, whole_multiples

Move = Callable[[Any], Any]
_FEW_NUMBERS = 2**14  # of a tensor: larger ones are data


class SampleTrials:
    """Batches collated from the samples of a map-style dataset; with a ``cutter``, cut out of a batch of ``most``."""

    def __init__(
        self, loader: "DataLoader[Any]", indices: Sequence[Any], most: int, *, cutter: BatchCutter | None = None
    ) -> None:
        self._loader, self._scan, self._cutter = loader, ScanOrder(loader, indices), cutter
        self.most, self.total = most, len(indices)

    @cached_property
    def _largest(self) -> Largest:
        return largest_samples(self._loader, self._scan)

    @property
    def seen(self) -> int:
        """Number of samples that were scanned for the heaviest."""
        return self._largest.seen

    @property
    def complete(self) -> bool:
        """Whether the scan for the heaviest samples was not cut short."""
        return self._largest.complete

    @property
    def empty(self) -> bool:
        """Whether there is no sample to make a batch of."""
        return not self._scan.first

    def make(self, samples: int, move: Move) -> tuple[Any, Any]:
        """Return a micro-batch of so many of the heaviest samples, moved, and the whole batch that it is cut from."""
        if self._cutter is None:
            return move(self._largest.batch(self._loader, samples)), None
        whole = move(self._largest.batch(self._loader, self.most))
        return self._cutter.cut(whole, 0, samples), whole

    def batch_in_two_parts(self, samples: int, move: Move, seed: int = 0, multiple: int = 1) -> CutBatch | None:
        """Return a batch of samples that differ, in two parts; whole and parts draw the random numbers of a seed."""
        known = [each for each in self._scan.first if each is not None]
        found = unlike(known, samples)
        if len(found) < 2:
            return None
        whole = collate_samples(self._loader, found, len(found), seed=seed)
        if _rows(whole) != len(found):  # the collate function may leave some out
            known = [each for each in known if is_kept(self._loader, each)] or known
            found = unlike(known, samples)
            if len(found) < 2:
                return None
            whole = collate_samples(self._loader, found, len(found), seed=seed)
        whole = move(whole)
        if self._cutter is not None:
            return self._cutter.halves(whole, multiple)
        middle = split_evenly(len(found), 2, multiple)[0]
        apart = found[:middle], found[middle:]
        one, other = (move(collate_samples(self._loader, part, len(part), seed=seed)) for part in apart)
        return CutBatch(whole, (one, other), (middle, len(found) - middle))


class SeenTrials:
    """Batches cut out of one that training will see."""

    def __init__(self, batch: Any, cutter: BatchCutter, most: int) -> None:
        self._batch, self._cutter, self.most, self.seen, self.total = batch, cutter, most, most, most
        self.complete, self.empty = True, batch is None

    def make(self, samples: int, move: Move) -> tuple[Any, Any]:
        """Return so many samples of the batch, moved, and the whole batch."""
        whole = move(copied_if_possible(self._batch))
        return (whole if samples >= self.most else self._cutter.cut(whole, 0, samples)), whole

    def batch_in_two_parts(self, samples: int, move: Move, seed: int = 0, multiple: int = 1) -> CutBatch | None:
        """Return the first samples of the batch, in two parts."""
        whole = move(copied_if_possible(self._batch))
        number = self._cutter.count(whole)
        if min(number, samples) < 2:
            return None
        samples = whole_multiples(min(number, samples), multiple)
        return self._cutter.halves(whole if number == samples else self._cutter.cut(whole, 0, samples), multiple)


TrialBatches = SampleTrials | SeenTrials
"""Source of batches for probe and measurement; it leaves no trace in dataset, collate function or random numbers.

``most`` is the number of samples of the largest micro-batch. ``seen`` of ``total`` samples were scanned for the
heaviest; ``complete`` says whether that scan was not cut short.
"""


def _rows(batch: Any) -> int | None:
    rows: int | None = attempt(length_of_first, lambda error: isinstance(error, LayoutError), batch).result
    return rows


def unlike(samples: Sequence[Any], number: int) -> list[Any]:
    """Return some of the samples, as unlike as possible: in size, numbers that losses ignore, labels.

    Those that are alike are neighbours, so that the halves differ most. The first half has only samples that are
    shorter than the longest, if there are any: it is padded less than the whole. If these are few, they are repeated.
    """
    number = min(number, len(samples))
    ordered = sorted(samples, key=_traits)
    found = _spread_over(ordered, number)
    half = (number + 1) // 2
    shorter = _shorter(ordered)
    if shorter and not all(any(each is other for other in shorter) for each in found[:half]):
        found[:half] = _spread_over(shorter, half)
    return found


def _spread_over(ordered: Sequence[Any], number: int) -> list[Any]:
    step = (len(ordered) - 1) / max(1, number - 1)
    return [ordered[round(place * step)] for place in range(number)]


def _shorter(samples: Sequence[Any]) -> list[Any]:
    """Return the samples that are below the largest in every extent that varies, or else in the number of elements."""
    extents = []
    for sample in samples:
        shapes = leaves(sample, text=False)
        extents.append({(field, axis): extent for field, shape in shapes for axis, extent in enumerate(shape)})
    largest = {place: max(each.get(place, 0) for each in extents) for place in set().union(*extents)}
    varying = [place for place, extent in largest.items() if any(each.get(place, 0) < extent for each in extents)]
    below = [all(each.get(place, 0) < largest[place] for place in varying) for each in extents]
    if not varying:
        return []
    found = [sample for sample, is_below in zip(samples, below) if is_below]
    if found:
        return found
    sizes = [elements(sample) for sample in samples]
    return [sample for sample, size in zip(samples, sizes) if size < max(sizes)]


def _traits(sample: Any) -> tuple[float, ...]:
    """Return traits in which samples differ: number of elements, ignored numbers, and labels."""
    tensors = [tensor for tensor in tensors_in(sample) if tensor.numel() <= _FEW_NUMBERS and not tensor.is_complex()]
    plain = [tensor.to_dense() for tensor in tensors if not tensor.is_nested]
    ignored = sum(int((each.isnan() if each.is_floating_point() else each < 0).sum()) for each in plain)
    whole = [each.double().mean().item() for each in plain if each.numel() and not each.is_floating_point()]
    fields = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, (list, tuple)) else ()
    labels = [float(value) for value in fields if isinstance(value, int)]
    return sum(prod(shape) for _, shape in leaves(sample, text=False)), float(ignored), sum((*whole, *labels))
