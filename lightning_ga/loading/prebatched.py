"""Read training data whose batches come ready-made, and are cut in the training step: several loaders, any iterable.

A stream that cannot be restarted loses nothing: a batch that is read before training begins is trained on all the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_ga.batch.layout import (
    WAY_OUT,
    Layout,
    LayoutError,
    largest_extent,
    length_of_first,
    slices_by_hook,
    slices_of,
)
from lightning_ga.errors import UserError
from lightning_ga.loading.largest_samples import ScanOrder
from lightning_ga.loading.padding import pick
from lightning_ga.loading.reader import CollatedBatches, ReadyMadeBatches, check_proportion, is_collated
from lightning_ga.loading.rebatch import LoaderRecipe, PeekableStream, keeps_place, length_of
from lightning_ga.loading.recipe_batches import RecipeBatches, SourceSettings
from lightning_ga.loading.sampler import Stream
from lightning_ga.loading.samples import copied_if_possible
from lightning_ga.loading.training_source import TrainingSource

_PEEKED = 2  # batches that are read ahead, as two may differ in size


@dataclass(frozen=True, slots=True)
class Batches:
    """Training data as a fit loop would read them."""

    loaders: Sequence[Any]  # that a batch comes from
    combine: Callable[[list[Any]], Any]  # makes one batch out of those of all loaders
    start: Callable[[], Iterator[Any]]  # starts them anew and yields batches
    length: int | None  # batches on this rank; None if that is not known


class PrebatchedSource(TrainingSource):
    """A ``TrainingSource`` of such data: windows of whole batches.

    If the number of samples is needed in advance, all batches count as the first; if they cannot be separated, as one.
    """

    may_drop = True

    def __init__(
        self, batches: Batches, settings: SourceSettings, *, hook: Any = None, size_of: str | None = None
    ) -> None:
        self._stream = PeekableStream(batches.start, batches.length)
        self._hook, self._combine, self.loaders = hook, batches.combine, batches.loaders
        collated = all(map(is_collated, self.loaders))
        if collated:
            self.batch_source = CollatedBatches(self.loaders, self._combine, size_of=size_of)
        else:
            self.batch_source = ReadyMadeBatches(self._first_batches, size_of=size_of)
        sizes = [_batch_size(part) for part in self.loaders]
        # Samples that each loader gives to a batch; none where a loader has no batch size.
        self.sizes = [size for size in sizes if size is not None] if None not in sizes else []
        first = [] if self.sizes else self._stream.peek(1)
        samples = gcd(*self.sizes) if self.sizes else self._samples_of(first)
        self.may_grow = not self.sizes and samples is not None
        self._largest = max([*self.sizes, *map(largest_extent, first)], default=1)
        self._of_batch = each = settings.largest_over_ranks(samples or 1)  # samples
        self.is_counted = samples is not None
        items = DataLoader(self._stream, batch_size=1, collate_fn=itemgetter(0))
        order = Stream(None if batches.length is None else batches.length * each, each)
        read = LoaderRecipe(order, each, drop_last=False, shared=settings.world_size == 1)
        super().__init__(RecipeBatches(items, read, settings), generator=torch.Generator())
        self.cut_in_step = True
        self.keeps_place = all(map(keeps_place, self.loaders))

    @property
    def user_loader(self) -> "DataLoader[Any]":
        """A loader of the samples of the first batch, for the probe and the exactness check."""
        (batch, *_) = self._stream.peek(1) or [None]
        if self._hook is None:
            check_proportion(self.sizes)
            slices = slices_of(batch, self._raw_layout)
        else:
            slices = slices_by_hook(self._hook, batch, length_of_first(batch))

        def first(numbers: Sequence[int]) -> Any:
            """Return the first samples, whichever are asked for unless they differ in size, in memory of their own."""
            if self.batch_source.size_of is not None and self._hook is None:
                return copied_if_possible(pick(batch, self._raw_layout, torch.tensor(numbers) % slices.samples))
            return copied_if_possible(slices.take(0, min(len(numbers), slices.samples)))

        return DataLoader(range(slices.samples), batch_size=max(1, slices.samples), collate_fn=first)  # type: ignore[arg-type]

    def check_effective(self, effective: int) -> None:
        """Refuse an effective batch that is no whole number of batches, as far as their samples are known."""
        if len(set(self.sizes)) > 1:
            raise UserError(
                f"effective_batch_size={effective} counts samples, and the training data come from loaders of unequal "
                f"batch sizes, {', '.join(map(str, self.sizes))}: say with accumulate=… how many batches make a step."
            )
        self.check_counted(f"effective_batch_size={effective}")
        multiple = self._of_batch * self.world_size
        if effective % multiple:
            raise UserError(
                f"effective_batch_size={effective} is no whole number of batches: the training data yields batches of "
                f"{self._of_batch} samples on each of {self.world_size} ranks, which cannot be cut anew. Use a "
                f"multiple of {multiple}."
            )

    def check_counted(self, asked: str) -> None:
        """Refuse to count samples of batches that cannot be separated."""
        if not self.is_counted:
            raise UserError(
                f"{asked} counts samples, and how many a ready-made batch holds is not known: say with accumulate=… "
                f"how many batches make a step, or {WAY_OUT}."
            )

    def largest_extent(self, epoch: int) -> int:
        """Return the most samples that a batch can hold, as far as the first one shows."""
        return self._of_batch if self._of_batch > 1 else self._largest

    def _scan_order(self, epoch: int) -> ScanOrder:
        numbers: Any = self.user_loader.dataset
        return ScanOrder(self.user_loader, numbers, len(numbers))

    def _samples_of(self, first: Sequence[Any]) -> int | None:
        """Return the samples of the first batch, if there is one; ``None`` where these cannot be counted."""
        if not first:
            return 1
        try:
            return max(1, self._raw_layout.samples(first[0]))
        except LayoutError:
            return None if self._hook is None else max(1, length_of_first(first[0]))

    @cached_property
    def _raw_layout(self) -> Layout:
        """The layout of batches before any hook."""
        return self.batch_source.layout(lambda batch: batch)

    def _first_batches(self) -> list[Any]:
        """Return the first batches, and the last where it can be had, as it may be of another size."""
        batches = self._stream.peek(_PEEKED)
        if len(self.loaders) != 1:
            return batches
        (loader,) = self.loaders
        dataset = getattr(loader, "dataset", loader)
        if isinstance(dataset, Sequence) and len(dataset) > _PEEKED:
            collate = getattr(loader, "collate_fn", None) or (lambda batch: batch)
            batches.append(self._combine([collate(dataset[-1])]))
        return batches


def _batch_size(loader: Any) -> int | None:
    """Return the samples of a DataLoader's batches but the last; ``None`` where they are not known."""
    if not is_collated(loader) or loader.batch_size is None:
        return None
    length = length_of(loader.dataset)
    return int(loader.batch_size) if length is None else min(loader.batch_size, length) or None
