"""The training data of one fit: cut in the loader into micro-batches, or left as they are and cut in the step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, default_collate

from lightning_ga.errors import UserError
from lightning_ga.loading.orders import Order, Sequential
from lightning_ga.loading.rebatch import SourceSettings, read_order, rebatch, why_in_step
from lightning_ga.loading.sampler import WindowBatchSampler
from lightning_ga.loading.sized import SampleSizes, SizeOf
from lightning_ga.loading.step_source import StepSource
from lightning_ga.loading.trials import SampleTrials, TrialBatches
from lightning_ga.plan.accumulation import AccumulationPlan, plan_accumulation, require_effective_batch
from lightning_ga.plan.schedule import Growth
from lightning_ga.plan.windows import EpochPlan, GrowingWindows, RegularWindows, Window, Windows


def read_source(
    loader: Any, settings: SourceSettings, *, in_step: str = "", size_of: SizeOf | None = None
) -> "LoaderSource | StepSource":
    """Return the data, cut in the loader or in the step; ``in_step`` is the caller's reason for the step, if any."""
    why = in_step or why_in_step(loader)
    order = None if why else read_order(loader, settings)
    if order is not None:
        return LoaderSource(loader, order, settings, size_of)
    why = why or "an order of samples of its own on each rank"
    if size_of is not None:
        raise UserError(
            f"size_of= decides by index which samples share a micro-batch, and the training data are {why}: leave "
            "size_of= out, or give a map-style dataset in one DataLoader with batch_size and a sampler."
        )
    return StepSource(loader, why, settings)


