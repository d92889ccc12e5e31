"""The training data of one fit, cut in the loader into micro-batches; ``step_source.py`` has those of the step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ga.errors import UserError
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.orders import MOST_DRAWN, FromSampler, Order, Sequential
from lightning_ga.loading.rebatch import SourceSettings, copy_loader, read_order, rebatch, why_in_step
from lightning_ga.loading.sample_sizes import SampleSizes, SizeOf
from lightning_ga.loading.sampler import WindowBatchSampler, listed
from lightning_ga.loading.stand_ins import StandIns
from lightning_ga.loading.step_source import StepSource
from lightning_ga.plan.accumulation import (
    AccumulationPlan,
    ceil_div,
    plan_accumulation,
    plan_unequal_shares,
    require_effective_batch,
)
from lightning_ga.plan.batch_schedule import PiecewiseSchedule
from lightning_ga.plan.recipe import Recipe, RecipeEpoch
from lightning_ga.plan.windows import EpochPlan, GrowingWindows, RegularWindows, Window, Windows


def read_source(
    loader: Any, settings: SourceSettings, *, why: str = "", size_of: SizeOf | None = None
) -> "LoaderSource | StepSource":
    """Return the data, cut in the loader or in the step; ``why`` is the caller's reason for the step, if any."""
    why = why or why_in_step(loader)
    if not why:
        found = _cut_in_loader(loader, settings, size_of)
        if isinstance(found, LoaderSource):
            return found
        why = found
    if size_of is not None:
        raise UserError(
            "size_of= decides by index which samples share a micro-batch, and the training data cannot be cut in the "
            f"loader ({why}): leave size_of= out, or give a map-style dataset in one DataLoader with batch_size and a "
            "sampler."
        )
    return StepSource(loader, why, settings)


def _cut_in_loader(loader: "DataLoader[Any]", settings: SourceSettings, size_of: SizeOf | None) -> "LoaderSource | str":
    """Return the data, or why their samples show that only the step can cut them."""
    order = read_order(loader, settings)
    if order is None:
        return "an order of samples of its own on each rank"
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(order, FromSampler) and len(sampler) > MOST_DRAWN:
        return f"a sampler of {len(sampler):,} samples"
    source = LoaderSource(loader, order, settings, size_of)
    # The first rank's verdict counts: a slower rank reads fewer samples and may not see the reason.
    why: str = settings.of_first_rank(source.samples.why_in_step(source.recipe.batch_size))
    return why or source


