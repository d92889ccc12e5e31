"""Windows that the step cuts: the loader is the user's own, and a window is a whole number of its batches.

Tested in tests/integration/test_survive.py and tests/differential/test_differential.py.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import advance, closures, loaders, ranks, schedulers
from lightning_ga.compat.replicas import AnyExchange
from lightning_ga.errors import UserError
from lightning_ga.fit.batch_passes import BatchPasses
from lightning_ga.fit.window_protocol import FitParts
from lightning_ga.loading.source import LoaderSource
from lightning_ga.loading.step_source import StepSource
from lightning_ga.loading.trial_batches import TrialBatches
from lightning_ga.plan.accumulation import AccumulationPlan, in_chunks_of, plan_in_step
from lightning_ga.plan.recipe import Recipe, RecipeEpoch, WindowSpan
from lightning_ga.snapshot.kept_batch import KeptBatch


class StepWindows:
    """Sets how many batches make a window, and keeps these until it is done."""

    in_step = True
    sizes = None  # of samples: only the loader cuts by these

    def __init__(self, parts: FitParts, source: StepSource) -> None:
        self.batches: list[KeptBatch] = []
        self._parts = parts
        self._trainer = parts.progress.trainer
        self._place = parts.progress.place
        self._source = source
        self._held = ExitStack()  # what the loop gets back in the end
        self._plan: AccumulationPlan | None = None
        self._begun: tuple[StepSource, int] | None = None  # the epoch that the loop is set up for
        self._reads = False  # whether the loop has begun to read
        self._uses_intervals = False  # whether windows have been others than the recipe's
        self._passes = BatchPasses(parts, lambda: self._batch_size)

    def use(self, source: LoaderSource | StepSource) -> None:
        """Use a loader that is loaded again."""
        if not isinstance(source, StepSource):
            raise UserError(
                "Data that are loaded again must be cut where they were, or always in the step: micro_batching='step'."
            )
        source.follow(self._source)
        self._source = source

    # --- data ----------------------------------------------------------------------------------

    def setting_up(self) -> AbstractContextManager[None]:
        """Return a context in which the loop sets up the user's loader as it is."""
        return nullcontext()

    def data_are_set_up(self, loader: Any) -> None:
        """Show the user's loader to others."""
        if self._source.loader is not loader:
            loaders.show_loaders(self._trainer, loader)

    def begin_training(self) -> bool:
        """Adopt the loop's position, and look at the first batch, which training still gets, if only it shows sizes."""
        if self._source.batch_size is None:
            batch = self._parts.first_batch()
            if batch is not None:
                with suppress(LayoutError):  # its number of samples may not be known
                    self._source.see(batch, self._parts.cutter())
        batches = self._place.batches_of_epoch or self._place.batches_done()
        recipe = self._recipe
        return self._parts.progress.take_over(RecipeEpoch(recipe, batches, recipe.samples_of(batches)))

    def kept_order(self) -> None:
        """Return nothing: a resumed loop skips batches of the user's loader."""

    def trial_batches(self, epoch: int) -> TrialBatches:
        """Return the source of batches for probe and measurement: after an error, the batch that failed."""
        samples = self._source.samples
        batch = None
        if self.batches:
            batch = self.batches[-1].batch
        elif not self._reads and (self.varies or not samples.first):
            batch = self._parts.first_batch()
        return TrialBatches(samples, self._parts.cutter(), self._batch_size, batch=batch, in_step=True)

    @property
    def varies(self) -> bool:
        """Whether batches may be larger than the first."""
        return self._source.varies

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def plan(self) -> AccumulationPlan | None:
        """How a full window is cut; ``None`` before an epoch is planned."""
        names = self._parts.limit.chunked_names
        if self._plan is None or not names or not self._parts.limit.is_known:
            return self._plan
        return in_chunks_of(self._plan, self._parts.limit.most, names)

    @property
    def several_passes(self) -> bool:
        """Whether a window runs in several passes, or its pass in several chunks."""
        plan = self.plan
        return self._passes.in_pieces or (plan is not None and plan.has_several_passes)

    @property
    def _recipe(self) -> Recipe:
        return Recipe(self._batch_size, self._source.recipe_factor, self._source.world_size)

    @property
    def _batch_size(self) -> int:
        return self._source.batch_size or 1

    @property
    def recipe_effective(self) -> int:
        """The recipe's effective batch."""
        return self._recipe.effective

    @property
    def micro_batch(self) -> int:
        """The micro-batch that ``accumulate=`` multiplies: that of the recipe while the limit is not known."""
        return self._parts.limit.initial_micro_batch or self._parts.request.capped(self._batch_size)

    def effective(self, epoch: int) -> int:
        """Return the largest effective batch of an epoch."""
        asked = self._parts.request.effective_batch(epoch, self.micro_batch, self._source.world_size)
        return asked or self.recipe_effective

    def useful_limit(self, epochs: range) -> int:
        """Return the largest piece of a batch that these epochs can use."""
        request = self._parts.request
        high = request.useful_limit(
            epochs, recipe=self.recipe_effective, total=None, world_size=self._source.world_size
        )
        return max(1, min(high, request.capped(self._batch_size)))

    def _batches_of_window(self, epoch: int, *, step: int, samples: int) -> int:
        """Return how many of the loader's batches make a window that begins after so many steps and samples."""
        request = self._parts.request
        asked = request.count_at(epoch, step=step, samples=samples)
        batches = asked or self._source.recipe_factor
        if asked and not request.is_factor:
            batches = self._source.factor_for(asked)
        whole = self._parts.limit.chunked_names
        if whole and batches > 1:
            raise UserError(
                f"{whole=} needs a window of one batch, and {batches} batches of the loader make one here: let the "
                f"loader yield batches of {batches * self._batch_size} samples."
            )
        return batches

    def steps(self, epochs: range) -> int | None:
        """Count the optimizer steps of these epochs; ``None`` if that is not known."""
        batches = self._place.batches_of_epoch
        if batches is None or (not self._source.batch_size and self._parts.request.counts_samples):
            return None
        steps = 0
        samples = 0
        for epoch in epochs:
            left = batches
            while left > 0:
                factor = self._batches_of_window(epoch, step=steps, samples=samples)
                samples += self._recipe.samples_of(min(factor, left))
                steps += 1
                left -= factor
        return steps

    # --- windows -------------------------------------------------------------------------------

    def begin_epoch(self, number: int) -> None:
        """Set the factor for an epoch, once."""
        if self._begun == (self._source, number):
            return
        self._begun = (self._source, number)
        self._parts.progress.enter(number)
        self._place.begin_epoch()
        self._plan_window()

    def _plan_window(self) -> None:
        """Set how many batches make the next window, and plan its pieces."""
        progress = self._parts.progress
        factor = self._batches_of_window(
            progress.position.epoch, step=int(self._trainer.global_step), samples=progress.position.samples_seen
        )
        size = self._batch_size
        limit = self._parts.limit.piece_samples or size
        self._plan = plan_in_step(
            size,
            batches=factor,
            micro_batch=limit,
            world_size=self._source.world_size,
            multiple=self._parts.request.multiple,
        )
        self._place.set_factor(factor)
        if factor != self._source.recipe_factor and not self._uses_intervals:
            self._uses_intervals = True
            self._held.enter_context(schedulers.due_by_recipe(self._trainer, self._span))

    def _span(self) -> WindowSpan:
        """Return the batches before and after the window that ends; the loop counts the recipe's by itself."""
        return WindowSpan(self._source.recipe_factor, self._place.window_start, self._place.ready)

    @contextmanager
    def patches(self, exchange: AnyExchange | None) -> Iterator[None]:
        """Return a context in which the loop's batches run in pieces that fit."""
        self._passes.exchange_through(exchange)
        with ExitStack() as stack:
            wrap = self._passes.closure
            stack.enter_context(closures.intercepted_closures(self._trainer, wrap, self._index_in_window))
            if self._parts.request.is_by_window:
                stack.enter_context(self._place.windows_begin_anywhere())
            yield

    def _index_in_window(self) -> int:
        return self._place.index_in_window

    def begin_reading(self, *, same_epoch: bool) -> None:
        """Let the loop begin with the batch that comes next."""
        self._reads = True
        place = self._place
        place.begin_epoch_after_last_batch()
        if self._parts.request.is_by_window and place.restarts and place.ready != place.batches_of_epoch:
            place.count_windows_from_here()  # a run that is resumed in mid-epoch begins with a window

    def begin_window(self) -> None:
        """Set the factor of the window that the loop has come to."""
        self.batches = []
        if self._place.skips_backward:
            return
        self._passes.begin_window()
        if self._parts.request.is_by_window:
            self._place.count_windows_from_here()
            self._plan_window()

    def weigh(self, batch: Any, position: int) -> None:
        """Leave the weights to the pieces."""
        self._parts.gradients.begin_batch()

    @property
    def is_over(self) -> bool:
        """Whether the loop's running batch is the last of its window."""
        return self._place.window_is_over

    def end_window(self) -> None:
        """Note that a window is done, and the samples of its batches."""
        if self._parts.request.is_by_samples:
            samples = int(ranks.sum_over_ranks(self._trainer, self._passes.samples))
        else:
            samples = self._passes.samples * self._source.world_size
        progress = self._parts.progress
        progress.end_window(samples=progress.position.samples_done + samples, batches=self._place.ready)

    # --- errors --------------------------------------------------------------------------------

    def index_of(self, place: int) -> None:
        """Return nothing: the loader's indices are not seen."""

    def keeps(self, batch: Any) -> None:
        """Keep a batch as the loader made it, because steps change containers."""
        self._passes.begin_batch()
        self.batches.append(KeptBatch(batch))

    def can_read_again(self, batches_before: int) -> bool:
        """Return whether the batch that failed had been read, so that it is kept."""
        return len(self.batches) != batches_before

    @property
    def largest_pass(self) -> int:
        """The most samples of a piece of the running batch; with ``whole=``, of a chunk."""
        if self._parts.limit.chunked_names:
            return self._parts.limit.most
        largest = max(self._passes.sizes, default=1)
        if largest > 1:
            return largest
        return min(self._parts.limit.most, self._batch_size)  # before the first pass, or in a batch of one sample

    def begin_again(self) -> None:
        """Give the window's batches back to the loop, which begins it again in smaller pieces."""
        self._place.relocate(self._place.factor, at=self._place.window_start, end=self._place.batches_of_epoch)
        self._plan_window()
        advance.unread(self._trainer, [kept.batch for kept in self.batches])

    # --- words ---------------------------------------------------------------------------------

    def how_cut(self) -> str:
        """Say why the step cuts."""
        return f"cut in the step: {self._source.why}"

    def advice(self, epochs: range) -> str:
        """Return nothing: a window is a number of batches."""
        return ""

    def close(self) -> None:
        """Give the loop back what the user wrote."""
        self._held.close()
