"""The windows of the running epoch: how they are cut, and the loop's place, factor and intervals in each of them."""

from dataclasses import dataclass
from typing import Any

from lightning_ga.compat import ranks
from lightning_ga.compat.intervals import Intervals
from lightning_ga.fit.batch_passes import BatchPasses
from lightning_ga.fit.data import TrainingData
from lightning_ga.fit.progress import Progress
from lightning_ga.fit.rates import WindowRates
from lightning_ga.fit.wanted import Wanted
from lightning_ga.loading.source import LoaderSource
from lightning_ga.plan.accumulation import AccumulationPlan, in_chunks_of, plan_accumulation, plan_in_step
from lightning_ga.plan.config import Request
from lightning_ga.plan.schedule import Growth
from lightning_ga.plan.windows import Window
from lightning_ga.probe.limit import NO_LIMIT, Limit


@dataclass(slots=True)
class Epoch:
    """The inputs of an epoch's plan. If an epoch is planned again with these, its windows are the same."""

    number: int
    effective: int | Growth
    samples_done: int  # before its first window
    windows_done: int
    source: Any = None  # the data that the loop was set up with; ``None`` before the epoch begins


class TrainingWindows:
    """Owns the plan, and the window that the loop is in."""

    def __init__(
        self, request: Request, data: TrainingData, progress: Progress, limit: Limit, rates: WindowRates | None
    ) -> None:
        self.request, self._data, self._progress, self._limit, self.rates = request, data, progress, limit, rates
        self.passes: BatchPasses | None = None  # none if the loop runs micro-batches by itself
        self.window: Window | None = None  # the one that runs, if the loader cuts it
        self.intervals: Intervals | None = None  # none if the loop's own counts are right
        self._plan: AccumulationPlan | None = None  # none before the data are set up
        self._epoch: Epoch | None = None
        self._trainer = progress.trainer

    @property
    def wanted(self) -> Wanted:
        """What the user asked for, on these data."""
        return Wanted(self.request, self._data.source, int(self._trainer.world_size), self._limit.initial_micro_batch)

    @property
    def plan(self) -> AccumulationPlan | None:
        """How a full window is cut; ``None`` before the data are set up."""
        names, most = self._limit.chunked_names, self._limit.samples
        return self._plan if self._plan is None or not names or most is None else in_chunks_of(self._plan, most, names)

    @property
    def several_passes(self) -> bool:
        """Whether a window runs in several passes, or its pass in several chunks."""
        plan, in_pieces = self.plan, self.passes is not None and self.passes.in_pieces
        if plan is None or plan.chunk_size is None:
            return in_pieces or (plan is not None and plan.factor > 1)
        return plan.chunk_size < plan.micro_batch_size

    # --- epochs --------------------------------------------------------------------------------

    def arrange(self, epoch: int, *, enabled: bool) -> Epoch:
        """Plan an epoch; the loader yields nothing until that is ``enabled``."""
        position = self._progress.position_in(epoch)
        asked = self.wanted.effective_or_growth(epoch, steps=position.steps_before, samples=position.samples_before)
        self._epoch = Epoch(epoch, asked, position.samples_done, position.windows_done)
        self._cut(self._epoch, enabled=enabled)
        return self._epoch

    def _cut(self, epoch: Epoch, *, enabled: bool = True, start: int | None = None) -> AccumulationPlan:
        """Cut the windows of an epoch by the limit; the loader begins with the window ``start``."""
        source, limit, world_size = self._data.source, self._limit.micro_batch, int(self._trainer.world_size)
        if not isinstance(source, LoaderSource):
            names, seen = self._limit.chunked_names, self._progress.samples_seen
            factor = self.wanted.batches_of_window(
                epoch.number, step=self._trainer.global_step, samples=seen, whole=names
            )
            size, limit = source.batch_size or 1, self._limit.piece_samples
            self._plan = plan_in_step(size, batches=factor, micro_batch=limit or size, world_size=world_size)
            self._trainer.accumulate_grad_batches = factor
            return self._plan
        largest = epoch.effective.largest if isinstance(epoch.effective, Growth) else epoch.effective
        self._plan = source.arrange(
            epoch.number,
            epoch.effective,
            limit or -(-largest // world_size),  # without a limit, a window is one micro-batch
            samples_done=epoch.samples_done,
            windows_done=epoch.windows_done,
            start=start,
            enabled=enabled,
        )
        self._trainer.accumulate_grad_batches = source.plan.factor
        return self._plan

    def begin_epoch(self, number: int) -> None:
        """Cut an epoch for training and set the loop up for it, once."""
        source, place = self._data.source, self._progress.place
        if self._epoch is not None and (self._epoch.source, self._epoch.number) == (source, number):
            return
        self._progress.enter(number)
        place.first_micro_batch = 0
        self.arrange(number, enabled=True).source = source
        if isinstance(source, LoaderSource):
            place.size_epoch(source.plan.length)
            if self.intervals is not None or not self._is_recipe(source):
                self._use_intervals(source)
        elif self.request.by_window is not None and self.intervals is None:  # for schedules of the learning rate alone
            self.intervals = Intervals(self._trainer, self._trainer.val_check_batch, factor=1, batches=1.0, windows=1)

    def _is_recipe(self, source: LoaderSource) -> bool:
        """Return whether windows and micro-batches are the recipe's, also after an error on another rank."""
        plan = self._plan
        if plan is None or self.request.by_window is not None or self._trainer.world_size > 1:
            return False
        sizes, recipe = (plan.effective_batch_size, plan.micro_batch_size), source.recipe_effective()
        return sizes == (recipe, source.batch_size) and source.plan.length == source.recipe_batches()

    def _use_intervals(self, source: LoaderSource) -> None:
        """Let validation and schedules be due in windows from here on."""
        self._give_intervals_back()
        assert self._plan is not None
        batches = self._plan.effective_batch_size / (source.batch_size * int(self._trainer.world_size))
        batches = max(1, source.recipe_batches()) if source.plan.count == 1 else batches  # an epoch may be smaller
        recipe = source.within_epoch(source.recipe_effective(), self._progress.place.epoch)
        is_kept = self._plan.effective_batch_size == recipe and self.request.by_window is None
        factor = source.settings.recipe_factor if is_kept else 1
        every, windows = self._data.validates_every, source.plan.count
        self.intervals = Intervals(self._trainer, every, factor=factor, batches=batches, windows=windows)

    # --- windows -------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Set factor, intervals and learning rate for the window that the loop has come to."""
        place = self._progress.place
        window, source, plan = place.next_window, self._data.source, self._plan
        if place.skips_backward or plan is None:
            return
        if self.passes is not None:
            self.passes.begin_window()
        batch = plan.effective_batch_size
        if isinstance(source, LoaderSource) and window < source.plan.count:
            batch = self._begin_planned(source, window)
        elif self.request.by_window is not None and source.cut_in_step and self._epoch is not None:
            place.first_micro_batch = place.ready
            batch = self._cut(self._epoch).effective_batch_size
            if self.intervals is not None:
                end = min(place.ready + self._trainer.accumulate_grad_batches, place.batches_of_epoch or NO_LIMIT)
                self.intervals.begin_window(self._progress.position.windows_done, end=end, validates=None)
        if self.rates is not None:
            self.rates.begin_window(batch, self.wanted.recipe_effective)

    def _begin_planned(self, source: LoaderSource, number: int) -> int:
        """Begin a window that the loader cuts; return the samples of a full window at its place."""
        assert self._epoch is not None
        batch, window = self._epoch.effective, source.window(number)
        if isinstance(batch, Growth):
            batch = batch.at(number, window.start)
            factor = len(window.sizes)
            if factor != self._trainer.accumulate_grad_batches:
                self._progress.place.relocate(number, factor, end=source.plan.count * factor)
            world_size, most = int(self._trainer.world_size), self._limit.micro_batch or batch
            self._plan = plan_accumulation(batch, micro_batch=most, world_size=world_size)
        self.window = window
        self.set_due(number, len(window.sizes))
        return batch

    def set_due(self, window: int, length: int) -> None:
        """Set whether validation and schedules are due after a window of ``length`` micro-batches."""
        source, epoch, intervals = self._data.source, self._epoch, self.intervals
        if intervals is None or epoch is None or not isinstance(source, LoaderSource):
            return
        validates = intervals.validates(window, before=self._progress.position.windows_before)
        if isinstance(epoch.effective, Growth) and window < source.plan.count:
            planned, size = source.window(window), source.batch_size * int(self._trainer.world_size)
            batches = max(1, source.recipe_batches())  # of an epoch, of which the last may be smaller
            done = batches if window + 1 == source.plan.count else planned.end // size
            validates = intervals.validates_between(planned.start // size, done, earlier=epoch.number * batches)
        end = window * int(self._trainer.accumulate_grad_batches) + length
        intervals.begin_window(window, end=end, validates=validates)

    def end_window(self) -> None:
        """Note that a window is done."""
        if self.window is not None:
            self._progress.end_window(self.window.end)
        elif self.passes is not None:
            schedule, samples = self.request.by_window, self.passes.samples * int(self._trainer.world_size)
            if schedule is not None and schedule.unit == "samples":
                samples = int(ranks.sum_over_ranks(self._trainer, self.passes.samples))
            self._progress.end_window(self._progress.position.samples_done + samples)

    @property
    def unit(self) -> str:
        """What the limit bounds: ``"micro-batches"`` or ``"chunks"``."""
        return "chunks" if self._limit.chunked_names else "micro-batches"

    def shrink(self) -> tuple[int, int] | None:
        """Lower the limit; return the most samples of a pass (old, new), ``None`` if one sample failed."""
        source, failed, passes = self._data.source, self._limit.samples or NO_LIMIT, self.passes
        if source.sizes is None:  # else the limit is that of the longest samples
            in_step = (source.batch_size or 1, *(() if passes is None else passes.sizes))
            failed = min(failed, max(in_step if self.window is None else self.window.sizes))
        fits = self._limit.fall(failed)
        return None if fits is None else (failed, fits)

    def begin_window_again(self, number: int) -> None:
        """Plan the same windows with smaller micro-batches, and move the loop to the start of the window ``number``."""
        source, place, epoch = self._data.source, self._progress.place, self._epoch
        assert epoch is not None
        if not isinstance(source, LoaderSource):
            place.relocate(number, int(self._trainer.accumulate_grad_batches), end=place.batches_of_epoch)
            self._cut(epoch)
            return
        self._cut(epoch, start=number)
        self._use_intervals(source)
        place.iterate_again()
        growing = isinstance(epoch.effective, Growth)
        factor = source.plan.factor_of(number) if growing else source.plan.factor
        place.relocate(number, factor, end=source.plan.count * factor if growing else source.plan.length)

    def give_back(self) -> None:
        """Restore the user's intervals and learning rates."""
        self._give_intervals_back()
        if self.rates is not None:
            self.rates.give_back()

    def _give_intervals_back(self) -> None:
        if self.intervals is not None:
            self.intervals.give_back()
