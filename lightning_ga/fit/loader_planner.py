"""How the loader cuts an epoch: its effective batches, its windows and their micro-batches.

Tested in tests/integration/test_schedules.py and tests/differential/test_differential.py.
"""

from dataclasses import dataclass

from lightning_ga.fit.parts import FitParts
from lightning_ga.loading.source import LoaderSource
from lightning_ga.plan.accumulation import AccumulationPlan, ceil_div, plan_accumulation
from lightning_ga.plan.batch_schedule import PiecewiseSchedule, constant
from lightning_ga.plan.recipe import Recipe, RecipeEpoch


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """The inputs of an epoch's plan. If an epoch is planned again with these, its windows are the same."""

    number: int
    recipe: RecipeEpoch
    schedule: PiecewiseSchedule  # of its effective batches
    samples_done: int  # before its first window
    windows_done: int


class LoaderPlanner:
    """Plans epochs by what was asked for and what fits: last the epoch ``planned``, with ``plan`` for full windows."""

    planned: PlannedEpoch
    plan: AccumulationPlan

    def __init__(self, parts: FitParts, source: LoaderSource) -> None:
        self._parts = parts
        self.source = source
        self._cut_by = 0  # the limit by which the epoch was cut
        self.most_read: int | None = None  # samples that were read, if training alone reads samples

    def use(self, source: LoaderSource) -> None:
        """Plan epochs of a loader that is loaded again."""
        if source.sizes is not None and self.source.sizes is not None:
            source.sizes.follow(self.source.sizes)
        self.source = source

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def recipe(self) -> Recipe:
        """The batches as the user wrote them."""
        return self.source.recipe

    @property
    def micro_batch(self) -> int:
        """The micro-batch that ``accumulate=`` multiplies, in multiples: the recipe's while the limit is not known."""
        known = self._parts.limit.micro_batch_at_start(self.recipe.batch_size)
        return self._parts.request.in_multiples(known)

    def effective(self, epoch: int) -> int:
        """Return the largest effective batch of an epoch, at most the samples of the epoch."""
        asked = self._parts.request.effective_batch(epoch, self.micro_batch, self.recipe.world_size)
        return self.source.within_epoch(asked or self.recipe.effective, epoch)

    def samples_of_epoch(self, epoch: int) -> int:
        """Return the samples of an epoch, over all ranks."""
        return self.source.epoch(epoch).samples

    def note_first(self) -> None:
        """Note that a first micro-batch was read as it is planned now, because samples cannot be read apart."""
        self.most_read = self.plan.micro_batch_size

    def useful_limit(self, epochs: range) -> int:
        """Return the largest micro-batch that these epochs can use, and can be tried."""
        world_size = 1 if self._parts.shares.differ else self.recipe.world_size  # a rank may get nearly all
        high = self._parts.request.useful_limit(
            epochs,
            recipe=self.recipe.effective,
            total=self.source.epoch(epochs.start).samples,
            world_size=world_size,
        )
        if not self.source.samples.first:
            share = ceil_div(self.effective(epochs.start), self.recipe.world_size)
            high = min(high, self.most_read or share)
        return self.source.capped(max(1, high))

    def useful_now(self) -> int:
        """Return the largest micro-batch that the window that comes next can use, and can be tried."""
        place = self._parts.progress.place
        position = self._parts.progress.position_in(place.epoch)
        steps = position.steps_before + position.windows_done
        asked = self._parts.request.count_at(place.epoch, step=steps, samples=position.samples_seen)
        high = self.useful_limit(place.epochs[:1])
        if asked is None:
            return high
        return min(high, ceil_div(asked, self.recipe.world_size))

    def steps(self, epochs: int) -> int:
        """Count the optimizer steps of a training of so many epochs."""
        steps = 0
        samples = 0
        for epoch in range(epochs):
            more, seen = self.source.steps_of(epoch, self._schedule_of(epoch, steps=steps, samples=samples))
            steps += more
            samples += seen
        return steps

    def _schedule_of(self, epoch: int, *, steps: int, samples: int) -> PiecewiseSchedule:
        """Return the effective batches of an epoch that begins after so many steps and samples."""
        growth = self._parts.request.growth(self.micro_batch, self.recipe.world_size, steps, samples)
        return growth or constant(self.effective(epoch))

    def advice(self, epochs: range) -> str:
        """Say that an effective batch is larger than the data."""
        asked = max((self._parts.request.effective(epoch) or 0 for epoch in epochs), default=0)
        total = self.source.epoch(epochs.start).samples
        if asked <= total:
            return ""
        return (
            f"The effective batch of {asked:,} samples is above the {total:,} of an epoch: it is a single "
            "optimizer step over all of them, and a larger batch changes nothing."
        )

    # --- plans ---------------------------------------------------------------------------------

    def arrange(self, number: int, *, enabled: bool = True) -> None:
        """Plan an epoch; the loader yields nothing until that is ``enabled``."""
        position = self._parts.progress.position_in(number)
        schedule = self._schedule_of(number, steps=position.steps_before, samples=position.samples_before)
        recipe = self.source.epoch(number)
        self.planned = PlannedEpoch(number, recipe, schedule, position.samples_done, position.windows_done)
        self.cut(enabled=enabled)
        if not schedule.is_constant:
            self.plan_window(position.windows_done, position.samples_done)

    def cut(self, *, enabled: bool = True, start: int | None = None) -> None:
        """Cut the windows of the planned epoch by the limit; the loader begins with the window ``start``."""
        epoch = self.planned
        shares = self._parts.shares
        ranks = 1 if shares.limits else self.recipe.world_size  # shares are equal until the limits of ranks are known
        micro_batch = ceil_div(epoch.schedule.largest, ranks)
        self._cut_by = self._parts.limit.samples
        if enabled:
            micro_batch = self._within_limit(micro_batch)
        self.plan = self.source.arrange(
            epoch.number,
            epoch.schedule,
            micro_batch,
            multiple=self._parts.request.multiple,
            limits=shares.limits,
            ratio=shares.ratio,
            samples_done=epoch.samples_done,
            windows_done=epoch.windows_done,
            start=start,
            enabled=enabled,
        )
        self._parts.progress.place.set_factor(self.source.plan.factor)

    def plan_window(self, number: int, start: int) -> None:
        """Plan a window of an epoch in which windows grow; it begins after ``start`` samples."""
        size = self.planned.schedule.at(number, start)
        self.plan = plan_accumulation(
            size,
            micro_batch=self._within_limit(size),
            world_size=self.recipe.world_size,
            multiple=self._parts.request.multiple,
        )

    def _within_limit(self, samples: int) -> int:
        return self.source.capped(min(samples, self._parts.limit.of_pass))

    # --- what is planned -----------------------------------------------------------------------

    @property
    def has_changed_limit(self) -> bool:
        """Whether the limit has changed since the epoch was cut: it was found again, or taken back."""
        return self._cut_by != self._parts.limit.samples

    @property
    def has_changed_length(self) -> bool:
        """Whether a hook has changed the length of the data since the epoch was planned."""
        return self.source.epoch(self.planned.number) != self.planned.recipe

    @property
    def keeps_batches(self) -> bool:
        """Whether each micro-batch is a batch of the recipe, because several cannot be collated to one."""
        return self.plan.micro_batch_size == self.recipe.batch_size and not self.source.joins_batches

    @property
    def counts_as_recipe(self) -> bool:
        """Whether the loop's batches and windows are the recipe's."""
        plan = self.source.plan
        # Ranks must validate together, also after an error on one of them: as windows of several batches end.
        is_alone = self.recipe.world_size == 1 or plan.factor == 1
        if self._parts.request.is_by_window or not is_alone or self._parts.shares.limits:
            return False
        recipe_effective = self.source.within_epoch(self.recipe.effective, self.planned.number)
        return self.planned.schedule.largest == recipe_effective and plan.length == self.planned.recipe.batches
