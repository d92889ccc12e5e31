"""The training data of one fit, cut into windows and micro-batches."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_ga.errors import UserError
from lightning_ga.loading.batch_source import BatchSource
from lightning_ga.loading.largest_samples import ScanOrder
from lightning_ga.loading.reader import CollatedAgain
from lightning_ga.loading.rebatch import rebatch
from lightning_ga.loading.recipe_batches import RecipeBatches, SourceSettings
from lightning_ga.loading.sampler import FromBatches, Stream, WindowBatchSampler, draws_a_seed
from lightning_ga.plan.accumulation import AccumulationPlan, in_groups, plan_accumulation
from lightning_ga.plan.windows import Chunk, EpochPlan, GivenWindows, Windows


class TrainingSource:
    """Training data cut into windows and micro-batches, an epoch at a time.

    A loader yields items: samples, or ready-made batches. Samples are counted in the order that ranks
    share; where every rank has an order of its own (a sharded sampler, an iterable dataset on several
    ranks), in that of one rank.
    """

    keeps_place: bool  # whether a resume in mid-epoch repeats no sample
    may_drop: bool  # whether a batch may hold fewer samples than were fetched for it
    may_grow = False  # whether a batch may hold more samples than the first
    batch_source: BatchSource  # samples or other batches, from which the layout of a batch can be read
    _samples_of_item = 1  # more where items are ready-made batches

    def __init__(
        self, items: "DataLoader[Any]", settings: SourceSettings, *, generator: torch.Generator | None = None
    ) -> None:
        self._recipe = recipe = RecipeBatches(items, settings)
        self._items, self._settings = items, settings
        self.world_size = settings.world_size
        self.sharded_ranks = recipe.sharded_ranks  # ranks with an order of their own; one if they share an order
        one_rank = self.world_size == 1
        self.streams = isinstance(recipe.order, Stream)  # whether samples are counted in each batch, not in advance
        self.counted_later = self.streams or self.sharded_ranks > 1  # whether a window is counted only at its end
        self.cut_in_step = settings.cut_in_step  # whether the loader yields the recipe's batches, which the step cuts
        # Whether the user's own batch sampler decides which samples are together.
        self.keeps_groups = isinstance(recipe.order, FromBatches) and one_rank
        self.workers = items.num_workers
        self.sampler = WindowBatchSampler(
            recipe.order,
            share=settings.rank if recipe.shared else 0,
            seed=settings.seed,
            generator=generator,
            draws=draws_a_seed(recipe.order) and one_rank,
        )
        self.loader: DataLoader[Any] | None = None  # which the fit loop reads, once an epoch is arranged
        self._epoch_end: int | None = None  # items after which all its batches are done
        self.epoch_batches: int | None = None  # of the recipe on one rank, in the arranged epoch, if that is known
        self._looks: tuple[int, ScanOrder] | None = None

    @property
    def user_loader(self) -> "DataLoader[Any]":
        """The user's loader, for its dataset and the way it collates."""
        return self._items

    def looks(self, epoch: int) -> ScanOrder:
        """Return the order in which samples are scanned; those read are kept until an epoch is arranged."""
        if self._looks is None or self._looks[0] != epoch:
            self._looks = epoch, self._scan_order(epoch)
        return self._looks[1]

    def _scan_order(self, epoch: int) -> ScanOrder:
        raise NotImplementedError

    can_fetch = False  # whether ``samples_at`` returns samples

    def samples_at(self, index: int, seed: int = 0) -> CollatedAgain | None:
        """Return the samples of the ``index``-th micro-batch, fetched again; ``None`` if they are not at hand."""
        return None

    def largest_extent(self, recipe_batch: int) -> int:
        """Return the most samples that a batch may hold."""
        return recipe_batch

    def check_effective(self, effective: int) -> None:
        """Refuse an effective batch that cannot be counted in samples."""

    def check_cut(self) -> None:
        """Refuse batches that cannot be cut."""
        _ = self.user_loader

    def recipe_effective(self, epoch: int) -> int:
        """Return the recipe's effective batch: batch size × factor × ranks; the largest where batches vary."""
        return self._recipe.effective(epoch) * self._samples_of_item

    def recipe_batch(self, epoch: int) -> int:
        """Return the most samples that the user's loader yields to a rank at once."""
        batches = self._settings.recipe_factor * self.world_size
        return -(-self._recipe.effective(epoch) // batches) * self._samples_of_item

    def total(self, epoch: int) -> int | None:
        """Return the samples of an epoch that training uses; ``None`` for a stream of unknown length."""
        items = self._recipe.total(epoch)
        return None if items is None else items * self._samples_of_item

    def steps(self, epoch: int, effective: int | None) -> int | None:
        """Return the optimizer steps of one epoch; ``None`` for a stream of unknown length."""
        return self._recipe.windows(epoch, self._in_items(effective), 0).count

    def arrange(
        self, epoch: int, effective: int | None, micro_batch: int, *, samples_done: int = 0, enabled: bool = True
    ) -> AccumulationPlan:
        """Cut one epoch and return how its full windows are cut.

        An ``effective`` of ``None`` keeps the recipe's windows; the loader yields nothing until it is ``enabled``.
        """
        each, effective = self._samples_of_item, self._in_items(effective)
        windows = self._recipe.windows(epoch, effective, samples_done // each)
        self._refuse_no_window(windows, epoch, effective, samples_done)
        plan, epoch_plan = self._cut(windows, epoch, effective, micro_batch // each)
        self.sampler.arrange(epoch, epoch_plan, enabled=enabled)
        self._note_end(windows, self._recipe.total(epoch))
        self._looks = None
        if self.loader is None:
            sized = self.length is not None
            self.loader = rebatch(self._items, self.sampler, sized=sized, shuffle=self._settings.shuffle)
        object.__setattr__(self.loader, "batch_size", plan.micro_batch_size)
        return plan if each == 1 else _multiplied(plan, each)

    def _in_items(self, effective: int | None) -> int | None:
        """Return the items that make up so many samples."""
        return effective

    def _refuse_no_window(self, windows: Windows, epoch: int, effective: int | None, samples_done: int) -> None:
        total = self._recipe.total(epoch)
        if effective is not None and total and windows.count == 0 and samples_done == 0:
            raise UserError(
                f"effective_batch_size={effective} is more than the {total * self.sharded_ranks} samples of an epoch, "
                "and drop_last=True drops the only window: use drop_last=False or a smaller effective batch."
            )

    def _cut(
        self, windows: Windows, epoch: int, effective: int | None, micro_batch: int
    ) -> tuple[AccumulationPlan, EpochPlan]:
        """Cut full windows, and an epoch of them; on one rank, not across the recipe's batches where these are kept."""
        recipe, one_rank = self._recipe, self.world_size == 1
        whole_batches = self.cut_in_step and one_rank  # ranks share windows out evenly
        if isinstance(windows, GivenWindows):  # windows that start anew in mid-epoch may be larger than any before
            size = self._settings.largest_over_ranks(windows.largest) * self.sharded_ranks
        else:
            size = effective or recipe.effective(epoch)
        plan = plan_accumulation(size, micro_batch=micro_batch, world_size=self.world_size)
        batches: Sequence[int] | None = None
        pieces = 1
        if isinstance(windows, GivenWindows) and one_rank:
            batches = recipe.ends(epoch)
            groups = windows.batches(batches)
            pieces = 1 if whole_batches else -(-max(map(max, groups), default=1) // micro_batch)
            plan = in_groups(groups, pieces=pieces)
        elif effective is None and one_rank:
            as_recipe = (plan.factor, plan.micro_batch_size) == (self._settings.recipe_factor, recipe.batch_size)
            micro_batch = plan.micro_batch_size if as_recipe else micro_batch
            batches = () if as_recipe or whole_batches else None
        apart, ranks = self.sharded_ranks > 1, recipe.ranks_per_order
        return plan, EpochPlan(windows, micro_batch, plan.factor, ranks, whole=apart, batches=batches, pieces=pieces)

    def _note_end(self, windows: Windows, total: int | None) -> None:
        """Note where the arranged epoch ends: asked for at every micro-batch."""
        self._epoch_end = None
        if windows.count is not None:
            self._epoch_end = sum(windows.span(windows.count - 1)) if windows.count else 0
        self.epoch_batches = None if total is None or self.length is None else self._batches_of(total)

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
        """The cut of the arranged epoch, in items."""
        assert self.sampler.plan is not None, "the data are read before an epoch was arranged"
        return self.sampler.plan

    @property
    def length(self) -> int | None:
        """Micro-batches of the arranged epoch on each rank; ``None`` for a stream of unknown length."""
        endless = self.streams and self._recipe.order.size is None
        return None if endless else self.epoch_plan.length

    @property
    def at_most(self) -> int | None:
        """Micro-batches after which the epoch is not read any further; ``None`` for a stream without a limit."""
        return self.epoch_plan.length

    @property
    def done(self) -> int:
        """Micro-batches of the arranged epoch that an earlier run has trained on."""
        return self.epoch_plan.done

    def chunk(self, index: int) -> Chunk:
        """Return the ``index``-th micro-batch of the arranged epoch on this rank."""
        chunk, each = self.sampler.chunk(index), self._samples_of_item
        if each == 1:
            return chunk
        return replace(chunk, count=chunk.count * each, done=chunk.done * each, window_end=chunk.window_end * each)

    def expected(self, chunk: Chunk) -> int | None:
        """Return the samples that a batch should hold; ``None`` where only the batch shows them."""
        return None if self.streams or not chunk.count else chunk.count

    def recipe_batches(self, samples: int) -> int:
        """Return the batches of the recipe, on one rank, that so many samples of the arranged epoch make up.

        The end of the last window completes them all, whatever ragged batch or window was dropped.
        """
        return self._batches_of(samples // self._samples_of_item)

    def samples_of(self, batches: int) -> int:
        """Return the samples of an epoch in so many batches of the recipe on each rank."""
        recipe, epoch = self._recipe, self.sampler.epoch
        if recipe.batch_size is None:
            ends = recipe.ends(epoch)
            return ends[min(batches * recipe.ranks_per_order, len(ends) - 1)]
        items, total = batches * recipe.batch_size * recipe.ranks_per_order, recipe.total(epoch)
        return (items if total is None else min(items, total)) * self._samples_of_item

    def batches_after(self, index: int) -> int:
        """Return the batches of the recipe that are done once each rank has done this micro-batch; 0 before any."""
        return 0 if index < 0 else self._batches_of(self.sampler.chunk(index).done)

    def _batches_of(self, items: int) -> int:
        recipe = self._recipe
        over = self._epoch_end is not None and items >= self._epoch_end
        if recipe.batch_size is not None:
            used = recipe.used() if over else None
            return items // (recipe.batch_size * recipe.ranks_per_order) if used is None else used
        ends = recipe.ends(self.sampler.epoch)
        if over:
            return -(-(len(ends) - 1) // recipe.ranks_per_order)
        return (bisect_right(ends, items) - 1) // recipe.ranks_per_order


def _multiplied(plan: AccumulationPlan, each: int) -> AccumulationPlan:
    """Return a plan for items of ``each`` samples."""
    chunks = tuple(tuple(count * each for count in rank) for rank in plan.chunks)
    size, largest = plan.effective_batch_size * each, plan.micro_batch_size * each
    return replace(plan, effective_batch_size=size, micro_batch_size=largest, chunks=chunks)
