"""Read how large the samples of a map-style dataset are, and cut its windows by that (``plan/size_cuts.py``).

Tested in tests/integration/test_unequal_lengths.py.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from operator import index
from typing import Any

from torch.utils.data import DataLoader, default_collate

from lightning_ga.batch.layout import leaves
from lightning_ga.errors import UserError
from lightning_ga.loading.largest import SAMPLES_KEPT
from lightning_ga.loading.orders import Order
from lightning_ga.loading.sampler import listed
from lightning_ga.loading.samples import SAMPLES_AT_ONCE, Samples
from lightning_ga.loading.trial_batches import BatchCutter, TrialBatches
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.size_cuts import SizeLimits, plan_by_size
from lightning_ga.plan.windows import EpochPlan
from lightning_ga.snapshot.untouched import untouched

SizeOf = Callable[[Any, Any], int] | str
_LARGEST = 2**31 - 1


class SampleSizes:
    """The sizes of samples, read once, and the limits by which micro-batches are cut, once they are known."""

    def __init__(self, loader: "DataLoader[Any]", size_of: SizeOf, order: Order, seed: int) -> None:
        self._loader = loader
        self._size_of = size_of
        self._order = order
        self._seed = seed
        self.limits: tuple[int, SizeLimits] | None = None  # how many of the longest fit, and the limits then

    def set_limits(self, samples: int, limits: SizeLimits) -> None:
        """Cut by these limits from here on; so many of the longest samples fit."""
        self.limits = samples, limits

    def follow(self, earlier: "SampleSizes") -> None:
        """Cut by the limits of data that were loaded before."""
        self.limits = earlier.limits

    @cached_property
    def _sizes(self) -> dict[Any, int]:
        pool = self._order.pool(0, self._seed)
        return dict(zip(pool, self._read(pool)))

    @property
    def longest(self) -> int:
        """Size of the largest sample that is known, at least 1."""
        return max(1, self._sizes[self.descending[0]] if self._sizes else 1)

    @cached_property
    def descending(self) -> list[Any]:
        """The indices of all samples, those of the largest first."""
        return sorted(self._sizes, key=self._sizes.__getitem__, reverse=True)

    def shorter_trials(self, least: int, cutter: BatchCutter) -> tuple[int, TrialBatches]:
        """Return the smallest size ≥ ``least`` and ≥ the median, and batches of samples of that size."""
        sizes = [self._sizes[each] for each in self.descending]
        size = min(each for each in sizes[: len(sizes) // 2 + 1] if each >= min(least, sizes[0]))
        same = [each for each, found in zip(self.descending, sizes) if found == size][:SAMPLES_KEPT]
        return max(1, size), TrialBatches(Samples(self._loader, same, trusted=True), cutter, len(sizes))

    def cut(self, plan: AccumulationPlan, epoch: EpochPlan, drawn: Any) -> tuple[AccumulationPlan, EpochPlan]:
        """Cut an epoch by the sizes of its samples, which are given in order, once the limits are known."""
        if self.limits is None:
            return plan, epoch
        indices = listed(drawn)
        of, limits = self.limits
        if new := [each for each in indices if each not in self._sizes]:  # no earlier epoch had these
            self._sizes.update(zip(new, self._read(new)))
        sizes = array("q", map(self._sizes.__getitem__, indices))
        return plan_by_size(plan, epoch, sizes, limits.lowered(epoch.micro_batch, of=of))

    def _read(self, indices: Sequence[Any]) -> "array[int]":
        """Read the sizes of some samples."""
        dataset = self._loader.dataset
        size_of = self._size_of
        if callable(size_of):
            with untouched(dataset):
                return array("q", (_called(size_of, dataset, each) for each in indices))
        if (column := _column(dataset, size_of)) is not None:
            return array("q", (_size(column[each], f"names for {each!r}") for each in indices))
        measure: Callable[[Iterable[Any]], list[int]] = partial(_by_name, name=size_of)
        if size_of == "auto":  # read from a few samples
            text = self._loader.collate_fn is not default_collate  # that leaves text as it is
            seen = [_extents(sample, text=text) for sample in Samples(self._loader, indices, trusted=True).first]
            places = {place for each in seen for place in each}
            varying = {place for place in places if len({each.get(place) for each in seen}) > 1}
            measure = partial(_by_shape, places=varying, text=text)
        lists = ([*indices[at : at + SAMPLES_AT_ONCE]] for at in range(0, len(indices), SAMPLES_AT_ONCE))
        workers = max(1, self._loader.num_workers)
        with Samples(self._loader).fetched(lists, measure, workers=workers) as reports:
            return array("q", (size for some in reports for size in some))


def _called(size_of: Callable[[Any, Any], int], dataset: Any, place: Any) -> int:
    try:
        value = size_of(dataset, place)
    except Exception as error:
        error.add_note(f"size_of= raised this when it was called with the dataset and the index {place!r}.")
        raise
    return _size(value, f"returned for {place!r}")


def _size(value: Any, source: str) -> int:
    """Return a whole number as it is, and the length of anything else."""
    size = None
    with suppress(TypeError):  # a tensor of one number is one, too
        if getattr(value, "ndim", hasattr(value, "__len__")):
            size = len(value)
        else:
            size = index(value)
    if size is None or not 0 <= size <= _LARGEST:
        raise UserError(
            f"What size_of= {source} is {value!r}: a size is a whole number of at least 0 and at most {_LARGEST:,}, or "
            "has a length."
        )
    return size


def _column(dataset: Any, name: str) -> Any:
    """Return the values of all samples, if the dataset has an attribute or a column of that name."""
    of_hugging_face = name in (getattr(dataset, "column_names", None) or ())
    column: Any = dataset[name] if of_hugging_face else getattr(dataset, name, None)
    if hasattr(column, "__getitem__") and len(column) == len(dataset):
        return column
    return None


def _by_name(samples: Iterable[Any], *, name: str) -> list[int]:
    values = [each.get(name) if isinstance(each, Mapping) else getattr(each, name, None) for each in samples]
    if any(value is None for value in values):
        raise UserError(f"size_of={name!r} is neither an attribute of the dataset nor of a sample, nor a key of one.")
    return [_size(value, f"{name!r} names") for value in values]


def _extents(sample: Any, *, text: bool) -> dict[tuple[str, int], int]:
    return {(field, axis): extent for field, shape in leaves(sample, text=text) for axis, extent in enumerate(shape)}


def _by_shape(samples: Iterable[Any], *, places: set[tuple[str, int]], text: bool) -> list[int]:
    """Return the largest of the extents that vary; 1 if none does."""
    found = (_extents(sample, text=text) for sample in samples)
    return [max((each[place] for place in places & each.keys()), default=1) for each in found]
