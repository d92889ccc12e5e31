"""Windows that the loader cuts: it yields micro-batches, and the loop accumulates those of a window.

``loader_planner.py`` says how it cuts an epoch; here the loop follows.

Tested in tests/integration/test_survive.py and tests/differential/test_differential.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat import advance, closures, loaders, schedulers, validation
from lightning_ga.compat.compiled import CompiledModules
from lightning_ga.compat.loop_counters import positions_are_kept
from lightning_ga.compat.replicas import AnyExchange
from lightning_ga.fit.batch_passes import WholePasses
from lightning_ga.fit.loader_planner import LoaderPlanner
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.window_base import CutWindows
from lightning_ga.loading.source import LoaderSource
from lightning_ga.loading.trial_batches import BatchCutter, TrialBatches
from lightning_ga.plan.accumulation import halved
from lightning_ga.plan.recipe import WindowSpan
from lightning_ga.plan.windows import NO_WINDOW


class LoaderWindows(CutWindows):
    """Sets the loop up for the loader's epochs, and follows it through their windows."""

    in_step = False

    def __init__(self, parts: FitParts, cutter: Callable[[], BatchCutter], source: LoaderSource) -> None:
        super().__init__(parts, cutter)
        self.planner = LoaderPlanner(parts, source)
        self._window = NO_WINDOW  # the running one
        self._span = WindowSpan(source.recipe.factor)  # of the running window
        self._iterates_for: tuple[Any, ...] = ()  # what the loop's iterator was made for; empty before there is one
        # If training alone reads samples, trials get the first micro-batch of that iterator.
        self._first: TrialBatches | None = None  # once read, until the loop begins to read
        self._compiled = CompiledModules(self._parts.trainer)
        self._prepare()

    def use(self, source: Any) -> None:
        """Cut a loader that is loaded again."""
        self.planner.use(source)
        self._prepare()

    def _prepare(self) -> None:
        """Restore the order of an epoch that a checkpoint has interrupted; plan windows, without reading any."""
        progress = self._parts.progress
        position = progress.position
        is_within_epoch = 0 < position.samples_done < self._source.epoch(position.epoch).samples
        if progress.restored is not None and progress.restored.position == position and is_within_epoch:
            self._source.restore_order(progress.restored.order, position.epoch)
        # Before the limit is known, the loader yields nothing; nor if the loop would keep the iterator of this set-up.
        # Another iterator is made once the epoch is planned.
        self.planner.plan_epoch(
            self._place.epoch, enabled=self._parts.limit.is_known and not self._keeps_iterator_of_set_up
        )

    @property
    def _keeps_iterator_of_set_up(self) -> bool:
        """Whether data are loaded again in the epoch that a resumed loop continues: it keeps this set-up's iterator.

        That is as long as the recipe's batches (``in_recipe_batches``), too short. So the set-up yields nothing, and
        another iterator is made as the epoch begins.
        """
        return self._reads and self._place.keeps_iterator

    @property
    def _source(self) -> LoaderSource:
        return self.planner.source

    # --- data ----------------------------------------------------------------------------------

    @contextmanager
    def setting_up(self, loader: Any) -> Iterator[None]:
        """Return a context in which the loop sets up its data, in batches of the recipe.

        Afterwards others see the user's loader, and the loop counts micro-batches.
        """
        with loaders.unsharded(self._parts.trainer), self._source.in_recipe_batches(self._place.epoch):
            yield
        loaders.show_loaders(self._parts.trainer, loader)
        self._place.size_epoch(len(self._source.loader))

    def adopt_position(self) -> bool:
        """Adopt the loop's position; return whether the run continues the epoch of its position."""
        return self._parts.progress.take_over(self._source.epoch(self._place.epoch))

    def kept_order(self) -> str | None:
        """Return the order of the running epoch for a checkpoint, if its sampler would not give it again."""
        return self._source.kept_order()

    def trial_batches(self, epoch: int) -> TrialBatches:
        """Return the source of batches for probe and measurement.

        If samples cannot be read apart from training, it is the first micro-batch, which is read here; there is none
        once training has begun.
        """
        samples = self._source.samples
        if samples.can_be_read_apart:
            return TrialBatches(self._cutter(), self._source.largest_micro_batch(epoch), known=samples)
        if self._reads:
            return TrialBatches(self._cutter(), 0)
        if self._first is None:
            self._first = self._read_first()
        return self._first

    def _read_first(self) -> TrialBatches:
        """Read the first micro-batch, which training still gets; it is a whole share if the limit is not known."""
        if self._begun is None:  # no epoch has begun: the loader that ``_prepare`` has planned yields nothing yet
            self.planner.plan_epoch(self._place.epoch)
            self._place.size_epoch(self._source.epoch_plan.length)
        loader = self._source.loader
        # The loader's ``__iter__`` takes ``before_dry_run`` and forgets it (``loading.rebatch``). Training's iterator
        # needs it again, to draw the same seed.
        before_dry_run = loader.before_dry_run
        self._iterate()
        loader.before_dry_run = before_dry_run
        self.planner.note_first()
        batch = advance.first_batch(self._parts.trainer)
        planned = 0  # samples on this rank before a collate function leaves any out
        if batch is not None:
            planned = self._source.window(self._source.epoch_plan.done).sizes[0]
        return TrialBatches(self._cutter(), self.planner.plan.micro_batch_size, batch=batch, planned=planned)

    def _iterate(self) -> None:
        """Let the loop's iterator begin with the window that comes next."""
        self._place.iterate_again()
        self._iterates_for = self._iterator_inputs()

    def _iterator_inputs(self) -> tuple[Any, ...]:
        """Return what the loop's iterator depends on."""
        inputs = self.planner.inputs
        plan = self._source.epoch_plan
        return (
            inputs.epoch,
            inputs.schedule.largest,
            plan.done,
            plan.micro_batch,
            self._place.loop_batches_of_epoch,
            *plan.ratio,
        )

    @property
    def has_several_passes(self) -> bool:
        """Whether a window is several micro-batches, which Lightning itself would not have run one by one."""
        # With ``batch_size=1``, items may be ready-made batches: stock Lightning would accumulate the same passes.
        is_as_stock = self._source.recipe.batch_size == 1 and self.planner.keeps_batches
        return self.planner.plan.has_several_passes and not is_as_stock

    @property
    def has_unequal_passes(self) -> bool:
        """Whether micro-batches of some window of the epoch have unlike numbers of samples, on any rank."""
        plan = self._source.epoch_plan
        looked_at = range(plan.done, plan.count)
        if self.planner.inputs.schedule.is_constant and self._source.sizes is None:  # all but the last are alike
            looked_at = looked_at[:: max(1, len(looked_at) - 1)]
        for index in looked_at:
            sizes = set[int]()
            for rank in range(plan.world_size):
                sizes.update(plan.window(index, rank).sizes)
            if len(sizes) > 1:
                return True
        return False

    # --- epochs --------------------------------------------------------------------------------

    def _begin_epoch(self, epoch: int) -> None:
        progress = self._parts.progress
        progress.enter(epoch)
        self.planner.plan_epoch(epoch)
        counts_differ = self._place.loop_batches_before_epoch != progress.position.batches_before
        earlier_epochs_counted_micro_batches = self._begun is None and counts_differ
        if earlier_epochs_counted_micro_batches:
            self._use_recipe_as_clock()
        self._place.begin_epoch()
        self._size_loop()
        if self._keeps_iterator_of_set_up:
            self._iterate()

    def _size_loop(self) -> None:
        """Let the loop expect as many micro-batches as are planned; if they are the recipe's, leave its own number.

        That stays larger if the data have become shorter since their set-up.
        """
        if not self.planner.counts_as_recipe:
            self._use_recipe_as_clock()
        length = self._source.batches_at_set_up
        if self._recipe_is_clock:
            length = self._source.epoch_plan.length
        self._place.size_epoch(length)

    def _follow_length(self) -> None:
        """Plan the epoch again if a hook has changed the length of the data since it began."""
        if self.planner.has_changed_length:
            self.planner.plan_epoch(self.planner.inputs.epoch)
            self._size_loop()

    def _use_recipe_as_clock(self) -> None:
        """Let validation and schedules be due by the recipe's batches, not the loop's, to the end of the fit."""
        if self._recipe_is_clock:
            return
        self._recipe_is_clock = True
        self._parts.undo_at_end.enter_context(schedulers.due_by_recipe(self._parts.trainer, self._span_so_far))
        self._parts.undo_at_end.enter_context(validation.due_by_recipe(self._parts.trainer, self._span_so_far))

    def _span_so_far(self) -> WindowSpan:
        """Return the batches of the running window.

        A restored loop also asks as it begins, before the window's first micro-batch: then none of them is done.
        """
        if self._place.ready == self._place.window_start:
            return replace(self._span, after=self._span.before)
        return self._span

    def install(self, exchange: AnyExchange | None) -> None:
        """Let the loop run these windows to the end of the fit; the last pass of each exchanges gradients."""
        undo_at_end = self._parts.undo_at_end
        undo_at_end.enter_context(self._place.before_reading(self._follow_length))
        if exchange is not None:
            passes = WholePasses(self._place, exchange)
            undo_at_end.enter_context(closures.intercepted_closures(self._parts.trainer, passes.closure, self._place))

    def begin_reading(self, *, continues_epoch: bool) -> None:
        """Let the loop begin its first epoch, at the window that comes next."""
        if self._place.restarts:
            self._parts.undo_at_end.enter_context(positions_are_kept())
            self._place.begin_at(self._source.epoch_plan.done * self._place.factor, continues_epoch=continues_epoch)
        self._reads = True
        self._first = None
        if self._iterates_for != self._iterator_inputs():
            self._iterate()

    # --- windows -------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Set the factor of the window that the loop has come to, and the batches that are done after it."""
        position = self._parts.progress.position
        window_number = position.windows_done
        if self._place.skips_backward or window_number >= self._source.epoch_plan.count:
            self._window = NO_WINDOW  # batches run forward alone, or the epoch of a restored loop is over
            return
        if self._parts.shares.follow_speeds() or self.planner.has_changed_limit:
            self.plan_again()
        window = self._source.window(window_number)
        inputs = self.planner.inputs
        if not inputs.schedule.is_constant:
            self.planner.plan_window(window_number, window.start)
            factor = len(window.sizes)
            if factor != self._place.factor:
                self._relocate(window_number, factor)
        self._window = window
        done = inputs.recipe_epoch.batches_done(window.end)
        self._span = WindowSpan(self._source.recipe.factor, position.batches_done, done, position.batches_before)

    def begin_batch(self, batch: Any, index_in_window: int) -> None:
        """Weigh a micro-batch by its samples, or by those that a collate function has left of them."""
        window = self._window
        planned = window.sizes[index_in_window]
        if len(window.sizes) > 1:
            self._compiled.mark(tensors_in(batch), planned)
        gradients = self._parts.gradients
        may_drop = self._source.samples.may_drop
        is_stand_in = self._source.stand_ins.has(window, index_in_window)
        samples = planned
        if is_stand_in:
            samples = 0
        elif may_drop and gradients.normalize == "samples":
            samples = self._cutter().left(batch, planned)
        gradients.weigh_micro_batch(
            batch, window, index_in_window, samples=samples, is_stand_in=is_stand_in, may_drop=may_drop
        )

    @property
    def is_over(self) -> bool:
        """Whether the loop's running micro-batch is the last of its window."""
        return self._place.ready - self._place.window_start == len(self._window.sizes)

    def end_window(self) -> None:
        """Note that a window is done."""
        self._parts.progress.end_window(samples=self._window.end, batches=self._span.after)
        self._parts.shares.end_window(self._window.sizes)

    # --- errors --------------------------------------------------------------------------------

    def index_of(self, index_in_window: int) -> Any:
        """Return the index in the dataset of the only sample of a micro-batch of the running window."""
        return self._source.index_of(self._window, index_in_window)

    @property
    def largest_pass(self) -> int:
        """The most samples of a micro-batch of the running window; with ``size_of``, of the longest samples."""
        if self._source.sizes is not None:
            return min(self._parts.limit.samples, self._window.samples)
        return max(self._window.sizes, default=1)

    def halve_passes_of_short_samples(self) -> tuple[int, int] | None:
        """Let micro-batches have half as many samples as the largest of the running window has, however short they are.

        Return both numbers; ``None`` without ``size_of``, or if each micro-batch is one sample.
        """
        most = max(self._window.sizes, default=1)
        fits = halved(most)
        if self._source.sizes is None or fits is None:
            return None
        self._source.sizes.most_of_short = fits
        return most, fits

    def plan_again(self) -> None:
        """Plan the same windows by the limit and shares of now, and move the loop to the start of the running one."""
        window_number = self._parts.progress.position.windows_done
        self.planner.cut(first_window=window_number)
        self._use_recipe_as_clock()
        self._place.iterate_again()
        plan = self._source.epoch_plan
        if self.planner.inputs.schedule.is_constant:  # all windows but the last have one factor: the length is true
            self._place.relocate(plan.factor, at=window_number * plan.factor, end=plan.length)
        else:
            self._relocate(window_number, plan.factor_of(window_number))

    def _relocate(self, window_number: int, factor: int) -> None:
        """Move the loop to a window; its counts are rewritten as if every window of the epoch had this factor."""
        self._place.relocate(factor, at=window_number * factor, end=self._source.epoch_plan.count * factor)

    # --- words ---------------------------------------------------------------------------------

    def how_cut(self) -> str:
        """Say that batches are kept, and that validation waits for the end of a window if it has to."""
        found = []
        if self.planner.keeps_batches and self.planner.plan.factor > 1:
            found.append("the samples of two batches were not seen to be collated to one, so each batch is a pass")
        every = getattr(self._parts.trainer, "val_check_interval", None)  # validation may be due by time
        if self._recipe_is_clock and isinstance(every, int):
            samples = self._source.recipe.samples_of(every)
            if samples % self.planner.inputs.schedule.largest != 0:
                found.append(
                    f"validation at the end of the window in which val_check_interval={every} batches are done"
                )
        return "; ".join(found)
