"""Read how large the samples of a map-style dataset are, and cut its windows by that (``plan/lengths.py``)."""

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from operator import index
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_ga.batch.layout import Field, elements, leaves
from lightning_ga.errors import UserError
from lightning_ga.loading.largest_samples import SAMPLES_KEPT, ScanOrder
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.recipe_batches import SourceSettings
from lightning_ga.loading.sampler import FromBatches
from lightning_ga.loading.samples import collate_samples, collect_samples, fetched, untouched
from lightning_ga.loading.training_source import MicroBatchSource, TrainingSource
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.lengths import SizedShares, SizeLimits, plan_by_size, sample_order, token_windows
from lightning_ga.plan.schedule import Growth
from lightning_ga.plan.windows import EpochPlan, Windows

Place = tuple[Field, int]  # a field and an axis of it
SizeOf = Callable[[Any, Any], int] | str
_AT_ONCE = 64  # samples that are read together
_LARGEST = 2**31 - 1


class SizedSource(MicroBatchSource):
    """A DataLoader whose windows are cut by the sizes of their samples, once their limits are known.

    Sizes are read once, of all samples that an epoch may hold.
    """

    def __init__(
        self, loader: "DataLoader[Any]", settings: SourceSettings, size_of: SizeOf, tokens: int | None = None
    ) -> None:
        super().__init__(loader, settings)
        if self.streams or isinstance(self.recipe.order, FromBatches):
            sampler = type(getattr(loader, "batch_sampler", None)).__name__
            why = "a stream has no indices" if self.streams else f"here the batch sampler {sampler} decides that"
            given = "size_of=" if tokens is None else f"effective_batch_size='{tokens} tokens'"
            shown = "" if tokens is not None else "name what shows the sizes in a batch, as in size_of='attention_mask'"
            by_batch = shown and (f"{shown}, or " if self.streams else f'{shown}, with micro_batching="step", or ')
            raise UserError(
                f"{given} decides by index which samples of a window share a batch, and {why}: {by_batch}leave {given} "
                "out."
            )
        if tokens is not None and self.sharded_ranks > 1:
            raise UserError(
                f"effective_batch_size='{tokens} tokens' ends windows by the order of samples, and each rank has an "
                "order of its own: give a number of samples, or let the Trainer share one order among the ranks."
            )
        self._size_of, self._longest = size_of, 1
        self._tokens = tokens  # most of a window; none if it has a number of samples
        self._largest: dict[tuple[int, int], int] = {}  # samples of a window, by epoch and seed
        self._limits: tuple[int, SizeLimits] | None = None  # where so many of the longest samples fit

    @cached_property
    def _sizes(self) -> "array[int] | dict[Any, int]":
        pool = self.recipe.order.pool(self.sampler.epoch, self.sampler.seed)
        return self._read(pool) if isinstance(pool, range) else dict(zip(pool, self._read(pool)))

    @property
    def longest(self) -> int:
        """Size of the largest sample that is known, at least 1."""
        _ = self._sizes
        return self._longest

    def some_of(self, least: int) -> tuple[int, list[Any]]:
        """Return the smallest size that is neither below the median nor ``least``, and some samples of that size."""
        sizes = [self._sizes[each] for each in self._descending]
        size = sizes[_last_of_use(sizes, least)]
        same = [each for each, found in zip(self._descending, sizes) if found == size][:SAMPLES_KEPT]
        return max(1, size), collect_samples(self.recipe.loader, same)

    @cached_property
    def _descending(self) -> list[Any]:
        """The indices of all samples, those of the largest first."""
        indices = range(len(self._sizes)) if isinstance(self._sizes, array) else self._sizes
        return sorted(indices, key=self._sizes.__getitem__, reverse=True)

    @cached_property
    def _packs(self) -> bool:
        """Whether a batch holds what its samples hold, and no padding beside."""
        largest, smallest = self._descending[0], self._descending[-1]
        if self._sizes[largest] == self._sizes[smallest]:
            return False
        loader, samples = self.recipe.loader, collect_samples(self.recipe.loader, [largest, smallest])
        alone = sum(elements(collate_samples(loader, [each], 1)) for each in samples)
        return elements(collate_samples(loader, samples, 2)) <= alone

    def _scan_order(self, epoch: int) -> ScanOrder:
        """Look at the largest samples first."""
        return ScanOrder(self.recipe.loader, self._descending, len(self._descending))

    def keep_within(self, limits: SizeLimits, micro_batch: int) -> None:
        """Cut by these limits, which hold if ``micro_batch`` of the longest samples fit."""
        self._limits = micro_batch, limits

    def relative_size(self, number: int) -> tuple[int, int]:
        """Return the size of the longest sample in the ``number``-th micro-batch, and that of the longest there is."""
        cut, chunk = self.epoch_plan.cut, self.chunk(number)
        if not chunk.count or not isinstance(cut, SizedShares):
            return 1, 1
        start = chunk.window_end - chunk.window_samples
        return max(1, cut.sizes[start + sample_order(self.epoch_plan, chunk.window)[chunk.start - start]]), self.longest

    def largest_window(self, epoch: int) -> int | None:
        """Return the samples of an epoch's largest window, if tokens decide where windows end."""
        if self._tokens is None:
            return None
        key = epoch, self.sampler.seed
        if key not in self._largest:
            windows, total = self._windows(epoch, None), self.recipe.total(epoch)
            if not windows.count and total:
                raise UserError(
                    f"effective_batch_size='{self._tokens} tokens' is more than an epoch holds, and drop_last=True "
                    "drops the only window: use drop_last=False or fewer tokens."
                )
            counts = (windows.span(window)[1] for window in range(windows.count or 0))
            self._largest[key] = max((self.world_size, *counts))
        return self._largest[key]

    def _windows(self, epoch: int, effective: int | Growth | None, samples_done: int = 0) -> Windows:
        if self._tokens is None:
            return super()._windows(epoch, effective, samples_done)
        drops = self.recipe.drops_last(epoch)
        return token_windows(self._drawn(epoch), self._tokens, drop_last=drops, samples_done=samples_done)

    def _cut(
        self, windows: Windows, epoch: int, effective: int | None, micro_batch: int
    ) -> tuple[AccumulationPlan, EpochPlan]:
        plan, epoch_plan = super()._cut(windows, epoch, effective, micro_batch)
        if self._limits is None:
            return plan, epoch_plan
        of, limits = self._limits
        cut = SizedShares(self._drawn(epoch), limits.lowered(micro_batch, of=of), packs=self._packs)
        over_ranks = self.recipe.settings.largest_over_ranks
        return plan_by_size(plan, epoch_plan, cut, tokens=self._tokens, largest_over_ranks=over_ranks)

    def _drawn(self, epoch: int) -> "array[int]":
        """Return the sizes of an epoch's samples in their order; those that no earlier one could hold are read now."""
        drawn = self.recipe.order.draw(epoch, self.sampler.seed)[: self.recipe.total(epoch)]
        found = drawn.tolist() if isinstance(drawn, Tensor) else list(drawn)
        if isinstance(self._sizes, dict) and (new := [each for each in found if each not in self._sizes]):
            self._sizes.update(zip(new, self._read(new)))
        return array("q", map(self._sizes.__getitem__, found))

    def _read(self, indices: Sequence[Any]) -> "array[int]":
        """Read the sizes of some samples."""
        dataset, size_of = self.recipe.loader.dataset, self._size_of
        if callable(size_of):
            with untouched(dataset):
                sizes = array(
                    "q", (_size(_called(size_of, dataset, each), f"returned for {each!r}") for each in indices)
                )
        elif (column := _column(dataset, size_of)) is not None:
            sizes = array("q", (_size(column[each], f"names for {each!r}") for each in indices))
        else:
            sizes = self._read_samples(indices, size_of)
        self._longest = max([self._longest, *sizes])
        return sizes

    def _read_samples(self, indices: Sequence[Any], name: str) -> "array[int]":
        loader, measure = self.recipe.loader, partial(_by_name, name=name)
        if name == "auto":  # by the samples that the probe looks at, too
            text = loader.collate_fn is not default_collate  # which leaves text as it is
            first = super()._scan_order(self.sampler.epoch).first.read()
            places = _varying(first, text=text)
            if self._tokens is not None and not places:
                raise UserError(
                    f"effective_batch_size='{self._tokens} tokens' needs sizes, and no extent varies among the samples "
                    "that size_of='auto' looks at: name what counts as tokens, as in size_of='input_ids'."
                )
            measure = partial(_by_shape, places=places, text=text)
        lists = ([*indices[start : start + _AT_ONCE]] for start in range(0, len(indices), _AT_ONCE))
        with fetched(loader, lists, partial(_measured, measure), workers=max(1, loader.num_workers)) as found:
            return array("q", (size for some in found for size in some))


