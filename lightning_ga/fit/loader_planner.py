"""How the loader cuts an epoch: its effective batches, its windows and their micro-batches.

Tested in tests/integration/test_schedules.py and tests/differential/test_differential.py.
"""

from dataclasses import dataclass

from lightning_ga.fit.parts import FitParts
from lightning_ga.loading.source import LoaderSource
from lightning_ga.plan.accumulation import AccumulationPlan, ceil_div, plan_accumulation, whole_multiples
from lightning_ga.plan.batch_schedule import PiecewiseSchedule, constant
from lightning_ga.plan.recipe import Recipe, RecipeEpoch


@dataclass(frozen=True, slots=True)
class EpochInputs:
    """The inputs of an epoch's plan. If an epoch is planned again with these, its windows are the same."""

    epoch: int
    recipe_epoch: RecipeEpoch
    schedule: PiecewiseSchedule  # of its effective batches
    samples_done: int  # before its first window
    windows_done: int


class LoaderPlanner:
    """Plans epochs by what was asked for and what fits; first as ``LoaderWindows`` is made."""

    samples_of_unit = 1  # what limits count; several loaders are cut in the step
    inputs: EpochInputs  # of the epoch that was planned last
    plan: AccumulationPlan  # of a full window of it; where windows grow, of the running one

    def __init__(self, parts: FitParts, source: LoaderSource) -> None:
        self._parts = parts
        self.source = source
        self._cut_by = 0  # the limit by which the epoch was cut
        self._first_micro_batch_read: int | None = None  # as it was planned; see ``useful_limit``

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
    def _micro_batch_at_start(self) -> int:
        """What ``accumulate=`` multiplies, rounded to ``micro_batch_multiple``: the recipe's if no limit bounded it."""
        request = self._parts.request
        known = self._parts.limit.micro_batch_at_start(self.recipe.batch_size)
        return whole_multiples(request.micro_batch_in_place_of(known), request.multiple)

    @property
    def _sharing_ranks(self) -> int:
        """The ranks that share a window in equal parts; if shares may differ, one rank may get nearly all."""
        return 1 if self._parts.shares.differ else self.recipe.world_size

    def effective(self, epoch: int) -> int:
        """Return the largest effective batch of an epoch, at most the samples of the epoch."""
        return self.source.within_epoch(self._asked_effective(epoch), epoch)

    def _asked_effective(self, epoch: int) -> int:
        asked = self._parts.request.effective_batch(epoch, self._micro_batch_at_start, self.recipe.world_size)
        return asked or self.recipe.effective

    def samples_of_epoch(self, epoch: int) -> int:
        """Return the samples of an epoch, over all ranks."""
        return self.source.epoch(epoch).samples

    def note_first(self) -> None:
        """Note that the first micro-batch was read, as it is planned now."""
        self._first_micro_batch_read = self.plan.micro_batch_size

    def useful_limit(self, epochs: range) -> int:
        """Return the largest micro-batch that these epochs can use and a trial step can run."""
        high = self._parts.request.useful_limit(
            epochs,
            recipe=self.recipe.effective,
            total=self.source.epoch(epochs.start).samples,
            world_size=self._sharing_ranks,
        )
        if not self.source.samples.can_be_read_apart:
            # A trial can have one batch, the first micro-batch. Until that is read, it is planned as a whole share.
            share = ceil_div(self.effective(epochs.start), self.recipe.world_size)
            high = min(high, self._first_micro_batch_read or share)
        return self.source.within_collatable(max(1, high))

    def steps_of(self, epoch: int, *, steps: int, samples: int) -> tuple[int, int]:
        """Return optimizer steps and samples of an epoch that begins after so many, as long as the planned one.

        To ask a sampler for the length of each epoch would take long.
        """
        as_long_as = self.inputs.epoch
        return self.source.steps_of(as_long_as, self._schedule_of(epoch, as_long_as, steps=steps, samples=samples))

    def _schedule_of(self, epoch: int, as_long_as: int, *, steps: int, samples: int) -> PiecewiseSchedule:
        """Return the effective batches of an epoch that begins after so many steps and samples."""
        growth = self._parts.request.growth(self._micro_batch_at_start, self.recipe.world_size, steps, samples)
        schedule = growth or constant(self._asked_effective(epoch))
        return schedule.at_most(self.source.within_epoch(schedule.largest, as_long_as))

    # --- plans ---------------------------------------------------------------------------------

    def plan_epoch(self, epoch: int, *, enabled: bool = True) -> None:
        """Plan an epoch; unless it is ``enabled``, the loader yields nothing, and another plan follows."""
        position = self._parts.progress.position_in(epoch)
        schedule = self._schedule_of(epoch, epoch, steps=position.steps_before, samples=position.samples_before)
        self.inputs = EpochInputs(
            epoch, self.source.epoch(epoch), schedule, position.samples_done, position.windows_done
        )
        self.cut(enabled=enabled)
        if not schedule.is_constant:
            self.plan_window(position.windows_done, position.samples_done)

    def cut(self, *, enabled: bool = True, first_window: int | None = None) -> None:
        """Cut the planned epoch by the limit; the loader begins with this window, or the first that is not done."""
        inputs = self.inputs
        shares = self._parts.shares
        micro_batch = ceil_div(inputs.schedule.largest, self._sharing_ranks)
        self._cut_by = self._parts.limit.samples
        if enabled:  # else another plan follows, so that nothing is tried yet (``within_collatable``)
            micro_batch = self._within_limit(micro_batch)
        self.plan = self.source.arrange(
            inputs.epoch,
            inputs.schedule,
            micro_batch,
            multiple=self._parts.request.multiple,
            limits=shares.limits,
            ratio=shares.ratio,
            samples_done=inputs.samples_done,
            windows_done=inputs.windows_done,
            start=first_window,
            enabled=enabled,
        )
        self._parts.place.set_factor(self.source.epoch_plan.factor)

    def plan_window(self, window_number: int, samples_done: int) -> None:
        """Plan a window of an epoch in which windows grow; it begins after so many samples of the epoch."""
        size = self.inputs.schedule.at(window_number, samples_done)
        self.plan = plan_accumulation(
            size,
            micro_batch=self._within_limit(size),
            world_size=self.recipe.world_size,
            multiple=self._parts.request.multiple,
        )

    def _within_limit(self, samples: int) -> int:
        return self.source.within_collatable(min(samples, self._parts.limit.of_pass))

    # --- what is planned -----------------------------------------------------------------------

    @property
    def has_changed_limit(self) -> bool:
        """Whether the limit has changed since the epoch was cut: it was found again, or taken back."""
        return self._cut_by != self._parts.limit.samples

    @property
    def has_changed_length(self) -> bool:
        """Whether a hook has changed the length of the data since the epoch was planned."""
        return self.source.epoch(self.inputs.epoch) != self.inputs.recipe_epoch

    @property
    def keeps_batches(self) -> bool:
        """Whether each micro-batch is a batch of the recipe, because several cannot be collated to one."""
        return self.plan.micro_batch_size == self.recipe.batch_size and not self.source.joins_batches

    @property
    def counts_as_recipe(self) -> bool:
        """Whether the loop's batches and windows are the recipe's."""
        epoch_plan = self.source.epoch_plan
        # A rank that runs a window again, after an error, goes over to the recipe's clock, by which validation is due
        # at the ends of windows alone. It would validate later than the others, unless their windows are one batch.
        reruns_keep_validation_together = self.recipe.world_size == 1 or epoch_plan.factor == 1
        if self._parts.request.by_window or not reruns_keep_validation_together or self._parts.shares.differ:
            return False
        recipe_effective = self.source.within_epoch(self.recipe.effective, self.inputs.epoch)
        return (
            self.inputs.schedule.largest == recipe_effective and epoch_plan.length == self.inputs.recipe_epoch.batches
        )
