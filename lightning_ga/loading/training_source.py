"""The training data of one fit, cut into windows and micro-batches."""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from lightning_ga.errors import UserError
from lightning_ga.loading.largest_samples import ScanOrder
from lightning_ga.loading.reader import LOOKED_AT, BatchSource, CollatedAgain, CollatedBatches
from lightning_ga.loading.rebatch import read_loader, rebatch
from lightning_ga.loading.recipe_batches import RecipeBatches, SourceSettings
from lightning_ga.loading.sampler import FromBatches, Sequential, Stream, WindowBatchSampler
from lightning_ga.loading.samples import FirstSamples, peekable, read_samples
from lightning_ga.plan.accumulation import AccumulationPlan, in_groups, plan_accumulation
from lightning_ga.plan.lengths import SizeLimits
from lightning_ga.plan.schedule import Growth
from lightning_ga.plan.windows import (
    Chunk,
    EpochPlan,
    EvenShares,
    FullChunks,
    GivenWindows,
    GrowingEpoch,
    GrowingWindows,
    Windows,
    WithinBatches,
)

_TOGETHER = 64  # samples of the first batches, where a batch sampler decides which are together


class TrainingSource:
    """Training data cut into windows and micro-batches, an epoch at a time.

    Samples are counted in the order that ranks share; where every rank has an order of its own (a sharded sampler, an
    iterable dataset on several ranks), in that of one rank.
    """

    may_drop: bool  # whether a batch may hold fewer samples than were fetched for it
    may_grow = False  # whether a batch may hold more samples than the first
    is_counted = True  # whether it is known how many samples a batch holds; if not, it counts as one
    reads_windows = False  # whether the step cuts whole windows, which the loader yields as one batch
    batch_source: BatchSource  # samples or other batches, from which the layout of a batch can be read

    def __init__(self, recipe: RecipeBatches, *, generator: torch.Generator | None = None) -> None:
        self.recipe, settings = recipe, recipe.settings
        self.world_size = settings.world_size
        self.sharded_ranks = recipe.sharded_ranks  # ranks with an order of their own; one if they share an order
        one_rank = self.world_size == 1
        self.streams = isinstance(recipe.order, Stream)  # whether samples are counted in each batch, not in advance
        self.keeps_place = not self.streams  # whether a resume in mid-epoch repeats no sample
        self.counted_later = self.streams or self.sharded_ranks > 1  # whether a window is counted only at its end
        self.cut_in_step = settings.cut_in_step  # whether the loader yields the recipe's batches, which the step cuts
        # Whether the user's own batch sampler decides which samples are together.
        self.keeps_groups = isinstance(recipe.order, FromBatches) and one_rank
        self.sampler = WindowBatchSampler(
            recipe.order,
            share=settings.rank if recipe.shared else 0,
            seed=settings.seed,
            generator=generator,
            draws=recipe.order.draws_seed and one_rank,
        )
        # If batches are cut by size: how many of the longest samples fit, and the limits of what a batch shows.
        self.size_limits: tuple[int, SizeLimits] | None = None
        self.loader: DataLoader[Any] | None = None  # which the fit loop reads, once an epoch is arranged
        self._keeps_windows = True  # whether the arranged epoch has the windows of the recipe
        self._epoch_end: int | None = None  # samples after which all its batches are done
        self.epoch_batches: int | None = None  # of the recipe on one rank, in the arranged epoch, if that is known
        self._scanned: tuple[int, ScanOrder] | None = None

    @property
    def user_loader(self) -> "DataLoader[Any]":
        """The user's loader, for its dataset and the way it collates; an error if its batches cannot be cut."""
        return self.recipe.loader

    def scan_order(self, epoch: int) -> ScanOrder:
        """Return the order in which samples are scanned; those read are kept until an epoch is arranged."""
        if self._scanned is None or self._scanned[0] != epoch:
            self._scanned = epoch, self._scan_order(epoch)
        return self._scanned[1]

    def _scan_order(self, epoch: int) -> ScanOrder:
        raise NotImplementedError

    def samples_at(self, index: int, seed: int = 0) -> CollatedAgain | None:
        """Return the samples of the ``index``-th micro-batch, fetched again; ``None`` of a stream."""
        if self.streams:
            return None
        loader = self.recipe.loader
        return CollatedAgain(loader, *read_samples(loader, self.sampler.indices(index), seed=seed))

    def largest_batch(self, epoch: int) -> int:
        """Return the most samples that the loader would yield to a rank at once, were they not cut there."""
        windows = self.loader.batch_size if self.reads_windows and self.loader is not None else None
        return windows or self.recipe.largest_batch(epoch)

    def largest_extent(self, epoch: int) -> int:
        """Return the most samples that a batch may hold."""
        return self.largest_batch(epoch)

    def largest_window(self, epoch: int) -> int | None:
        """Return the samples of the largest window of an epoch if the samples themselves decide; else ``None``."""
        return None

    def check_effective(self, effective: int) -> None:
        """Refuse an effective batch that cannot be counted in samples."""

    def check_counted(self, asked: str) -> None:
        """Refuse what counts samples where these are not known."""

    def check_cut(self) -> None:
        """Refuse batches that cannot be cut."""
        _ = self.user_loader

    def arrange(
        self,
        epoch: int,
        effective: int | Growth | None,
        micro_batch: int,
        *,
        samples_done: int = 0,
        enabled: bool = True,
    ) -> AccumulationPlan:
        """Cut one epoch and return how its full windows are cut, the largest where they may grow.

        An ``effective`` of ``None`` keeps the recipe's windows; the loader yields nothing until it is ``enabled``.
        """
        windows, total = self._windows(epoch, effective, samples_done), self.recipe.total(epoch)
        self._keeps_windows = effective is None
        if isinstance(effective, Growth):
            effective = self.recipe.within(effective.largest, epoch)
        if effective is not None and total and windows.count == 0 and samples_done == 0:
            raise UserError(
                f"effective_batch_size={effective} is more than the {total * self.sharded_ranks} samples of an epoch, "
                "and drop_last=True drops the only window: use drop_last=False or a smaller effective batch."
            )
        plan, epoch_plan = self._cut(windows, epoch, effective, micro_batch)
        self.sampler.arrange(epoch, epoch_plan, enabled=enabled)
        self._note_end(windows, total)
        self._scanned = None
        if self.loader is None:
            sized, shuffle = self.length is not None, self.recipe.settings.shuffle
            self.loader = rebatch(self.recipe.loader, self.sampler, sized=sized, shuffle=shuffle)
        object.__setattr__(self.loader, "batch_size", plan.micro_batch_size)
        return plan

    def _windows(self, epoch: int, effective: int | Growth | None, samples_done: int = 0) -> Windows:
        if isinstance(effective, Growth):
            return self.recipe.growing_windows(epoch, effective, samples_done)
        return self.recipe.windows(epoch, effective, samples_done)

    def steps_of(self, epoch: int, effective: int | Growth | None) -> tuple[int, int] | None:
        """Return optimizer steps and samples, over all ranks, of a whole epoch; ``None`` without a known end."""
        windows = self._windows(epoch, effective)
        if windows.count is None:
            return None
        return windows.count, (sum(windows.span(windows.count - 1)) if windows.count else 0) * self.sharded_ranks

    def _cut(
        self, windows: Windows, epoch: int, effective: int | None, micro_batch: int
    ) -> tuple[AccumulationPlan, EpochPlan]:
        """Cut full windows and the epoch; on one rank never across batches of the recipe that stay whole."""
        recipe, one_rank = self.recipe, self.world_size == 1
        whole_batches = self.cut_in_step and one_rank  # ranks share windows out evenly
        if isinstance(windows, GivenWindows):  # windows that start anew in mid-epoch may be larger than any before
            agree = recipe.settings.largest_over_ranks
            size, micro_batch = agree(windows.largest) * self.sharded_ranks, agree(micro_batch)
        else:
            size = effective or recipe.effective(epoch)
        plan = plan_accumulation(size, micro_batch=micro_batch, world_size=self.world_size)
        cut: EvenShares | WithinBatches = EvenShares()
        if isinstance(windows, GivenWindows) and one_rank:
            edges = recipe.ends(epoch)
            groups = windows.batches(edges)
            pieces = 1 if whole_batches else -(-max(map(max, groups), default=1) // micro_batch)
            plan, cut = in_groups(groups, pieces=pieces), WithinBatches(edges, pieces)
        elif recipe.order.per_item > 1:  # ready-made batches are not mixed
            cut = FullChunks()
        elif effective is None and one_rank:
            as_recipe = (plan.factor, plan.micro_batch_size) == (recipe.settings.recipe_factor, recipe.batch_size)
            micro_batch = plan.micro_batch_size if as_recipe else micro_batch
            cut = FullChunks() if as_recipe or whole_batches else cut
        if isinstance(windows, GrowingWindows) and self.keeps_groups:
            largest = recipe.largest_batch(epoch)
            pieces = 1 if whole_batches else -(-largest // micro_batch)
            plan = in_groups([[largest] * -(-size // largest)], pieces=pieces)
            cut = WithinBatches(recipe.ends(epoch), pieces)
        apart, ranks = self.sharded_ranks > 1, recipe.ranks_per_order
        kind = GrowingEpoch if isinstance(windows, GrowingWindows) else EpochPlan
        return plan, kind(windows, micro_batch, plan.factor, ranks, pads_last_window=apart, cut=cut)

    def _note_end(self, windows: Windows, total: int | None) -> None:
        """Note where the arranged epoch ends: asked for at every micro-batch."""
        self._epoch_end = None
        if windows.count is not None:
            self._epoch_end = sum(windows.span(windows.count - 1)) if windows.count else 0
        self.epoch_batches = None if total is None or self.length is None else self.recipe_batches(total)

    @contextmanager
    def seeded_as_before(self) -> Iterator[None]:
        """Return a context in which the loop iterates the loader again with the workers' seed that it has drawn."""
        generator = self.sampler.take_seed_back()
        if self.loader is None or generator is None:
            yield
            return
        own, self.loader.generator = self.loader.generator, generator
        try:
            yield
        finally:
            self.loader.generator = own

    @property
    def epoch_plan(self) -> EpochPlan:
        """The cut of the arranged epoch."""
        assert self.sampler.plan is not None, "the data are read before an epoch was arranged"
        return self.sampler.plan

    @property
    def length(self) -> int | None:
        """Micro-batches of the arranged epoch on each rank; ``None`` for a stream of unknown length."""
        endless = self.streams and self.recipe.order.size is None
        return None if endless else self.epoch_plan.length

    def chunk(self, index: int) -> Chunk:
        """Return the ``index``-th micro-batch of the arranged epoch on this rank."""
        return self.sampler.chunk(index)

    def expected(self, chunk: Chunk) -> int | None:
        """Return the samples that a batch should hold; ``None`` where only the batch shows them."""
        return None if self.streams or not chunk.count else chunk.count

    def logged_batch_sizes(self, chunk: Chunk) -> dict[float | None, float]:
        """Return what a logged ``batch_size=`` of the recipe's size, or of one, counts as in a micro-batch.

        Over the micro-batches of a batch this adds up to the size that was logged. ``None`` is what a value of the
        window counts as, logged without: the samples of its last batch.
        """
        size, ranks = self.recipe.batch_size or 0, self.recipe.ranks_per_order
        if self.cut_in_step or not 0 < chunk.count < size:
            return {size: size} if size else {}
        share = chunk.count * ranks * -(-chunk.window_samples // (size * ranks)) / chunk.window_samples
        last = (chunk.window_samples - 1) % (size * ranks) + 1
        return {1: share if chunk.count > 1 else 1, size: size * share, None: -(-last // ranks)}

    def relative_size(self, number: int) -> tuple[int, int]:
        """Return what a sample of a micro-batch counts as, and the most that any does."""
        return 1, 1

    def recipe_batches(self, samples: int) -> int:
        """Return the batches of the recipe, on one rank, that so many samples of the arranged epoch make up.

        The end of the last window completes them all, whatever ragged batch or window was dropped.
        """
        recipe = self.recipe
        over = self._epoch_end is not None and samples >= self._epoch_end
        if recipe.batch_size is not None:
            done, in_epoch = samples // (recipe.batch_size * recipe.ranks_per_order), self.epoch_batches
            if over:
                used = recipe.used()
                return done if used is None else used
            return done if in_epoch is None else min(done, max(0, in_epoch - 1))
        ends = recipe.ends(self.sampler.epoch)
        if over:
            return -(-(len(ends) - 1) // recipe.ranks_per_order)
        return (bisect_right(ends, samples) - 1) // recipe.ranks_per_order

    def samples_of(self, batches: int) -> int:
        """Return the samples of an epoch in so many batches of the recipe on each rank."""
        recipe, epoch = self.recipe, self.sampler.epoch
        if recipe.batch_size is None:
            ends = recipe.ends(epoch)
            return ends[min(batches * recipe.ranks_per_order, len(ends) - 1)]
        samples, total = batches * recipe.batch_size * recipe.ranks_per_order, recipe.total(epoch)
        return samples if total is None else min(samples, total)

    def some_batches(self, limit: int) -> Iterator[FirstSamples]:
        """Yield the samples of some batches of the recipe, from all over the epoch; of a stream those of the first.

        There are none if micro-batches of at most ``limit`` samples may mix those of several.
        """
        if not self._keeps_batches_apart(limit):
            return
        epoch, ranks = self.sampler.epoch, self.recipe.ranks_per_order
        total = None if self.streams else self.recipe.total(epoch)
        count = 3 if total is None else self.recipe_batches(total)
        for number in sorted({0, count // 2, max(0, count - 1)}):
            start, stop = self.samples_of(number), self.samples_of(number + 1)
            found = self.scan_order(epoch).some.read(stop)[start:] if self.streams else ()
            yield FirstSamples(self.recipe.loader, self.sampler.between(start, start + (stop - start) // ranks), found)

    def _keeps_batches_apart(self, limit: int) -> bool:
        """Return whether each micro-batch of at most so many samples will lie within one batch of the recipe."""
        plan, size = self.epoch_plan, self.recipe.batch_size
        if size is None or self.world_size > 1:
            return self.keeps_groups
        in_turn = self.streams and not self.cut_in_step and self.recipe.loader.num_workers > 1
        start, window = plan.windows.span(plan.windows.done)
        if in_turn or isinstance(plan, GrowingEpoch) or start % size:
            return False
        as_recipe = self._keeps_windows and -(-window // limit) * size == window
        return size % window == 0 or as_recipe or isinstance(plan.cut, FullChunks)

    def batches_after(self, index: int) -> int:
        """Return the batches of the recipe that are done once each rank has done this micro-batch; 0 before any."""
        return 0 if index < 0 else self.recipe_batches(self.sampler.chunk(index).done)


class MicroBatchSource(TrainingSource):
    """The user's DataLoader and the micro-batches it is cut into."""

    def __init__(self, loader: "DataLoader[Any]", settings: SourceSettings, size_of: str | None = None) -> None:
        loader = peekable(loader)
        sharing = {"shard": settings.shard, "shuffle": settings.shuffle, "shuffles": settings.shuffles}
        read = read_loader(loader, world_size=settings.world_size, **sharing)
        super().__init__(RecipeBatches(loader, read, settings), generator=getattr(loader, "generator", None))
        self.may_drop = loader.collate_fn is not default_collate
        # Samples of a stream have no index: a window is collated whole, and its batch shows their sizes.
        self.reads_windows = size_of is not None and not settings.cut_in_step
        self.cut_in_step |= self.reads_windows or self._may_end_apart()
        self.batch_source = CollatedBatches(
            [loader], samples=lambda _: self.scan_order(self.sampler.epoch).some.read(LOOKED_AT), size_of=size_of
        )

    def _may_end_apart(self) -> bool:
        """Return whether streams of the ranks may end after other numbers of micro-batches, and the others wait.

        They end after as many of the recipe's batches, or stock Lightning would wait, too.
        """
        if not self.streams or self.sharded_ranks == 1:
            return False
        total, agree = self.recipe.total(0) or 0, self.recipe.settings.largest_over_ranks
        most, least = agree(total), -agree(-total)
        return most == 0 or most > least

    def _scan_order(self, epoch: int) -> ScanOrder:
        loader, order, total = self.recipe.loader, self.recipe.order, self.recipe.total(epoch)
        if isinstance(order, Stream):
            return ScanOrder(loader, None, order.size)
        met = order.pool(epoch, self.sampler.seed)
        if isinstance(order, Sequential):
            met = met[:total]
        return ScanOrder(loader, met, len(met), met[:_TOGETHER] if isinstance(order, FromBatches) else None)