class SizedBatches:
    """The sizes that batches show, among the samples that are looked at before training."""

    def __init__(self, source: TrainingSource, reader: BatchReader) -> None:
        self.source, self._reader = source, reader
        loader = source.user_loader
        self._samples = source.scan_order(source.sampler.epoch).first.read()
        batch = collate_samples(loader, self._samples, len(self._samples)) if self._samples else None
        slices = None if batch is None else reader.sorted_slices(reader.on_host(batch), on_host=True)
        self._order, self._sizes = ((), (1,)) if slices is None else (slices.order, slices.sizes)
        self.longest = source.recipe.settings.largest_over_ranks(max(1, self._sizes[0]))

    def keep_within(self, limits: SizeLimits, micro_batch: int) -> None:
        """Cut by these limits, which hold if ``micro_batch`` of the longest samples fit."""
        self.source.size_limits = micro_batch, limits
        self._reader.keep_within(limits, micro_batch)

    def some_of(self, least: int) -> tuple[int, list[Any]]:
        """Return the smallest size that is neither below the median nor ``least``, and some samples of that size."""
        size = self._sizes[_last_of_use(self._sizes, least)]
        return max(1, size), [self._samples[place] for place, each in zip(self._order, self._sizes) if each == size]


Sized = SizedSource | SizedBatches


