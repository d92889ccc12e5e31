"""Read how large the samples of a map-style dataset are, and cut its windows by that (``plan/size_cuts.py``).

Tested in tests/integration/test_sample_sizes.py.
"""

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain
from math import ceil
from operator import index
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_ga.batch.layout import extents_by_axis
from lightning_ga.errors import UserError
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.largest import SAMPLES_KEPT
from lightning_ga.loading.orders import Order
from lightning_ga.loading.rebatch import has_own_collate, length_of
from lightning_ga.loading.sample_reader import SAMPLES_AT_ONCE, SampleReader
from lightning_ga.loading.sampler import listed
from lightning_ga.loading.trial_batches import BatchCutter, TrialBatches
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.size_cuts import SizeLimits, plan_by_size
from lightning_ga.plan.windows import EpochPlan
from lightning_ga.snapshot.user_objects import untouched

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
        # Samples of a micro-batch of short ones, lowered after an error.
        self.most_of_short = _LARGEST
        self._largest_that_fit = 0  # how many of the largest samples these limits were found for
        self._shared: _Shared | None = None  # what "auto" measures by, from the first time that it reads samples on

    def set_limits(self, samples: int, limits: SizeLimits) -> None:
        """Cut by these limits from here on; so many of the longest samples fit."""
        self.limits = limits
        self._largest_that_fit = samples

    def follow(self, earlier: "SampleSizes") -> None:
        """Cut by the limits of data that were loaded before, and measure as these were."""
        self.limits = earlier.limits
        self.most_of_short = earlier.most_of_short
        self._largest_that_fit = earlier._largest_that_fit
        self._shared = earlier._shared

    @cached_property
    def _sizes(self) -> dict[Any, int]:
        pool = listed(self._order.pool(self._epoch))
        first = next(iter(pool), None)
        if not isinstance(first, Hashable):
            raise UserError(
                f"The sampler yields {first!r}, a {type(first).__name__}, and size_of= needs an index for each sample: "
                "let it yield single indices, or leave size_of= out."
            )
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
        """Return the smallest size ≥ ``least`` and ≥ the median, and batches of samples of that size.

        Shorter ones get no more samples than these, so a usual size is tried.
        """
        indices = self.by_size
        sizes = [*map(self._sizes.__getitem__, indices)]
        at_least_median = sizes[: len(sizes) // 2 + 1]
        size = min(each for each in at_least_median if each >= min(least, sizes[0]))
        start = sizes.index(size)
        same = indices[start : start + min(sizes.count(size), SAMPLES_KEPT)]
        # Of smaller samples more fit than of the largest, at most all that there are.
        known = KnownSamples(self._loader, lambda: same, trusted=True)
        return max(1, size), TrialBatches(cutter, len(sizes), known=known)

    def cut(self, plan: AccumulationPlan, epoch: EpochPlan, drawn: Any) -> tuple[AccumulationPlan, EpochPlan]:
        """Cut an epoch by the sizes of its samples, which are given in order, once the limits are known."""
        if self.limits is None:
            return plan, epoch
        indices = listed(drawn)
        new = [each for each in indices if each not in self._sizes]  # no earlier epoch had these
        if new:
            self._sizes.update(zip(new, self._read(new)))
            vars(self).pop("by_size", None)  # is sorted anew when it is asked for
        sizes = array("q", map(self._sizes.__getitem__, indices))
        limits = self.limits.lowered(epoch.micro_batch, of=self._largest_that_fit)
        if epoch.micro_batch == 1:  # of the longest: the limit can fall no more, and short ones have a bound
            limits = replace(limits, samples=min(limits.samples, self.most_of_short))
        return plan_by_size(plan, epoch, sizes, limits)

    def _read(self, indices: Sequence[Any]) -> "array[int]":
        """Read the sizes of some samples."""
        if self._size_of == "auto":
            return self._read_shapes(indices)
        dataset = self._loader.dataset
        size_of = _column(dataset, self._size_of)
        if callable(size_of):
            with untouched(dataset):
                return array("q", map(partial(_called, size_of, dataset), indices))
        with self._measured(indices, partial(_by_name, name=size_of)) as sizes:
            return array("q", sizes)

    def _read_shapes(self, indices: Sequence[Any]) -> "array[int]":
        text = has_own_collate(self._loader)
        with self._measured(indices, partial(extents_by_axis, text=text)) as extents:
            if self._shared is not None:
                return array("q", map(self._shared.size, extents))
            self._shared, sizes = _read_shared(extents)
            return sizes

    @contextmanager
    def _measured(self, indices: Sequence[Any], measure: Callable[[Any], Any]) -> Iterator[Iterator[Any]]:
        """Return a context that yields what ``measure`` returns for some samples; data workers send only that."""
        lists = BatchSampler(indices, SAMPLES_AT_ONCE, drop_last=False)
        read = partial(_of_each, measure)
        with SampleReader(self._loader).fetched(lists, read, workers=self._loader.num_workers) as reports:
            yield chain.from_iterable(reports)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the samples of the first epoch have in common, by which all samples are measured.

    A sample's size is the largest of its extents along the other axes: that of spectra of shape (80, t) is t. If they
    have all in common, it is the largest of these: of (80, 100) it is 100. The unit stays that of the
    limits: a later sample that is n times longer along a common axis counts n times as much, (160, 100) then as 200.
    """

    extents: dict[_Axis, int]
    least: int  # size of a sample that has no other axes

    def size(self, extents: dict[_Axis, int]) -> int:
        """Return the size of a sample of these extents."""
        size = self.least
        times = Fraction(1)
        for axis, extent in extents.items():
            common = self.extents.get(axis)
            if common is None:
                size = max(size, extent)
            else:
                times = max(times, Fraction(extent, max(1, common)))
        return ceil(size * times)


def _read_shared(samples: Iterable[dict[_Axis, int]]) -> tuple[_Shared, "array[int]"]:
    """Return what samples of these extents have in common, and their sizes."""
    shared: dict[_Axis, int] | None = None
    sizes = array("q")
    for extents in samples:
        if shared is None:
            shared = dict(extents)
        differing = {axis: extent for axis, extent in shared.items() if extents.get(axis) != extent}
        for axis, extent in differing.items():  # all samples before this one have this extent there
            del shared[axis]
            sizes = array("q", map(partial(max, extent), sizes))
        sizes.append(max((extents[axis] for axis in extents.keys() - shared.keys()), default=0))
    shared = shared or {}
    least = 1 if any(sizes) else max(shared.values(), default=1)  # 1 if there are other axes
    return _Shared(shared, least), array("q", map(partial(max, least), sizes))


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
    if hasattr(column, "__getitem__") and length_of(column) == len(dataset):
        rows = getattr(column, "iloc", column)  # columns of data frames are indexed by label otherwise
        return lambda _, place: rows[place]
    return size_of


def _by_name(sample: Any, *, name: str) -> int:
    value = sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
    if value is None:
        raise UserError(f"size_of={name!r} is neither an attribute of the dataset nor of a sample, nor a key of one.")
    return _size(value, f"{name!r} names")


def _of_each(measure: Callable[[Any], Any], samples: Iterable[Any]) -> list[Any]:
    return list(map(measure, samples))
