"""Read training data whose batches cannot be made anew: they are read as they come, and cut in the training step.

Dictionaries of loaders, loaders that yield whole batches, iterables of any kind. Windows are counted in
batches, as other sources count them in samples. A stream that cannot be restarted loses nothing: a batch
that is read before training begins is given to training all the same.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import gcd
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ga.batch.layout import Layout, LayoutError, Slice
from lightning_ga.batch.split import SplitBatch, cut, split_by_hook
from lightning_ga.errors import UserError
from lightning_ga.loading.batch_source import BatchSource, CollatedBatches, ReadyMadeBatches, indices_of, is_collated
from lightning_ga.loading.largest_samples import ScanOrder
from lightning_ga.loading.peekable import peekable_stream
from lightning_ga.loading.reader import check_proportion, gather, largest_extent, length_of_first
from lightning_ga.loading.source import MicroBatchSource
from lightning_ga.loading.stateful import keeps_place
from lightning_ga.loading.training_source import SourceSettings
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.windows import Chunk

_PEEKED = 2  # batches that are read ahead, as two may differ in size


@dataclass(frozen=True, slots=True)
class Batches:
    """Training data as a fit loop would read them.

    Attributes:
        loaders: The loaders that a batch comes from.
        combine: Makes one batch out of those of all loaders.
        start: Starts them anew and yields batches.
        length: How many there are on this rank; ``None`` if that is not known.
    """

    loaders: Sequence[Any]
    combine: Callable[[list[Any]], Any]
    start: Callable[[], Iterator[Any]]
    length: int | None


class PrebatchedSource:
    """A ``TrainingSource`` of such data: windows of whole batches.

    Samples are counted in each batch; where their number is needed in advance, all batches count as many
    as the first. Where samples cannot be separated, a batch counts as one.

    Args:
        batches: The training data.
        settings: How the Trainer reads its data.
        hook: The module's own ``split_batch``, if it has one.
    """

    streams = counted_later = may_drop = cut_in_step = True
    keeps_groups = False
    workers = 0

    def __init__(self, batches: Batches, settings: SourceSettings, *, hook: SplitBatch | None = None) -> None:
        self._data, self._hook = batches, hook
        self._stream = peekable_stream(batches.start, batches.length)
        self._source = MicroBatchSource(
            DataLoader(self._stream, batch_size=1, collate_fn=_only), settings, own_seed=torch.Generator()
        )
        self._user_loader: DataLoader[Any] | None = None
        self._shows_samples = True
        self.sizes = self._sizes_of_loaders()
        self._each: int = settings.largest_over_ranks(self._samples_of_first())

    @cached_property
    def batch_source(self) -> BatchSource:
        """Samples or other batches, from which the layout of a batch can be read."""
        loaders = self._data.loaders
        if all(map(is_collated, loaders)):
            return CollatedBatches(loaders, [partial(indices_of, part) for part in loaders], self._data.combine)
        return ReadyMadeBatches(self._looked_at)

    def recipe_effective(self, epoch: int) -> int:
        """Return the samples of a window."""
        return self._source.recipe_effective(epoch) * self._each

    def recipe_batch(self, epoch: int) -> int:
        """Return the samples of a batch, on one rank."""
        return self._source.recipe_batch(epoch) * self._each

    def total(self, epoch: int) -> int | None:
        """Return the samples of an epoch on this rank."""
        batches = self._source.total(epoch)
        return None if batches is None else batches * self._each

    def check_effective(self, effective: int) -> None:
        """Refuse an effective batch in samples where loaders give unequal numbers of them to a batch.

        Raises:
            UserError: With the numbers.
        """
        if len(set(self.sizes)) > 1:
            raise UserError(
                f"effective_batch_size={effective} counts samples, and the training data come from loaders of unequal "
                f"batch sizes, {', '.join(map(str, self.sizes))}: say with accumulate=… how many batches make a step."
            )

    def arrange(
        self, epoch: int, effective: int | None, micro_batch: int, *, samples_done: int = 0, enabled: bool = True
    ) -> AccumulationPlan:
        """Arrange one epoch in windows of whole batches.

        Args:
            epoch: The epoch.
            effective: Effective batch size; ``None`` for the recipe's.
            micro_batch: Unused: batches are cut in the training step.
            samples_done: Samples of the epoch that an earlier run has trained on.
            enabled: False while the micro-batch is not known: the loader then yields nothing.

        Raises:
            UserError: If no whole number of batches makes up an effective batch.
        """
        done = samples_done // self._each
        if enabled:
            self._user_loader = None  # frees the batch that was read ahead
        plan = self._source.arrange(epoch, self._in_batches(effective), 1, samples_done=done, enabled=enabled)
        chunks = ((self._each,) * plan.factor,) * plan.world_size
        size = plan.effective_batch_size * self._each
        return replace(plan, effective_batch_size=size, micro_batch_size=self._each, chunks=chunks)

    def chunk(self, index: int) -> Chunk:
        """Return the ``index``-th batch of the epoch, its position in samples."""
        chunk = self._source.chunk(index)
        return replace(chunk, count=chunk.count * self._each, window_end=chunk.window_end * self._each)

    def expected(self, chunk: Chunk) -> int | None:
        """Return ``None``: only the batch shows how many samples it holds."""
        return None

    def samples_at(self, index: int) -> None:
        """Return ``None``: samples are not at hand."""

    def largest_extent(self, recipe_batch: int) -> int:
        """Return the most samples that a batch can hold, as far as the first one shows."""
        if self._each > 1:
            return recipe_batch
        return max(self.sizes) if self.sizes else self._first_extent

    @cached_property
    def _first_extent(self) -> int:
        return largest_extent(self._stream.peek(1)[0])

    def check_cut(self) -> None:
        """Refuse batches that cannot be cut.

        Raises:
            LayoutError: If the samples of the first batch cannot be separated.
        """
        _ = self.user_loader

    @property
    def may_grow(self) -> bool:
        """True if a batch may turn out to hold more samples than the first."""
        return not self.sizes and self._shows_samples

    @property
    def user_loader(self) -> "DataLoader[Any]":
        """A loader of the samples of the first batch, for the probe and the exactness check.

        Raises:
            LayoutError: If these cannot be separated.
        """
        if self._user_loader is None:
            if self._hook is None:
                check_proportion(self._each, self.sizes)
            (batch, *_) = self._stream.peek(1) or [None]
            data = _ByHook(batch, self._hook) if self._hook is not None else _ByLayout(batch, self._raw_layout)
            self._user_loader = DataLoader(data, batch_size=len(data), collate_fn=data.collate)
        return self._user_loader

    def looks(self, epoch: int) -> ScanOrder:
        """Return the scan order over the samples of the first batch."""
        return ScanOrder(range(self._each), self._each)

    def sample_indices(self, epoch: int, most: int = 64) -> list[int]:
        """Return indices of samples of the first batch."""
        return list(range(min(most, self._each)))

    def recipe_batches(self, samples: int) -> int:
        """Return the batches that so many samples make up."""
        return self._source.recipe_batches(samples // self._each)

    def samples_of(self, batches: int) -> int:
        """Return the samples that so many batches hold."""
        return batches * self._each

    def batches_after(self, index: int) -> int:
        """Return the batches that are done after this one."""
        return self._source.batches_after(index)

    def steps(self, epoch: int, effective: int | None) -> int | None:
        """Return the optimizer steps of one epoch; ``None`` where the length is not known."""
        return self._source.steps(epoch, self._in_batches(effective))

    @property
    def loader(self) -> "DataLoader[Any] | None":
        """The loader that the loop reads."""
        return self._source.loader

    @property
    def length(self) -> int | None:
        """Batches of the arranged epoch; ``None`` if that is not known."""
        return self._source.length

    @property
    def epoch_batches(self) -> int | None:
        """Batches of the arranged epoch; ``None`` if that is not known."""
        return self._source.epoch_batches

    @property
    def at_most(self) -> int | None:
        """Batches after which a stream is not read any further."""
        return self._source.at_most

    @property
    def loaders(self) -> Sequence[Any]:
        """The loaders that a batch comes from."""
        return self._data.loaders

    @property
    def keeps_place(self) -> bool:
        """True if all loaders save and restore their position, so that a resume in mid-epoch repeats no sample."""
        return all(map(keeps_place, self.loaders))

    @property
    def done(self) -> int:
        """Batches that an earlier run has trained on."""
        return self._source.done

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""
        return self._source.world_size

    @property
    def sharded_ranks(self) -> int:
        """Ranks with data of their own."""
        return self._source.sharded_ranks

    def seeded_as_before(self) -> AbstractContextManager[None]:
        """Return an empty context: the user's loaders are iterated once, whatever the loop does."""
        return nullcontext()

    def _sizes_of_loaders(self) -> list[int]:
        """Return the samples that each loader gives to a batch; empty where a loader has no batch size."""
        sizes = [_batch_size(part) for part in self._data.loaders]
        return [size for size in sizes if size is not None] if None not in sizes else []

    def _samples_of_first(self) -> int:
        if self.sizes:
            return gcd(*self.sizes)
        peeked = self._stream.peek(1)
        if not peeked:
            return 1
        try:
            return max(1, self._raw_layout.samples(peeked[0]))
        except LayoutError:
            self._shows_samples = self._hook is not None
            return max(1, length_of_first(peeked[0])) if self._shows_samples else 1

    @property
    def _raw_layout(self) -> Layout:
        """The layout of batches before any hook."""
        return self.batch_source.layout(lambda batch: batch)

    def _looked_at(self) -> list[Any]:
        """Return the first batches, and the last where it can be had, as it may be of another size."""
        batches = self._stream.peek(_PEEKED)
        for part in self._data.loaders:
            dataset = getattr(part, "dataset", part)
            if len(self._data.loaders) == 1 and isinstance(dataset, Sequence) and len(dataset) > _PEEKED:
                collate = getattr(part, "collate_fn", None) or (lambda batch: batch)
                batches.append(self._data.combine([collate(dataset[-1])]))
        return batches

    def _in_batches(self, effective: int | None) -> int | None:
        if effective is None:
            return None
        batches, left = divmod(effective, self._each)
        if left or batches % self._source.world_size:
            step = self._each * self._source.world_size
            raise UserError(
                f"effective_batch_size={effective} is no whole number of batches: the training data yields batches of "
                f"{self._each} samples on each of {self._source.world_size} ranks, which cannot be cut anew. Use a "
                f"multiple of {step}."
            )
        return batches


