"""Read how large the samples of a map-style dataset are, and cut its windows by that (``plan/size_cuts.py``).

Tested in tests/integration/test_sample_sizes.py.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain
from operator import index
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_ga.batch.layout import leaves
from lightning_ga.errors import UserError
from lightning_ga.loading.known_samples import SAMPLES_AT_ONCE, KnownSamples
from lightning_ga.loading.largest import SAMPLES_KEPT
from lightning_ga.loading.orders import Order
from lightning_ga.loading.sampler import listed
from lightning_ga.loading.trial_batches import BatchCutter, TrialBatches
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.size_cuts import SizeLimits, plan_by_size
from lightning_ga.plan.windows import EpochPlan
from lightning_ga.snapshot.untouched import untouched

SizeOf = Callable[[Any, Any], int] | str
_Axis = tuple[str, int]  # field and axis
_LARGEST = 2**31 - 1


class SampleSizes:
    """The sizes of samples, read once, and the limits by which micro-batches are cut, once they are known."""

    def __init__(self, loader: "DataLoader[Any]", size_of: SizeOf, order: Order, epoch: int) -> None:
        self._loader = loader
        self._size_of = size_of
        self._order = order
        self._epoch = epoch  # that the data were set up in
        self.limits: SizeLimits | None = None
        self._largest_that_fit = 0  # how many of the largest samples these limits were found for

    def set_limits(self, samples: int, limits: SizeLimits) -> None:
        """Cut by these limits from here on; so many of the longest samples fit."""
        self.limits = limits
        self._largest_that_fit = samples

    def follow(self, earlier: "SampleSizes") -> None:
        """Cut by the limits of data that were loaded before."""
        self.limits = earlier.limits
        self._largest_that_fit = earlier._largest_that_fit

    @cached_property
    def _sizes(self) -> dict[Any, int]:
        pool = self._order.pool(self._epoch)
        return dict(zip(pool, self._read(pool)))

    @property
    def largest(self) -> int:
        """Size of the largest sample that is known, at least 1."""
        return max(1, max(self._sizes.values(), default=1))

    @cached_property
    def by_size(self) -> list[Any]:
        """The indices of the samples that are known, those of the largest first."""
        return sorted(self._sizes, key=self._sizes.__getitem__, reverse=True)

    def trials_of_smaller(self, least: int, cutter: BatchCutter) -> tuple[int, TrialBatches]:
        """Return the smallest size ≥ ``least`` and ≥ the median, and batches of samples of that size."""
        indices = self.by_size
        sizes = [*map(self._sizes.__getitem__, indices)]
        larger = sizes[: len(sizes) // 2 + 1]
        size = min(each for each in larger if each >= min(least, sizes[0]))
        start = sizes.index(size)
        same = indices[start : start + min(sizes.count(size), SAMPLES_KEPT)]
        return max(1, size), TrialBatches(KnownSamples(self._loader, same, trusted=True), cutter, len(sizes))

    def cut(self, plan: AccumulationPlan, epoch: EpochPlan, drawn: Any) -> tuple[AccumulationPlan, EpochPlan]:
        """Cut an epoch by the sizes of its samples, which are given in order, once the limits are known."""
        if self.limits is None:
            return plan, epoch
        indices = listed(drawn)
        new = [each for each in indices if each not in self._sizes]  # no earlier epoch had these
        if new:
            self._sizes.update(zip(new, self._read(new)))
        sizes = array("q", map(self._sizes.__getitem__, indices))
        limits = self.limits.lowered(epoch.micro_batch, of=self._largest_that_fit)
        return plan_by_size(plan, epoch, sizes, limits)

    def _read(self, indices: Sequence[Any]) -> "array[int]":
        """Read the sizes of some samples."""
        dataset = self._loader.dataset
        size_of = _column(dataset, self._size_of)
        if callable(size_of):
            with untouched(dataset):
                return array("q", map(partial(_called, size_of, dataset), indices))
        measure: Callable[[Any], int] = partial(_by_name, name=size_of)
        if size_of == "auto":  # read from a few samples
            known = KnownSamples(self._loader, indices, trusted=True)
            text = known.has_own_collate
            measure = partial(_by_shape, axes=_varying_axes(known.first, text), text=text)
        lists = BatchSampler(indices, SAMPLES_AT_ONCE, drop_last=False)
        measured = partial(_measured, measure)
        with KnownSamples(self._loader).fetched(lists, measured, workers=self._loader.num_workers) as reports:
            return array("q", chain.from_iterable(reports))


def _called(size_of: Callable[[Any, Any], int], dataset: Any, place: Any) -> int:
    try:
        value = size_of(dataset, place)
    except Exception as error:
        error.add_note(f"size_of= raised this when it was called with the dataset and the index {place!r}.")
        raise
    return _size(value, f"returned for {place!r}")


def _size(value: Any, source: str) -> int:
    """Return a whole number as it is, also that of a tensor without axes, and the length of anything else."""
    size = None
    with suppress(TypeError):
        is_number = not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0
        size = index(value) if is_number else len(value)
    if size is None or not 0 <= size <= _LARGEST:
        raise UserError(
            f"What size_of= {source} is {value!r}: a size is a whole number of at least 0 and at most {_LARGEST:,}, or "
            "has a length."
        )
    return size


def _column(dataset: Any, size_of: SizeOf) -> SizeOf:
    """Return a function that reads the attribute or column of that name, if a dataset has one for all samples."""
    if callable(size_of):
        return size_of
    of_hugging_face = size_of in (getattr(dataset, "column_names", None) or ())
    column: Any = dataset[size_of] if of_hugging_face else getattr(dataset, size_of, None)
    if hasattr(column, "__getitem__") and len(column) == len(dataset):
        return lambda _, place: column[place]
    return size_of


def _by_name(sample: Any, *, name: str) -> int:
    value = sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
    if value is None:
        raise UserError(f"size_of={name!r} is neither an attribute of the dataset nor of a sample, nor a key of one.")
    return _size(value, f"{name!r} names")


def _extents(sample: Any, *, text: bool) -> dict[_Axis, int]:
    return {(field, axis): extent for field, shape in leaves(sample, text=text) for axis, extent in enumerate(shape)}


def _varying_axes(samples: Sequence[Any], text: bool) -> set[_Axis]:
    """Return the axes along which samples have different extents."""
    times: Counter[tuple[_Axis, int]] = Counter()
    for sample in samples:
        times.update(_extents(sample, text=text).items())
    return {axis for (axis, _), count in times.items() if count < len(samples)}


def _by_shape(sample: Any, *, axes: set[_Axis], text: bool) -> int:
    """Return the largest of the extents that vary; 1 if none does."""
    extents = _extents(sample, text=text)
    return max(map(extents.__getitem__, axes & extents.keys()), default=1)


def _measured(measure: Callable[[Any], int], samples: Iterable[Any]) -> list[int]:
    """Return the sizes of samples; a data worker sends only these."""
    return list(map(measure, samples))
