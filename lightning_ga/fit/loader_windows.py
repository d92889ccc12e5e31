"""Windows that the loader cuts: it yields micro-batches, and the loop accumulates those of a window.

Tested in tests/integration/test_survive.py and tests/differential/test_differential.py.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat import closures, loaders, place, schedulers, validation
from lightning_ga.compat.replicas import AnyExchange
from lightning_ga.errors import ExactnessWarning, UserError
from lightning_ga.fit.batch_passes import WholePasses
from lightning_ga.fit.window_protocol import FitParts
from lightning_ga.loading.sample_sizes import SampleSizes
from lightning_ga.loading.source import LoaderSource
from lightning_ga.loading.step_source import StepSource
from lightning_ga.loading.trial_batches import TrialBatches
from lightning_ga.plan.accumulation import AccumulationPlan, ceil_div, plan_accumulation
from lightning_ga.plan.batch_schedule import Growth
from lightning_ga.plan.recipe import RecipeEpoch, WindowSpan
from lightning_ga.plan.windows import NO_WINDOW


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """The inputs of an epoch's plan. If an epoch is planned again with these, its windows are the same."""

    number: int
    recipe: RecipeEpoch
    batch: Growth
    samples_done: int  # before its first window
    windows_done: int


class LoaderWindows:
    """Plans an epoch for the loader, and follows the loop through its windows."""

    in_step = False
    keeps = None  # the samples of a window are read again by their indices
    batches = ()
    varies = False
    plan: AccumulationPlan  # of the epoch that is planned; ``use`` plans the first

    def __init__(self, parts: FitParts, source: LoaderSource) -> None:
        self._parts = parts
        self._trainer = parts.progress.trainer
        self._place = parts.progress.place
        self._held = ExitStack()  # what the loop gets back in the end
        self._begun: tuple[LoaderSource, int] | None = None  # the epoch that the loop is set up for
        self._window = NO_WINDOW  # the running one
        self._span = WindowSpan(source.recipe.factor)  # of the running window
        self._first: Any = None  # micro-batch, if training alone reads samples, until it begins
        self._read_micro_batch = 0  # samples of that
        self._reads = False  # whether the loop has begun to read
        self._iterated_for: Any = None  # what the loop's iterator was made for
        self._uses_intervals = False  # whether the loop's counts have been others than the recipe's
        self._warned = False  # that samples cannot be counted
        self.use(source)

    def use(self, source: LoaderSource | StepSource) -> None:
        """Cut a loader, also one that is loaded again; it yields nothing before the limit is known."""
        if not isinstance(source, LoaderSource):
            raise UserError(
                "Data that are loaded again must be cut where they were, or always in the step: micro_batching='step'."
            )
        self._source = source
        restored = self._parts.progress.restored
        position = self._parts.progress.position
        if restored is not None and 0 < position.samples_done < source.epoch(position.epoch).samples:
            source.restore_order(restored.order, position.epoch)
        self._parts.limit.set_size_limits(source.sizes)
        self._arrange(self._place.epoch, enabled=self._parts.limit.is_known)

    # --- data ----------------------------------------------------------------------------------

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Return a context in which the loop sets up its data, in batches of the recipe."""
        with loaders.unsharded(self._trainer), self._source.in_recipe_batches(self._place.epoch):
            yield

    def data_are_set_up(self, loader: Any) -> None:
        """Show the user's loader to others, and count micro-batches from here on."""
        loaders.show_loaders(self._trainer, loader)
        self._place.size_epoch(len(self._source.loader))

    def begin_training(self) -> bool:
        """Adopt the loop's position; return whether a run continues within an epoch."""
        return self._parts.progress.take_over(self._source.epoch(self._place.epoch))

    def kept_order(self) -> str | None:
        """Return the order of the running epoch for a checkpoint, if its sampler would not give it again."""
        return self._source.kept_order()

    def trial_batches(self, epoch: int) -> TrialBatches:
        """Return the source of batches for probe and measurement."""
        source = self._source
        if source.samples.first:
            return TrialBatches(source.samples, self._parts.cutter(), source.largest_micro_batch(epoch))
        batch = self._first_batch()
        return TrialBatches(source.samples, self._parts.cutter(), self._read_micro_batch, batch=batch)

    def _first_batch(self) -> Any:
        """Return the first micro-batch, which training still gets; it is a whole share if the limit is not known.

        It is read if samples cannot be read apart from training. Once training has begun, there is none.
        """
        if self._reads or self._iterated_for is not None:
            return self._first
        if self._begun is None:
            self._arrange(self._place.epoch, enabled=True)
            self._place.size_epoch(self._source.plan.length)
        seeds = self._source.loader.seeds
        self._iterate()
        self._source.loader.seeds = seeds  # if it begins again, workers have the same
        self._read_micro_batch = self.plan.micro_batch_size
        self._first = self._parts.first_batch()
        return self._first

    def _iterate(self) -> None:
        """Let the loop's iterator begin with the window that comes next."""
        self._place.iterate_again()
        self._iterated_for = self._cut_now()

    def _cut_now(self) -> tuple[int | None, ...]:
        """Return what the loop's iterator depends on."""
        epoch = self._epoch
        plan = self._source.plan
        batches = self._place.batches_of_epoch
        return epoch.number, epoch.batch.largest, plan.done, plan.micro_batch, batches, *plan.ratio

    @property
    def sizes(self) -> SampleSizes | None:
        """The sizes of samples, if windows are cut by these."""
        return self._source.sizes

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def several_passes(self) -> bool:
        """Whether a window is several micro-batches, other than items that are batches and cannot be one."""
        is_stock = self._source.recipe.batch_size == 1 and self._keeps_batches
        return self.plan.has_several_passes and not is_stock

    @property
    def _keeps_batches(self) -> bool:
        """Whether each micro-batch is a batch of the recipe, because several cannot be collated to one."""
        is_recipe = self.plan.micro_batch_size == self._source.recipe.batch_size
        return is_recipe and not self._source.joins_batches

    @property
    def recipe_effective(self) -> int:
        """The recipe's effective batch."""
        return self._source.recipe.effective

    @property
    def micro_batch(self) -> int:
        """The micro-batch that ``accumulate=`` multiplies: that of the recipe while the limit is not known."""
        known = self._parts.limit.initial_micro_batch
        return self._parts.request.in_multiples(known or self._source.recipe.batch_size)

    @property
    def _world_size(self) -> int:
        return self._source.recipe.world_size

    def effective(self, epoch: int) -> int:
        """Return the largest effective batch of an epoch, at most the samples of the epoch."""
        asked = self._parts.request.effective_batch(epoch, self.micro_batch, self._world_size)
        return self._source.within_epoch(asked or self.recipe_effective, epoch)

    def _batch_of(self, epoch: int, *, steps: int, samples: int) -> Growth:
        """Return the effective batches of an epoch that begins after so many steps and samples."""
        growth = self._parts.request.growth(self.micro_batch, self._world_size, steps, samples)
        return growth or Growth.constant(self.effective(epoch))

    def useful_limit(self, epochs: range) -> int:
        """Return the largest micro-batch that these epochs can use."""
        total = self._source.epoch(epochs.start).samples
        ranks_of_share = 1 if self._parts.limit.differs_by_rank else self._world_size  # a rank may get nearly all
        high = self._parts.request.useful_limit(
            epochs, recipe=self.recipe_effective, total=total, world_size=ranks_of_share
        )
        if not self._source.samples.first:  # only the first batch can be tried
            high = min(high, self._read_micro_batch or ceil_div(self.effective(epochs.start), self._world_size))
        return self._source.capped(max(1, high))

    def steps(self, epochs: range) -> int:
        """Count the optimizer steps of these epochs."""
        steps = 0
        samples = 0
        for epoch in epochs:
            more, seen = self._source.steps_of(epoch, self._batch_of(epoch, steps=steps, samples=samples))
            steps += more
            samples += seen
        return steps

    # --- windows -------------------------------------------------------------------------------

    def _arrange(self, number: int, *, enabled: bool) -> None:
        """Plan an epoch; the loader yields nothing until that is ``enabled``."""
        position = self._parts.progress.position_in(number)
        batch = self._batch_of(number, steps=position.steps_before, samples=position.samples_before)
        recipe = self._source.epoch(number)
        self._epoch = PlannedEpoch(number, recipe, batch, position.samples_done, position.windows_done)
        self._cut(enabled=enabled)

    def _cut(self, *, enabled: bool = True, start: int | None = None) -> None:
        """Cut the windows of the planned epoch by the limit; the loader begins with the window ``start``."""
        epoch = self._epoch
        micro_batch = ceil_div(epoch.batch.largest, self._world_size)  # a whole share, until the limit is known
        limit = self._parts.limit.micro_batch
        limits = self._parts.limit.of_ranks if enabled else ()
        if limits:
            micro_batch = epoch.batch.largest
        if enabled:
            micro_batch = self._source.capped(min(micro_batch, limit or micro_batch))
        self.plan = self._source.arrange(
            epoch.number,
            epoch.batch,
            micro_batch,
            multiple=self._parts.request.multiple,
            limits=limits,
            ratio=self._parts.limit.ratio if enabled else (),
            samples_done=epoch.samples_done,
            windows_done=epoch.windows_done,
            start=start,
            enabled=enabled,
        )
        self._place.set_factor(self._source.plan.factor)

    def begin_epoch(self, number: int) -> None:
        """Cut an epoch for training and set the loop up for it, once."""
        if self._begun == (self._source, number):
            return
        is_first = self._begun is None
        self._begun = (self._source, number)
        self._parts.progress.enter(number)
        self._arrange(number, enabled=True)
        counts_differ = is_first and self._place.batches_before_epoch != self._parts.progress.position.batches_before
        self._place.begin_epoch()
        if counts_differ or not self._is_recipe():
            self._use_intervals()
        self._size_loop()

    def _size_loop(self) -> None:
        """Let the loop expect as many micro-batches as are planned; if they are the recipe's, leave its own number."""
        self._place.size_epoch(self._source.plan.length if self._uses_intervals else self._source.batches_at_set_up)

    def _follow_length(self) -> None:
        """Plan the epoch again if a hook has changed the length of the data since it began."""
        number = self._epoch.number
        if self._source.epoch(number) != self._epoch.recipe:
            self._arrange(number, enabled=True)
            if not self._is_recipe():
                self._use_intervals()
            self._size_loop()

    def _is_recipe(self) -> bool:
        """Return whether the loop's batches and windows are the recipe's.

        Ranks must validate together, also after an error on one of them. So windows of several batches validate as they
        end on all ranks.
        """
        recipe = self._source.recipe
        plan = self._source.plan
        is_alone = recipe.world_size == 1 or plan.factor == 1
        same_window = self._epoch.batch.largest == self._source.within_epoch(recipe.effective, self._epoch.number)
        if self._parts.request.is_by_window or not is_alone or self._parts.limit.of_ranks:
            return False
        return same_window and plan.length == self._epoch.recipe.batches

    def _use_intervals(self) -> None:
        """Let validation and schedules be due by the recipe's batches, from here to the end of the fit."""
        if self._uses_intervals:
            return
        self._uses_intervals = True
        self._held.enter_context(schedulers.due_by_recipe(self._trainer, self._span_done))
        self._held.enter_context(validation.due_by_recipe(self._trainer, self._span_done))

    def _span_done(self) -> WindowSpan:
        """Return the batches of the running window; none before its first micro-batch, when a restored loop asks."""
        has_begun = self._place.ready != self._place.window_start
        return self._span if has_begun else replace(self._span, after=self._span.before)

    @contextmanager
    def patches(self, exchange: AnyExchange | None) -> Iterator[None]:
        """Return a context in which the loop runs these windows; the last pass of each exchanges gradients."""
        with ExitStack() as stack:
            stack.enter_context(self._place.before_reading(self._follow_length))
            if exchange is not None:
                passes = WholePasses(self._place, exchange)
                stack.enter_context(closures.intercepted_closures(self._trainer, passes.closure, self._index_in_window))
            yield

    def _index_in_window(self) -> int:
        return self._place.index_in_window

    def begin_reading(self, *, same_epoch: bool) -> None:
        """Let the loop begin its first epoch, at the window that comes next."""
        if self._place.restarts:
            self._held.enter_context(place.positions_are_kept())
            self._place.begin_at(self._source.plan.done, same_epoch=same_epoch)
        self._reads = True
        self._first = None
        if self._iterated_for != self._cut_now():
            self._iterate()

    def begin_window(self) -> None:
        """Set the factor of the window that the loop has come to, and the batches that are done after it."""
        position = self._parts.progress.position
        number = position.windows_done
        if self._place.skips_backward or number >= self._source.plan.count:
            return
        if self._parts.limit.follow_speeds():
            self.begin_again()
        window = self._source.window(number)
        batch = self._epoch.batch
        if not batch.is_constant:
            size = batch.at(number, window.start)
            most = self._source.capped(min(size, self._parts.limit.micro_batch or size))
            multiple = self._parts.request.multiple
            self.plan = plan_accumulation(size, micro_batch=most, world_size=self._world_size, multiple=multiple)
            factor = len(window.sizes)
            if factor != self._place.factor:
                self._relocate(number, factor)
        self._window = window
        done = self._epoch.recipe.batches_done(window.end)
        self._span = WindowSpan(self._source.recipe.factor, position.batches_done, done, position.batches_before)

    def weigh(self, batch: Any, position: int) -> None:
        """Weigh a micro-batch by its samples, or by those that a collate function has left of them."""
        if not self._window.sizes:
            return
        if len(self._window.sizes) > 1:
            self._parts.compiled.mark(tensors_in(batch), self._window.sizes[position])
        may_drop = self._source.may_drop_samples or self._parts.leaves_out
        samples = None
        if self._source.may_drop_samples and self._parts.gradients.normalize == "samples":
            samples = self._samples_left(batch, self._window.sizes[position])
        self._parts.gradients.weigh_micro_batch(batch, self._window, position, samples=samples, may_drop=may_drop)

    def _samples_left(self, batch: Any, planned: int) -> int | None:
        """Count the samples of a batch whose collate function may drop some; ``None`` if the plan is to be believed."""
        cutter = self._parts.cutter()
        found = cutter.count_left(batch)
        if found is None:
            number = "a number that cannot be counted"
            is_odd = cutter.drops_samples
        else:
            number = str(found)
            is_odd = found > planned > 0
        if not is_odd:
            return found
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"A micro-batch was planned with {planned} samples, and the collate function made {number} of them. It "
                f"weighs {planned}: let the collate function make one entry of each sample that it keeps, or count "
                "what the loss is a mean over (normalize=).",
                category=ExactnessWarning,
            )
        return None

    @property
    def is_over(self) -> bool:
        """Whether the loop's running micro-batch is the last of its window."""
        return self._place.ready - self._place.window_start == len(self._window.sizes)

    def end_window(self) -> None:
        """Note that a window is done."""
        if self._window.sizes:
            self._parts.progress.end_window(samples=self._window.end, batches=self._span.after)
        if self._parts.limit.speed is not None:
            self._parts.limit.speed.end_window(sum(max(1, size) for size in self._window.sizes))  # a stand-in has one

    # --- errors --------------------------------------------------------------------------------

    def index_of(self, place: int) -> Any:
        """Return the index in the dataset of a micro-batch of one sample of the running window."""
        return self._source.index_of(self._window, place)

    def can_read_again(self, batches_before: int) -> bool:
        """Return true: the sampler knows the window's samples."""
        return True

    @property
    def largest_pass(self) -> int:
        """The most samples of a micro-batch of the running window; with ``size_of``, of the longest samples."""
        if self._source.sizes is not None:
            return self._parts.limit.most
        return max(self._window.sizes, default=1)

    def begin_again(self) -> None:
        """Plan the same windows with smaller micro-batches, and move the loop to the start of the running one."""
        number = self._parts.progress.position.windows_done
        self._cut(start=number)
        self._use_intervals()
        self._place.iterate_again()
        plan = self._source.plan
        self._relocate(number, plan.factor if self._epoch.batch.is_constant else plan.factor_of(number))

    def _relocate(self, window: int, factor: int) -> None:
        """Move the loop to a window as if all windows of the epoch had so many micro-batches."""
        plan = self._source.plan
        end = plan.length if self._epoch.batch.is_constant else plan.count * factor
        self._place.relocate(factor, at=window * factor, end=end)

    # --- words ---------------------------------------------------------------------------------

    def how_cut(self) -> str:
        """Say that validation waits for the end of a window, if it has to, and that batches are kept."""
        found = []
        if self._keeps_batches and self.plan.factor > 1:
            found.append("the samples of two batches were not seen to be collated to one, so each batch is a pass")
        every = getattr(self._trainer, "val_check_interval", None)
        factor = self._epoch.batch.largest / self._source.recipe.samples_of(1)
        if self._uses_intervals and isinstance(every, int) and every % factor != 0:
            found.append(f"validation at the end of the window in which val_check_interval={every} batches are done")
        return "; ".join(found)

    def advice(self, epochs: range) -> str:
        """Say that an effective batch is larger than the data."""
        asked = max((self._parts.request.effective(epoch) or 0 for epoch in epochs), default=0)
        total = self._source.epoch(epochs.start).samples
        if asked <= total:
            return ""
        return (
            f"The effective batch of {asked:,} samples is above the {total:,} of an epoch: it is a single "
            "optimizer step over all of them, and a larger batch changes nothing."
        )

    def close(self) -> None:
        """Give the loop back what the user wrote."""
        self._held.close()
