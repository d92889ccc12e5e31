"""Windows that the step cuts: the loader is the user's own, and a window is a whole number of its batches.

Tested in tests/integration/test_survive.py and tests/differential/test_differential.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import advance, closures, loaders, ranks, schedulers
from lightning_ga.compat.logged_values import Counted
from lightning_ga.compat.replicas import AnyExchange
from lightning_ga.fit.batch_passes import BatchPasses
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.step_planner import StepPlanner
from lightning_ga.fit.window_base import CutWindows
from lightning_ga.loading.step_source import StepSource
from lightning_ga.loading.trial_batches import BatchCutter, TrialBatches
from lightning_ga.plan.recipe import RecipeEpoch, WindowSpan
from lightning_ga.snapshot.kept_batch import KeptBatch


class StepWindows(CutWindows):
    """Sets how many batches make a window, and keeps these until it is done."""

    in_step = True

    def __init__(self, parts: FitParts, cutter: Callable[[], BatchCutter], source: StepSource) -> None:
        super().__init__(parts, cutter)
        self.planner = StepPlanner(parts, source)
        self._last: KeptBatch | None = None  # batch of the window that has ended, unless other data were loaded since
        self._passes = BatchPasses(parts, cutter, self.planner)

    def use(self, source: Any) -> None:
        """Use a loader that is loaded again."""
        self._last = None
        self.planner.use(source)

    @property
    def _source(self) -> StepSource:
        return self.planner.source

    # --- data ----------------------------------------------------------------------------------

    @contextmanager
    def setting_up(self, loader: Any) -> Iterator[None]:
        """Return a context in which the loop sets up its data; afterwards others see the user's loader."""
        yield
        if self._source.loader is not loader:
            loaders.show_loaders(self._parts.trainer, loader)
        if self._source.batch_size is not None or not self._parts.request.counts_samples:
            self._place.set_factor(self.planner.plan_next_window())  # schedules may be made for so many steps

    def adopt_position(self) -> bool:
        """Adopt the loop's position; return whether the run continues the epoch of its position.

        If only the first batch shows sizes, it is looked at before; training still gets it.
        """
        if self._source.batch_size is None:
            batch = advance.first_batch(self._parts.trainer)
            if batch is not None:
                with suppress(LayoutError):  # its number of samples may not be known
                    self._source.see(batch, self._cutter())
        # If the length of an epoch is not known, the batches that are done are enough.
        batches = self._place.loop_batches_of_epoch or self._place.loop_batches_done
        recipe = self.planner.recipe
        return self._parts.progress.take_over(RecipeEpoch(recipe, batches, recipe.samples_of(batches)))

    def trial_batches(self, epoch: int) -> TrialBatches:
        """Return the source of batches for probe and measurement.

        It is the batch that runs, else the last that has run. Before training it is the first batch, unless samples can
        be read apart and all batches are of one size.
        """
        samples = self._source.samples
        units = self.planner.units
        kept = self.batches[-1] if self.batches else self._last
        if kept is not None:
            return TrialBatches(self._cutter(), units, batch=kept.batch, planned=units)
        needs_batch = self._source.first_may_be_smaller or not samples.can_be_read_apart
        batch = None
        if needs_batch and not self._reads:
            batch = advance.first_batch(self._parts.trainer)
        if batch is None and samples.can_be_read_apart:
            return TrialBatches(self._cutter(), units, known=samples, in_step=True)
        return TrialBatches(self._cutter(), units, batch=batch, planned=units)

    @property
    def has_several_passes(self) -> bool:
        """Whether a window runs in several passes, or its pass in several chunks."""
        plan = self.planner.plan
        return self._passes.has_cut or (plan is not None and plan.has_several_passes)

    # --- epochs --------------------------------------------------------------------------------

    def _begin_epoch(self, epoch: int) -> None:
        self._parts.progress.enter(epoch)
        self._place.begin_epoch()
        self._plan_window()

    def _plan_window(self) -> None:
        """Set how many batches make the next window."""
        factor = self.planner.plan_next_window()
        self._place.set_factor(factor)
        if factor != self._source.recipe_factor and not self._recipe_is_clock:
            self._recipe_is_clock = True
            self._parts.undo_at_end.enter_context(schedulers.due_by_recipe(self._parts.trainer, self._span))

    def _span(self) -> WindowSpan:
        """Return the batches before and after the window that ends: the loop's are the recipe's."""
        return WindowSpan(self._source.recipe_factor, self._place.window_start, self._place.ready)

    def install(self, exchange: AnyExchange | None) -> None:
        """Let the loop's batches run in pieces that fit, to the end of the fit."""
        self._passes.exchange = exchange
        undo_at_end = self._parts.undo_at_end
        undo_at_end.enter_context(closures.intercepted_closures(self._parts.trainer, self._passes.closure, self._place))
        if self._parts.request.by_window:
            undo_at_end.enter_context(self._place.windows_begin_anywhere())

    def begin_reading(self, *, continues_epoch: bool) -> None:
        """Let the loop begin with the batch that comes next, which its own counts name."""
        self._reads = True
        place = self._place
        restored = self._parts.progress.restored
        if place.restarts and restored is not None and not restored.in_step:  # its loop has counted micro-batches
            place.begin_at(self._parts.progress.position.batches_done, continues_epoch=continues_epoch)
        place.begin_epoch_after_last_batch()
        # Windows that grow end at any count: without this, the loop would not find that one begins here.
        resumes_within_epoch = place.restarts and place.ready != place.loop_batches_of_epoch
        if self._parts.request.by_window and resumes_within_epoch:
            place.count_windows_from_here()

    # --- windows -------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Set the factor of the window that the loop has come to."""
        self.batches = []
        self._last = None  # it takes memory
        if self._place.skips_backward:
            return
        self._passes.begin_window()
        if self._parts.request.by_window:
            self._place.count_windows_from_here()
        self._plan_window()

    def begin_batch(self, batch: Any, index_in_window: int) -> None:
        """Count the batch's samples anew; its pieces are weighed as they run."""
        self._parts.gradients.counted = Counted()

    @property
    def is_over(self) -> bool:
        """Whether the loop's running batch is the last of its window."""
        return self._place.window_is_over

    def end_window(self) -> None:
        """Note that a window is done, and the samples of its batches."""
        if self.batches:
            self._last = self.batches[-1]
        self.batches = []
        samples = self._passes.samples * self._source.world_size
        if self._parts.request.is_by_samples:  # no other schedule is worth an exchange
            samples = int(ranks.sum_over_ranks(self._parts.trainer, self._passes.samples))
        progress = self._parts.progress
        progress.end_window(samples=progress.position.samples_done + samples, batches=self._place.ready)

    # --- errors --------------------------------------------------------------------------------

    def keep(self, batch: Any) -> None:
        """Keep a batch as the loader made it, because steps change containers."""
        if not self._place.skips_backward:  # then no window runs again, and this one is the whole epoch
            self.batches.append(KeptBatch(batch))

    @property
    def largest_pass(self) -> int:
        """The most units of a piece of the window's last batch, which an error halves; with ``whole=``, of a chunk.

        If a small batch ran in pieces of one, the limit is halved: other batches have larger pieces.
        """
        limit = self._parts.limit
        if limit.chunked is not None:
            return limit.samples
        largest_piece = max(self._passes.sizes, default=0)  # 0 before the first pass
        return largest_piece if largest_piece > 1 else min(limit.samples, self.planner.units)

    def plan_again(self) -> None:
        """Give the window's batches back to the loop, which begins it again in smaller pieces."""
        self._place.relocate(self._place.factor, at=self._place.window_start, end=self._place.loop_batches_of_epoch)
        self._plan_window()
        advance.unread(self._parts.trainer, [kept.batch for kept in self.batches])

    # --- words ---------------------------------------------------------------------------------

    def how_cut(self) -> str:
        """Say why the step cuts."""
        return f"cut in the step: {self._source.why}"
