"""What training is fed with in one fit: the user's loader, cut into windows and micro-batches."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler, default_collate

from lightning_ga.errors import UserError
from lightning_ga.loading.batch_source import BatchSource, CollatedBatches, spread
from lightning_ga.loading.largest_samples import ScanOrder
from lightning_ga.loading.reader import CollatedAgain
from lightning_ga.loading.rebatch import read_loader, rebatch
from lightning_ga.loading.sampler import (
    FromBatches,
    FromSampler,
    Sequential,
    Shuffled,
    Stream,
    WindowBatchSampler,
    draws_a_seed,
)
from lightning_ga.loading.samples import collect_samples, peekable
from lightning_ga.loading.training_source import SourceSettings
from lightning_ga.plan.accumulation import AccumulationPlan, in_groups, plan_accumulation, require_effective_batch
from lightning_ga.plan.windows import Chunk, EpochPlan, GivenWindows, RegularWindows, Windows


class MicroBatchSource:
    """One user's loader and the micro-batches it is cut into.

    Samples are counted in the order that the ranks share; where every rank has an order of its own
    (a sharded sampler, an iterable dataset on several ranks), in that of one rank.

    Args:
        loader: The user's DataLoader.
        settings: How the Trainer reads it.
        own_seed: What to draw seeds of data workers from, if not from what the user's loader draws them from.

    Raises:
        UserError: If the loader cannot be cut anew.
    """

    def __init__(
        self, loader: "DataLoader[Any]", settings: SourceSettings, *, own_seed: torch.Generator | None = None
    ) -> None:
        world_size = settings.world_size
        loader = peekable(loader)
        self.recipe = read_loader(loader, world_size=world_size, shard=settings.shard, shuffle=settings.shuffle)
        self.user_loader = loader
        self.recipe_factor = settings.recipe_factor
        self.world_size = world_size
        self.limit_batches = settings.limit_batches
        self.cut_in_step = settings.cut_in_step
        self._shuffle = settings.shuffle
        self._largest_over_ranks = settings.largest_over_ranks
        self._keeps_batches = settings.cut_in_step and world_size == 1  # ranks share windows out evenly
        self.ranks_per_order = world_size if self.recipe.shared else 1
        self.sampler = WindowBatchSampler(
            self.recipe.order,
            share=settings.rank if self.recipe.shared else 0,
            seed=settings.seed,
            generator=loader.generator if own_seed is None else own_seed,
            draws=draws_a_seed(self.recipe.order) and world_size == 1,
        )
        self.loader: DataLoader[Any] | None = None
        self._ends: tuple[int, list[int]] | None = None
        self._done_after = -1, 0  # a micro-batch, and the batches of the recipe after it
        self._epoch_end: int | None = None  # samples after which all its batches are done
        self._epoch_batches: int | None = None

    @property
    def counted_later(self) -> bool:
        """Whether a window's samples are known only as they come: streams end where they please, other ranks too."""
        return isinstance(self.recipe.order, Stream) or self.sharded_ranks > 1

    @property
    def streams(self) -> bool:
        """Whether the loader reads an iterable dataset, whose samples are counted in each batch."""
        return isinstance(self.recipe.order, Stream)

    @property
    def keeps_place(self) -> bool:
        """Whether a resume in mid-epoch repeats no sample: streams are read from their start."""
        return not self.streams

    def recipe_effective(self, epoch: int) -> int:
        """Effective batch of the recipe: batch size × factor × ranks; the largest where batches vary."""
        if self.recipe.batch_size is not None:
            return self.recipe.batch_size * self.recipe_factor * self.world_size
        largest = GivenWindows.of(
            self._batch_sizes(epoch), per_window=self.recipe_factor * self.ranks_per_order
        ).largest
        return largest * self.sharded_ranks

    def recipe_batch(self, epoch: int) -> int:
        """Most samples that the user's loader yields to a rank at once."""
        return -(-self.recipe_effective(epoch) // (self.recipe_factor * self.world_size))

    def total(self, epoch: int) -> int | None:
        """Samples of an epoch that training uses; ``None`` for a stream of unknown length."""
        if self.recipe.batch_size is None:
            return self._batch_ends(epoch)[-1]
        size, batches = self.recipe.order.size, self._batches_used()
        if batches is None or batches == self._batches():
            return size
        used = batches * self.recipe.batch_size * self.ranks_per_order
        return used if size is None else min(size, used)

    def check_effective(self, effective: int) -> None:
        """Any number of samples makes up a window."""

    def arrange(
        self, epoch: int, effective: int | None, micro_batch: int, *, samples_done: int = 0, enabled: bool = True
    ) -> AccumulationPlan:
        """Cut one epoch and return how its full windows are cut.

        Args:
            epoch: The epoch, for its order.
            effective: Effective batch size; ``None`` keeps the recipe's windows.
            micro_batch: Most samples of a micro-batch.
            samples_done: Samples of the order that an earlier run has trained on.
            enabled: False while the micro-batch is not known yet: the loader yields nothing then.

        Raises:
            UserError: If a rank or the whole epoch is left without a sample, or ranks with orders of their own
                cannot share a window.
        """
        windows = self._windows(epoch, effective, samples_done)
        if isinstance(windows, GivenWindows):  # windows that start anew in mid-epoch may be larger than any before
            size = self._largest_over_ranks(windows.largest) * self.sharded_ranks
        else:
            size = effective or self.recipe_effective(epoch)
            total = self.total(epoch)
            if effective is not None and total and windows.count == 0 and samples_done == 0:
                raise UserError(
                    f"effective_batch_size={size} is more than the {total * self.sharded_ranks} samples of an epoch, "
                    "and drop_last=True drops the only window: use drop_last=False or a smaller effective batch."
                )
        plan = plan_accumulation(size, micro_batch=micro_batch, world_size=self.world_size)
        batches: Sequence[int] | None = None
        pieces = 1
        if isinstance(windows, GivenWindows) and self.world_size == 1:
            batches = self._batch_ends(epoch)
            groups = windows.batches(batches)
            pieces = 1 if self._keeps_batches else -(-max(map(max, groups), default=1) // micro_batch)
            plan = in_groups(groups, pieces=pieces)
        elif effective is None and self.world_size == 1:
            size = self.recipe.batch_size or 0
            as_recipe = plan.factor == self.recipe_factor and plan.micro_batch_size == size
            if as_recipe or self._keeps_batches:
                batches, micro_batch = (), size if as_recipe else micro_batch
        epoch_plan = EpochPlan(
            windows,
            micro_batch,
            plan.factor,
            self.ranks_per_order,
            whole=self.sharded_ranks > 1,
            batches=batches,
            pieces=pieces,
        )
        self.sampler.arrange(epoch, epoch_plan, enabled=enabled)
        total = self.total(epoch)
        self._done_after, self._epoch_end = (-1, 0), None
        if windows.count is not None:
            self._epoch_end = sum(windows.span(windows.count - 1)) if windows.count else 0
        self._epoch_batches = None if total is None or self.length is None else self.recipe_batches(total)
        if self.loader is None:
            sized = self.length is not None
            self.loader = rebatch(self.user_loader, self.sampler, sized=sized, shuffle=self._shuffle)
        object.__setattr__(self.loader, "batch_size", plan.micro_batch_size)
        return plan

    @contextmanager
    def seeded_as_before(self) -> Iterator[None]:
        """Within, the loop iterates the loader again, for which it has drawn the seed of data workers already."""
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
    def length(self) -> int | None:
        """Micro-batches of the arranged epoch on each rank; ``None`` for a stream, which ends where it pleases."""
        return None if self.recipe.batch_size is not None and self.recipe.order.size is None else self.epoch_plan.length

    @property
    def epoch_batches(self) -> int | None:
        """Batches of the recipe in the arranged epoch, on one rank; ``None`` for a stream."""
        return self._epoch_batches

    @property
    def at_most(self) -> int | None:
        """Micro-batches after which the epoch is not read any further; ``None`` for a stream without a limit."""
        return self.epoch_plan.length

    @property
    def epoch_plan(self) -> EpochPlan:
        """The cut of the arranged epoch."""
        assert self.sampler.plan is not None, "the feed is read before it was arranged"
        return self.sampler.plan

    @property
    def done(self) -> int:
        """Micro-batches of the arranged epoch that an earlier run has trained on."""
        return self.epoch_plan.done

    def chunk(self, index: int) -> Chunk:
        """The ``index``-th micro-batch of the epoch on this rank."""
        return self.sampler.chunk(index)

    def sample_indices(self, epoch: int, most: int = 64) -> list[Any]:
        """Indices of some samples from all over the dataset."""
        order = self.recipe.order
        if isinstance(order, (Sequential, Shuffled)):
            return spread(order.size, most)
        return list(order.draw(epoch, self.sampler.seed)[0:most])

    def looks(self, epoch: int) -> ScanOrder:
        """Looks at all samples that training may meet, as far as that is known."""
        order, total = self.recipe.order, self.total(epoch)
        if isinstance(order, Stream):
            return ScanOrder(None, order.size)
        sampler = order.sampler if isinstance(order, FromSampler) else None
        if isinstance(order, Sequential):
            met: Sequence[Any] = range(order.size if total is None else total)
        elif isinstance(order, Shuffled):
            met = range(order.size)
        elif type(sampler) is RandomSampler:
            met = range(len(sampler.data_source))
        elif type(sampler) is WeightedRandomSampler:
            met = sampler.weights.nonzero().flatten().tolist()
        else:
            met = order.draw(epoch, self.sampler.seed)
        return ScanOrder(met, len(met))

    @property
    def sharded_ranks(self) -> int:
        """Ranks with an order of their own: samples of all ranks for one of the order."""
        return self.world_size // self.ranks_per_order

    def recipe_batches(self, samples: int) -> int:
        """Batches of the recipe, on one rank, that so many samples of the arranged epoch make up.

        The end of the last window completes them all, whatever ragged batch or window was dropped.
        """
        over = self._epoch_end is not None and samples >= self._epoch_end
        if self.recipe.batch_size is None:
            ends = self._batch_ends(self.sampler.epoch)
            return (
                -(-(len(ends) - 1) // self.ranks_per_order)
                if over
                else (bisect_right(ends, samples) - 1) // self.ranks_per_order
            )
        batches = self._batches_used() if over else None
        return samples // (self.recipe.batch_size * self.ranks_per_order) if batches is None else batches

    def samples_of(self, batches: int) -> int:
        """Samples of an epoch that so many batches of the recipe on each rank hold."""
        if self.recipe.batch_size is None:
            ends = self._batch_ends(self.sampler.epoch)
            return ends[min(batches * self.ranks_per_order, len(ends) - 1)]
        samples, total = batches * self.recipe.batch_size * self.ranks_per_order, self.total(self.sampler.epoch)
        return samples if total is None else min(samples, total)

    def batches_after(self, index: int) -> int:
        """Batches of the recipe that are done once each rank has done this micro-batch; none before the first."""
        if index < 0:
            return 0
        if index != self._done_after[0]:
            position = index % self.epoch_plan.factor
            self._done_after = index, self.recipe_batches(self.sampler.window(index).samples_after(position))
        return self._done_after[1]

    def expected(self, chunk: Chunk) -> int | None:
        """Samples that a batch of the epoch should hold; ``None`` where only the batch can tell."""
        return None if self.streams or not chunk.count else chunk.count

    @property
    def batch_source(self) -> BatchSource:
        """What is known of the batches."""
        epoch = self.sampler.epoch
        return CollatedBatches([self.user_loader], [lambda: self.sample_indices(epoch, most=8)])

    def samples_at(self, index: int) -> CollatedAgain | None:
        """The samples of the ``index``-th micro-batch, fetched again; ``None`` of a stream."""
        if self.streams:
            return None
        return CollatedAgain(self.user_loader, collect_samples(self.user_loader, self.sampler.indices(index)))

    may_grow = False
    """No batch is larger than the recipe's."""

    def largest_extent(self, recipe_batch: int) -> int:
        """More samples than this a batch cannot hold."""
        return recipe_batch

    def check_cut(self) -> None:
        """Samples are at hand, so a batch has smaller parts."""

    @property
    def keeps_groups(self) -> bool:
        """Whether a batch sampler of the user's own decides what is together: no micro-batch mixes its batches."""
        return isinstance(self.recipe.order, FromBatches) and self.world_size == 1

    @property
    def may_drop(self) -> bool:
        """Whether a batch may hold fewer samples than were fetched for it."""
        return self.user_loader.collate_fn is not default_collate

    @property
    def workers(self) -> int:
        """Processes that fetch data."""
        return self.user_loader.num_workers

    def steps(self, epoch: int, effective: int | None) -> int | None:
        """Optimizer steps of one epoch; ``None`` for a stream of unknown length."""
        return self._windows(epoch, effective, 0).count

    def _batches(self) -> int | None:
        """Batches of the recipe in an epoch, on one rank; ``None`` for a stream of unknown length."""
        size, batch = self.recipe.order.size, self.recipe.batch_size
        if size is None or batch is None:
            return None
        share = -(-size // self.ranks_per_order)
        return share // batch if self.recipe.drop_last else -(-share // batch)

    def _batches_used(self) -> int | None:
        """The same, those that a length of the loader's own and the trainer's limit let through."""
        batches = self._batches()
        if batches is not None and type(self.user_loader).__len__ is not DataLoader.__len__:
            batches = min(batches, len(self.user_loader))
        if isinstance(self.limit_batches, int):
            return self.limit_batches if batches is None else min(batches, self.limit_batches)
        if self.limit_batches == 1.0:
            return batches
        if batches is None:
            raise UserError(
                f"limit_train_batches={self.limit_batches} is a fraction, and the length of the training data is not "
                "known: use a whole number of batches."
            )
        return self._fraction(batches)

    def _fraction(self, batches: int) -> int:
        used = int(batches * self.limit_batches)
        if batches and not used:
            raise UserError(
                f"limit_train_batches={self.limit_batches} of {batches} batches leaves none: "
                f"use at least {1 / batches:.3g}."
            )
        return used

    def _batch_sizes(self, epoch: int) -> list[int]:
        """Sizes of the batches that a custom batch sampler yields and the trainer's limit lets through."""
        assert isinstance(self.recipe.order, FromBatches)
        sizes = [len(batch) for batch in self.recipe.order.batches(epoch, self.sampler.seed)]
        if isinstance(self.limit_batches, int):
            return sizes[: self.limit_batches * self.ranks_per_order]
        if self.limit_batches == 1.0:
            return sizes
        return sizes[: self._fraction(-(-len(sizes) // self.ranks_per_order)) * self.ranks_per_order]

    def _batch_ends(self, epoch: int) -> list[int]:
        """Samples before each of these batches, and after the last: asked for at every micro-batch."""
        if self._ends is None or self._ends[0] != epoch:
            self._ends = epoch, [0, *accumulate(self._batch_sizes(epoch))]
        return self._ends[1]

    def _batches_per_window(self, epoch: int, effective: int | None) -> int:
        """Batches of a custom batch sampler in one window: they belong together, and are never mixed.

        Raises:
            UserError: If no whole number of them makes up the effective batch.
        """
        if effective is None:
            return self.recipe_factor * self.ranks_per_order
        sizes = self._batch_sizes(epoch)
        largest = max(sizes, default=1)
        number, left = divmod(effective * self.ranks_per_order, largest * self.world_size)
        if left or not number or any(size != largest for size in sizes[:-1]):
            of = f"{largest}" if min(sizes[:-1], default=largest) == largest else f"{min(sizes)} to {max(sizes)}"
            raise UserError(
                f"effective_batch_size={effective} is no whole number of batches of {of} samples, as the batch sampler "
                f"{type(self.user_loader.batch_sampler).__name__} makes them, and these are not mixed: "
                + (
                    f"use a multiple of {largest * self.sharded_ranks}."
                    if of == f"{largest}"
                    else "say with Trainer(accumulate_grad_batches=…) how many batches make up a step."
                )
            )
        return number

    def _windows(self, epoch: int, effective: int | None, samples_done: int) -> Windows:
        if self.recipe.batch_size is None and not self.streams:
            per_window = self._batches_per_window(epoch, effective)
            return GivenWindows.of(self._batch_sizes(epoch), per_window=per_window, samples_done=samples_done)
        effective = effective or self.recipe_effective(epoch)
        require_effective_batch(effective, self.world_size)
        size, left = divmod(effective * self.ranks_per_order, self.world_size)
        if left:
            raise UserError(
                f"effective_batch_size={effective} is not a multiple of the {self.world_size} ranks, and every rank "
                "has an order of samples of its own, so a window cannot be shared out: use "
                f"{effective - effective % self.world_size}."
            )
        total = self.total(epoch)
        drop_last = self.recipe.drop_last and total == self.recipe.order.size
        return RegularWindows(total, size, drop_last, samples_done)