def _batch_size(loader: Any) -> int | None:
    """Return the samples of a DataLoader's batches but the last; ``None`` where they are not known."""
    if not is_collated(loader) or loader.batch_size is None:
        return None
    try:
        return min(loader.batch_size, len(loader.dataset)) or None
    except TypeError:  # a stream may have no length
        return int(loader.batch_size)


class _ByLayout(Dataset[Any]):
    """The samples of one batch, cut by its layout."""

    def __init__(self, batch: Any, layout: Layout) -> None:
        self._batch, self._layout = batch, layout
        self._samples, self._sizes = layout.samples(batch), layout.sizes(batch)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return cut(self._batch, self._layout, Slice(index, index + 1, self._samples, self._sizes))

    def collate(self, samples: Sequence[Any]) -> Any:
        """Collate the first samples of the batch, repeated in turn where more are asked for than there are."""
        return gather(self._batch, self._layout, len(samples))


class _ByHook(Dataset[Any]):
    """The samples of one batch, cut by the module's own ``split_batch``."""

    def __init__(self, batch: Any, hook: SplitBatch) -> None:
        self._batch, self._hook = batch, hook
        self._samples = length_of_first(batch)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return self._batch

    def collate(self, samples: Sequence[Any]) -> Any:
        """Collate the first samples of the batch, at most all of them."""
        count = len(samples)
        if count >= self._samples:
            return self._batch
        return next(split_by_hook(self._hook, self._batch, [count, self._samples - count]))


def _only(batches: Iterable[Any]) -> Any:
    (batch,) = batches
    return batch