class LoaderSource:
    """A DataLoader cut into windows and micro-batches, an epoch at a time.

    Places of samples are those in the order that all ranks share.
    """

    cut_in_step = varies = False
    why = ""

    def __init__(
        self, loader: "DataLoader[Any]", order: Order, settings: SourceSettings, size_of: SizeOf | None = None
    ) -> None:
        self._user_loader, self._order, self.settings = loader, order, settings
        batches: Any = loader.batch_sampler
        self.batch_size: int = batches.batch_size  # of the recipe, on one rank
        self._drop_last: bool = batches.drop_last
        self.may_drop_samples = loader.collate_fn is not default_collate  # those of a micro-batch
        self._sampler = WindowBatchSampler(order, rank=settings.rank, seed=settings.seed, generator=loader.generator)
        self.loader = rebatch(loader, self._sampler, shuffle=settings.may_shuffle)  # the fit loop reads this one
        self.sizes = None if size_of is None else SampleSizes(loader, size_of, order, settings.seed)

    @property
    def plan(self) -> EpochPlan:
        """The cut of the arranged epoch."""
        assert self._sampler.plan is not None, "the data are read before an epoch was arranged"
        return self._sampler.plan

    def window(self, index: int) -> Window:
        """Return one window of the arranged epoch as this rank runs it."""
        return self.plan.window(index, self.settings.rank)

    def recipe_effective(self) -> int:
        """Return the recipe's effective batch: batch size × factor × ranks."""
        return self.batch_size * self.settings.recipe_factor * self.settings.world_size

    def total(self, epoch: int | None = None) -> int:
        """Return the samples of an epoch, by default the arranged one, over all ranks and within the Trainer's limit.

        A ragged window at its end may still be dropped.
        """
        size = self._size(epoch)
        batches, used = self._batches(size), self._limited(self._batches(size))
        return size if used == batches else min(size, used * self.batch_size * self.settings.world_size)

    def within_epoch(self, effective: int, epoch: int) -> int:
        """Return the effective batch; without ``drop_last``, at most the samples of an epoch."""
        total = self.total(epoch)
        return effective if self._drop_last or not total else min(effective, max(total, self.settings.world_size))

    def recipe_batches(self, epoch: int | None = None) -> int:
        """Return the batches of the recipe on each rank in an epoch, within the Trainer's limit."""
        return self._limited(self._batches(self._size(epoch)))

    def arrange(
        self,
        epoch: int,
        effective: int | Growth,
        micro_batch: int,
        *,
        samples_done: int = 0,
        windows_done: int = 0,
        start: int | None = None,
        enabled: bool = True,
    ) -> AccumulationPlan:
        """Cut one epoch, and return how its full windows are cut; if they grow, the largest.

        ``samples_done``: samples that an earlier run has trained on, in ``windows_done`` windows. The next iteration of
        the loader begins with the window ``start``, by default the first that is not done. Unless ``enabled``, the
        loader yields nothing.
        """
        windows, total = self._windows(epoch, effective, samples_done, windows_done), self.total(epoch)
        if windows.count == 0 and self.recipe_batches(epoch):
            raise UserError(
                f"The effective batch of {windows.largest} samples is more than the {total} of an epoch, and "
                "drop_last=True drops the only window: use drop_last=False or a smaller effective batch."
            )
        world_size = self.settings.world_size
        plan = plan_accumulation(windows.largest or world_size, micro_batch=micro_batch, world_size=world_size)
        epoch_plan = EpochPlan(windows, micro_batch, world_size)
        if self.sizes is not None:
            plan, epoch_plan = self.sizes.cut(plan, epoch_plan, self._order.draw(epoch, self.settings.seed)[:total])
        start = epoch_plan.done if start is None else start
        self._sampler.arrange(epoch, epoch_plan, start=start, enabled=enabled)
        object.__setattr__(self.loader, "batch_size", plan.micro_batch_size)
        return plan

    def steps_of(self, epoch: int, effective: int | Growth) -> tuple[int, int]:
        """Return optimizer steps and samples, over all ranks, of a whole epoch."""
        windows = self._windows(epoch, effective)
        return windows.count, sum(windows.span(windows.count - 1)) if windows.count else 0

    def trial_batches(self, epoch: int) -> TrialBatches:
        """Return the source of batches for probe and measurement."""
        order, total = self._order, self.total(epoch)
        met = order.pool(epoch, self.settings.seed) if self.sizes is None else self.sizes.descending
        met = met[:total] if type(order) is Sequential and self.sizes is None else met
        return SampleTrials(self._user_loader, met, -(-total // self.settings.world_size))

    @contextmanager
    def in_recipe_batches(self, epoch: int) -> Iterator[None]:
        """Return a context in which the loader is as long as the user's; at least one batch if there are windows."""
        self._sampler.length = self._batches(self._size(epoch))
        try:
            yield
        finally:
            self._sampler.length = None

    @contextmanager
    def seeded_as_before(self) -> Iterator[None]:
        """Return a context in which workers get the seed that the first, empty ``iter(loader)`` has drawn."""
        own, earlier = self.loader.generator, self._sampler.take_seed_back()
        self.loader.generator = own if earlier is None else earlier
        try:
            yield
        finally:
            self.loader.generator = own

    def _size(self, epoch: int | None) -> int:
        return self._order.size(self._sampler.epoch if epoch is None else epoch, self.settings.seed)

    def _windows(self, epoch: int, effective: int | Growth, samples_done: int = 0, windows_done: int = 0) -> Windows:
        total = self.total(epoch)
        drops = self._drop_last and total == self._size(epoch)
        world_size, done = self.settings.world_size, windows_done
        if isinstance(effective, Growth):
            at = effective.at
            return GrowingWindows(
                total, lambda *place: require_effective_batch(at(*place), world_size), drops, samples_done, done
            )
        size = require_effective_batch(effective, world_size)
        return RegularWindows(total, size, drops, samples_done, done or -(-samples_done // size))

    def _batches(self, size: int) -> int:
        """Return the recipe's batches of so many samples, on one rank, before any limit."""
        share = -(-size // self.settings.world_size)
        return share // self.batch_size if self._drop_last else -(-share // self.batch_size)

    def _limited(self, batches: int) -> int:
        """Return the batches on one rank within the Trainer's limit."""
        limit = self.settings.limit_batches
        if isinstance(limit, int):
            return min(batches, limit)
        used = int(batches * limit)
        if batches and not used:
            raise UserError(
                f"limit_train_batches={limit} of {batches} batches leaves none: use at least {1 / batches:.3g}."
            )
        return used