def _last_of_use(descending: Sequence[int], least: int) -> int:
    """Return the place of the smallest size that is neither below the median nor ``least``."""
    upper = descending[: len(descending) // 2 + 1]
    return max(place for place, size in enumerate(upper) if size >= min(least, descending[0]))


def _called(size_of: Callable[[Any, Any], int], dataset: Any, place: Any) -> int:
    try:
        return size_of(dataset, place)
    except Exception as error:
        error.add_note(f"size_of= raised this when it was called with the dataset and the index {place!r}.")
        raise


def _measured(measure: Callable[[Any], int], samples: Iterable[Any]) -> list[int]:
    return [measure(sample) for sample in samples]


def _size(value: Any, where: str) -> int:
    """Return a whole number as it is, and the length of anything else."""
    size = None
    with suppress(TypeError):  # a tensor of one number is one, too
        size = len(value) if getattr(value, "ndim", hasattr(value, "__len__")) else index(value)
    if size is None or not 0 <= size <= _LARGEST:
        raise UserError(
            f"What size_of= {where} is {value!r}: a size is a whole number of at least 0 and at most {_LARGEST:,}, or "
            "has a length."
        )
    return size


def _column(dataset: Any, name: str) -> Any:
    """Return what holds the value of every sample, if the dataset has an attribute or a column of that name."""
    of_hugging_face = name in (getattr(dataset, "column_names", None) or ())
    column: Any = dataset[name] if of_hugging_face else getattr(dataset, name, None)
    return column if hasattr(column, "__getitem__") and len(column) == len(dataset) else None


def _by_name(sample: Any, *, name: str) -> int:
    value: Any = sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
    if value is None:
        raise UserError(f"size_of={name!r} is neither an attribute of the dataset nor of a sample, nor a key of one.")
    return _size(value, f"{name!r} names")


def _extents(sample: Any, *, text: bool) -> dict[Place, int]:
    return {(field, axis): extent for field, shape in leaves(sample, text=text) for axis, extent in enumerate(shape)}


def _varying(samples: Iterable[Any], *, text: bool) -> set[Place]:
    """Return the axes of fields along which the extent varies."""
    seen = [_extents(sample, text=text) for sample in samples]
    return {place for each in seen for place in each if len({other.get(place) for other in seen}) > 1}


def _by_shape(sample: Any, *, places: Collection[Place], text: bool) -> int:
    """Return the largest of the extents that vary; 1 if none does."""
    return max((extent for place, extent in _extents(sample, text=text).items() if place in places), default=1)