class LoaderSource:
    """A DataLoader cut into windows and micro-batches, an epoch at a time.

    Places of samples are those in the order that all ranks share.
    """

    first_may_be_smaller = False  # whether the first batch may be smaller than others

    def __init__(
        self, loader: "DataLoader[Any]", order: Order, settings: SourceSettings, size_of: SizeOf | None = None
    ) -> None:
        self._epoch = settings.epoch
        self._order = order
        self._rank = settings.rank
        batches: Any = loader.batch_sampler
        self.recipe = Recipe(
            batches.batch_size,
            settings.recipe_factor,
            settings.world_size,
            drop_last=batches.drop_last,
            limit=settings.limit_batches,
        )
        # Lightning keeps this number until data are loaded again, also if a dataset becomes longer.
        self.batches_at_set_up = self.recipe.batches_within_limit(order.size(settings.epoch))
        self._sampler = WindowBatchSampler(order, rank=settings.rank)
        self.sizes = None if size_of is None else SampleSizes(loader, size_of, order, settings.epoch)
        self.samples = KnownSamples(loader, self._indices, trusted=size_of is not None)
        self.stand_ins = StandIns(self.samples, self._sampler, self.recipe)
        fill = self.stand_ins.fill if self.samples.may_drop else iter  # something may leave nothing of a micro-batch
        loader = self.samples.with_shown_batch()
        if not self.samples.can_be_read_apart:
            loader = copy_loader(loader, collate_fn=partial(_collate_with_note, loader.collate_fn))
        if settings.world_size > 1:  # another rank may have read other samples, and must cut alike
            self.joins_batches = settings.of_first_rank(self.joins_batches)
        # The fit loop reads this one.
        self.loader: Any = rebatch(loader, self._sampler, shuffle=settings.may_shuffle, fill=fill)

    @property
    def epoch_plan(self) -> EpochPlan:
        """The cut of the arranged epoch."""
        return self._sampler.plan

    def window(self, index: int) -> Window:
        """Return one window of the arranged epoch as this rank runs it."""
        return self.epoch_plan.window(index, self._rank)

    def index_of(self, window: Window, index_in_window: int) -> Any:
        """Return the index in the dataset of the first sample of a micro-batch."""
        place = self.epoch_plan.places(window, index_in_window)[0]
        return listed(self._order.draw(self._sampler.epoch)[place : place + 1])[0]

    def epoch(self, number: int) -> RecipeEpoch:
        """Return the batches of the recipe, and their samples, in an epoch of the dataset as long as it is now."""
        return self.recipe.epoch(self._order.size(number), self.batches_at_set_up)

    @cached_property
    def joins_batches(self) -> bool:
        """Whether the samples of several batches of the recipe can be collated to one."""
        return self.samples.joins_batches(self.recipe.batch_size)

    def within_collatable(self, micro_batch: int) -> int:
        """Return a micro-batch of at most the recipe's batch, unless samples of several can be collated to one.

        That is tried when it is first asked for.
        """
        if micro_batch > self.recipe.batch_size and not self.joins_batches:
            return self.recipe.batch_size
        return micro_batch

    def kept_order(self) -> str | None:
        """Return the order of the running epoch for a checkpoint, if its sampler would not give it again."""
        return self._order.kept() if isinstance(self._order, FromSampler) else None

    def restore_order(self, kept: str | None, epoch: int) -> None:
        """Continue an epoch in the order that a checkpoint has kept; warn if it has kept none and should have."""
        order = self._order
        if not isinstance(order, FromSampler):
            return
        if kept is not None:
            order.restore(kept, epoch)
        elif order.changes(epoch):
            rank_zero_warn(
                "The sampler may yield another order each time that it is asked for one epoch, and the checkpoint does "
                "not contain the order of this one: some of its samples come twice, and others not before the next. "
                "Let the order depend on the epoch (set_epoch)."
            )

    def within_epoch(self, effective: int, epoch: int) -> int:
        """Return the effective batch, at most the samples of an epoch."""
        total = self.epoch(epoch).samples
        return effective if total == 0 else min(effective, max(total, self.recipe.world_size))

    def arrange(
        self,
        epoch: int,
        schedule: PiecewiseSchedule,
        micro_batch: int,
        *,
        multiple: int = 1,
        limits: tuple[int, ...] = (),
        ratio: tuple[int, ...] = (),
        samples_done: int = 0,
        windows_done: int = 0,
        start: int | None = None,
        enabled: bool = True,
    ) -> AccumulationPlan:
        """Cut one epoch, and return how its full windows are cut; if they grow, the largest.

        ``limits`` are those of all ranks, and ``ratio`` that of their shares, if these may be unequal.
        ``samples_done``: samples that an earlier run has trained on, in ``windows_done`` windows. The next iteration of
        the loader begins with the window ``start``, by default the first that is not done. Unless ``enabled``, the
        loader yields nothing.
        """
        total = self.epoch(epoch).samples
        windows = self._windows(total, schedule, samples_done, windows_done)
        world_size = self.recipe.world_size
        largest = windows.largest or world_size  # an epoch that is done has no window, and yet a plan
        if limits:
            # An error may have lowered this rank's since ranks have told theirs.
            limits = tuple(min(most, micro_batch) if rank == self._rank else most for rank, most in enumerate(limits))
            plan = plan_unequal_shares(largest, limits=limits, ratio=ratio, rank=self._rank, multiple=multiple)
        else:
            plan = plan_accumulation(largest, micro_batch=micro_batch, world_size=world_size, multiple=multiple)
        rank = self._rank if ratio else 0  # of equal shares the first is the largest: all ranks have its factor
        epoch_plan = EpochPlan(windows, micro_batch, world_size, multiple, ratio, rank)
        if self.sizes is not None:
            plan, epoch_plan = self.sizes.cut(plan, epoch_plan, self._order.draw(epoch)[:total])
        if start is None:
            start = epoch_plan.done
        self._sampler.arrange(epoch, epoch_plan, start=start, enabled=enabled)
        # What others may read off it; a rank may have no samples.
        object.__setattr__(self.loader, "batch_size", max(1, plan.micro_batch_size))
        return plan

    def steps_of(self, epoch: int, schedule: PiecewiseSchedule) -> tuple[int, int]:
        """Return optimizer steps and samples, over all ranks, of a whole epoch."""
        total = self.epoch(epoch).samples
        return self._windows(total, schedule).count, total

    def _indices(self) -> Sequence[Any]:
        """Return the indices of samples that training may meet."""
        if self.sizes is not None:
            return self.sizes.by_size
        indices = self._order.pool(self._epoch)
        if type(self._order) is Sequential:  # a shuffled epoch may draw any of them
            return indices[: self.epoch(self._epoch).samples]
        return indices

    def largest_micro_batch(self, epoch: int) -> int:
        """Return the most samples that a micro-batch of an epoch may have."""
        return self.within_collatable(ceil_div(self.epoch(epoch).samples, self.recipe.world_size))

    @contextmanager
    def in_recipe_batches(self, epoch: int) -> Iterator[None]:
        """Return a context in which the loader is as long as the user's."""
        self._sampler.length = self.recipe.batches(self._order.size(epoch))
        try:
            yield
        finally:
            self._sampler.length = None

    def _windows(
        self, total: int, schedule: PiecewiseSchedule, samples_done: int = 0, windows_done: int = 0
    ) -> Windows:
        world_size = self.recipe.world_size
        if schedule.is_constant:
            size = require_effective_batch(schedule.largest, world_size)
            return RegularWindows(total, size, samples_done, windows_done)

        def size_at(windows: int, samples: int) -> int:
            return require_effective_batch(schedule.at(windows, samples), world_size)

        return GrowingWindows(total, size_at, samples_done, windows_done)


def _collate_with_note(collate: Callable[[Any], Any], samples: Any) -> Any:
    """Collate samples that were not read before; an error says what helps if it came of their company."""
    try:
        return collate(samples)
    except Exception as error:
        error.add_note(
            "AutoAccumulate cuts these data in the loader, where samples of several batches of the DataLoader may be "
            "collated to one. If only the DataLoader's own batches can be collated, because the sampler groups samples "
            'by length, cut these batches in the step: AutoAccumulate(micro_batching="step").'
        )
        raise
