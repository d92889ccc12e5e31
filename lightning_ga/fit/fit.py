"""One fit: wires loader, plan, limit, weights and survival to the hooks of a Trainer."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.compat import closures, dataloaders, intervals, loops
from lightning_ga.errors import ExactnessWarning, UserError
from lightning_ga.fit import checks
from lightning_ga.fit.checks import ByBatch, Told
from lightning_ga.fit.chunks import ChunkedModules
from lightning_ga.fit.evaluation import Evaluation
from lightning_ga.fit.exactness.later import LaterChecks
from lightning_ga.fit.exactness.measure import find_independent
from lightning_ga.fit.exactness.training import TrainingExactness
from lightning_ga.fit.limit import TrainingLimit
from lightning_ga.fit.oom_messages import OomReporter, in_a_hook, in_the_update
from lightning_ga.fit.place import PlannedEpoch, Progress, check_growth, optimizer_steps, plan_epoch, plan_window
from lightning_ga.fit.rates import StepSchedules, WindowFactors, WindowRates
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.fit.window import TrainingWindow
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.memory.device import enforced_budget, total_memory
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.accumulation import AccumulationPlan, in_chunks_of
from lightning_ga.plan.checkpoint import RunState
from lightning_ga.plan.config import Options, Request, read_request, scales_rates
from lightning_ga.plan.planned_device import current_device
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.units import parse_budget
from lightning_ga.plan.windows import Chunk


class Fit:
    """One fit, from ``setup`` to ``teardown``; the Trainer's strategy has its environment set up.

    While the ``callback`` is not among the Trainer's, the loop gets the recipe as the user wrote it: Lightning's tuners
    take all callbacks out while they run steps of their own.
    """

    def __init__(
        self, trainer: Any, request: Request, options: Options, reporter: OomReporter, callback: object
    ) -> None:
        self.trainer, self.request, self.options = trainer, request, options
        self._reporter, self._callback = reporter, callback
        self.recipe_factor: int = trainer.accumulate_grad_batches
        self.gradients = WindowGradients(trainer, options.normalize)
        self.exactness = TrainingExactness(trainer, options)
        self.largest_asked = 0  # effective batch of any epoch, as the user wants it
        self._planned: PlannedEpoch | None = None  # none before the data are set up
        self._factors = WindowFactors(trainer)
        name = scales_rates(request, options.rates)
        self._grows = request.by_window is not None  # whether windows may grow within an epoch
        self._rates = WindowRates(trainer, request, options.rates, name) if name or request.varies else None
        self._schedules = StepSchedules(trainer, request, options)
        self._begun: tuple[TrainingSource, int] | None = None  # what the loops were told of last
        self._batch: Any = None  # the current micro-batch
        self._chunk: Chunk | None = None  # as it was planned
        self.told = Told(self)
        self.progress = Progress(trainer)
        self._data = TrainingData(trainer, self.exactness, request, options)
        self.evaluation = Evaluation(trainer, reporter, options, self._data)
        self._engine = self.evaluation.engine
        self._window: TrainingWindow | None = None  # none while the loop runs micro-batches by itself
        self._later = LaterChecks(trainer, self._engine, self._data, wanted=options.verify and not options.whole)
        self._by_batch = ByBatch(trainer, self._engine, self.exactness)
        self._limit = TrainingLimit(trainer, request, options, self._engine, self._data)
        self._held = ExitStack()
        self._held.enter_context(dataloaders.intercepted_loaders(trainer, cut=self.cut, around=self.set_up_data))

    @property
    def probe(self) -> ProbeResult | None:
        """What the probe found; ``None`` if none was needed."""
        return self._limit.probe

    @property
    def plan(self) -> AccumulationPlan | None:
        """How a full window is cut; ``None`` before the data are set up."""
        chunked, most = self._engine.chunked, self._limit.most
        if self._planned is None or chunked is None or most is None:
            return None if self._planned is None else self._planned.plan
        lowered, found = self._engine.limit("training"), self.probe
        kept = found.kept_chunks if lowered is None and found is not None else 0
        return in_chunks_of(self._planned.plan, min(most, lowered or most), chunked.names, kept)

    @property
    def source(self) -> TrainingSource:
        """The training data as they are cut."""
        return self._data.source

    @property
    def fed(self) -> AccumulationPlan:
        """How the loader cuts a full window."""
        assert self._planned is not None, "the training data are not set up yet"
        return self._planned.fed

    # --- data ----------------------------------------------------------------------------------

    def cut(self, loader: Any) -> Any:
        """Cut the user's loader into micro-batches; it yields none before the limit is known."""
        if self._callback not in self.trainer.callbacks:
            return loader
        source = self._data.cut(loader, self.progress.position)
        self._arrange(loops.training_epoch(self.trainer))
        return source.loader

    def set_up_data(self, set_up: Callable[[], None]) -> None:
        """Let the loop set its data up, with a loader that is cut."""
        if self._callback in self.trainer.callbacks:
            self._data.set_up(set_up)
        else:
            set_up()

    # --- epochs --------------------------------------------------------------------------------

    def start(self) -> None:
        """Find the limit and begin the epoch with it; a restored run goes on at its sample."""
        trainer = self.trainer
        same_epoch = self.progress.take_over(self.source, self.recipe_factor)
        epoch = loops.training_epoch(trainer)
        self._hold_to_budget()
        self._held.enter_context(self.gradients.summed_in_float32())
        self._engine.begin_training(cut_in_step=self.source.cut_in_step)
        with self._engine.suspended():
            self._chunk_modules(epoch)
            self._limit.begin(epoch, self.progress.restored)
        epochs, limit = loops.training_epochs(trainer), self._limit.micro_batch
        check_growth(self.source, self.request, epoch)
        self.largest_asked = checks.check_schedule(self.request, epochs, trainer.world_size, micro_batch=limit)
        self._begin(epoch)
        if current_device() is not None:
            loops.end_training(trainer)  # what fits on another device may not fit here
            return
        self._schedules.begin(self.source, self.fed)
        if self._rates is not None:
            self._held.enter_context(self._rates.following())
        self._guard_training()
        if self.options.verify:
            self._held.enter_context(self._by_batch.watching())
        self._held.enter_context(intervals.stopping_only_unless(trainer, lambda: self.progress.within_batch))
        self.progress.resume(self.source, same_epoch=same_epoch)
        with self.source.seeded_as_before():
            dataloaders.iterate_again(trainer)

    def start_epoch(self) -> None:
        """Cut the next epoch as its schedule says; the loop iterates it anew."""
        epoch = loops.training_epoch(self.trainer)
        self._factors.check()
        if self._begun != (self.source, epoch):
            self._limit.lower()
            with self._engine.suspended():
                self._limit.find_more(epoch)
            self._begin(epoch)
            for inexact in self.told.of_gradients():
                rank_zero_warn(inexact, category=ExactnessWarning)

    def prepare(self, batch: Any) -> None:
        """Weigh the next micro-batch, and say whether schedules of the learning rate are due after it."""
        if self._reporter.untold:
            self._tell_of_errors()
        self._batch = batch
        self._factors.check()
        source, index = self.source, loops.micro_batch_index(self.trainer)
        self._enter_window(index)
        chunk = self._chunk = source.chunk(index)
        if self._rates is not None and loops.begins_window(self.trainer):
            self._rates.begin_window(
                source, chunk, self.fed.effective_batch_size, self.progress.position.samples_before
            )
        expected = source.expected(chunk)
        counts = self.gradients.counts_samples
        if counts or (source.streams and (self._grows or self._engine.chunked is not None)):
            on_host = self._engine.move is not None
            expected = samples = self._data.count(batch, chunk, self._reader, on_host=on_host)
            if counts:
                self.gradients.weigh(batch, chunk, index, sharded_ranks=source.sharded_ranks, samples=samples)
            if source.streams:
                self.progress.note(chunk.count, samples)
        self._data.note(index, expected, chunk)
        if self._engine.chunked is not None:
            self._engine.chunked.size.begin_step(expected)
        if self._later.are_made:
            self._later.look(batch, accumulates=self._accumulates)
        self._schedules.step_when_due(source, chunk.window)

    def show_next_window(self) -> None:
        """Plan the window that training goes on with."""
        self._enter_window(self.source.epoch_plan.done)

    def _enter_window(self, index: int) -> None:
        window = self._factors.enter(index)
        if window is not None and self.options.tokens is None:  # the plan is of the whole epoch there
            self._planned = plan_window(self.source, window, micro_batch=self._limit.micro_batch)

    def _tell_of_errors(self) -> None:
        """Say which errors were survived, once it is measured whether the result is the same."""
        self._later.measure_kept()
        self._reporter.tell()

    def end_backward(self) -> None:
        """Keep gradients as they should be between two backward passes."""
        self.gradients.settle()
        self._later.after_backward()

    def begin_backward(self, loss: torch.Tensor) -> None:
        """Let the backward pass weigh what its samples weigh in the window."""
        if self._later.are_made:
            self._later.compare_numbers()
        self.gradients.apply_weight(loss)

    def close_window(self, optimizer: Any) -> None:
        """Bring the gradients of a window to their mean, and say if they are not those of all its samples."""
        skips, is_one_batch = self.gradients.close_window(optimizer), self.recipe_factor == 1
        if skips and self._later.found_left_out(self._batch, is_one_batch=is_one_batch):
            self.gradients.leave_out(optimizer)

    def advance(self, batch: Any) -> None:
        """Keep the place after a micro-batch, and the micro-batch itself if memory has run out in it."""
        window = self._window
        window_is_over = loops.window_is_over(self.trainer) if window is None else window.end_batch()
        self._batch = None
        if self.gradients.has_skipped and not window_is_over:
            self._later.note_left_out(batch)
        assert self._chunk is not None, "a micro-batch begins before it ends"
        self.progress.advance(self.source, self._chunk, window_is_over=window_is_over)
        if window_is_over:
            self._limit.lower_if_allocator_struggles()
        if self._reporter.untold:
            self._later.keep(batch)

    def check_epoch(self) -> None:
        """Refuse a loader whose own ``__iter__`` has ended the epoch early: its windows are not those planned."""
        self._tell_of_errors()
        if self._later.are_made:
            self.exactness.learn_from_ranks()
        self._by_batch.check_monitors()
        self._factors.check()
        checks.check_end_of_epoch(self.trainer, self.source)

    def close(self) -> None:
        """Give model, schedules, loops and device back what they had."""
        self._held.close()
        self._factors.close()
        if self._rates is not None:
            self._rates.give_back()
        self._schedules.give_back()
        loops.expect_nothing_of_positions()
        self._reporter.tell()

    def fail(self, error: BaseException) -> None:
        """After an error: say where memory ran out, what holds it and the way out; count the recipe's batches again."""
        self._reporter.tell()
        if is_out_of_memory(error):
            if self.probe is not None and self.probe.holders is not None:
                error.add_note(f"As the probe recorded it: {self.probe.holders.sentence()}")
            if self._window is not None and self.options.on_oom == "split" and not isinstance(error, UserError):
                note = in_the_update if self._window.is_updating else in_a_hook
                error.add_note(note(self._engine.memory()))
        self.trainer.accumulate_grad_batches = self.recipe_factor
        batches = self.source.epoch_batches if self._begun is not None else None
        if batches is not None:
            dataloaders.resize_epoch(self.trainer, batches)
        self.close()

    def _chunk_modules(self, epoch: int) -> None:
        """Let the submodules of ``whole=`` run in chunks from here on."""
        names, trainer = self.options.whole, self.trainer
        if names == "auto":
            names = find_independent(trainer, self.source, self._reader, epoch=epoch).names
            if not names:
                raise UserError(
                    'whole="auto" found no submodule that treats samples by themselves: name those that do, as in '
                    'whole=("encoder",).'
                )
        if names:
            self._engine.chunked = ChunkedModules(trainer, names)
            self._held.enter_context(self._engine.chunked.installed())

    def _guard_training(self) -> None:
        """Let windows run micro-batches from here on, if any may have to run in another way than the loop's."""
        engine, source = self._engine, self.source
        engine.guard_training(self.exactness.changing)
        # Windows may hold micro-batches without a sample, which are not to be run.
        fills_up = source.keeps_groups and not source.cut_in_step
        if self.options.on_oom == "split" or source.cut_in_step or fills_up or engine.reducer is not None:
            self._window = TrainingWindow(self.trainer, engine, self.gradients, self._data, fills_up=fills_up)
            closure = self._closure if self._later.are_made else self._window.closure
            self._held.enter_context(closures.intercepted_closures(self.trainer, closure))

    def _closure(self, *given: Any) -> Any:
        """Return what runs the next micro-batch; see ``closures.intercepted_closures``."""
        assert self._window is not None, "closures are intercepted for windows"
        self._later.read_rates()
        return self._window.closure(*given)

    def _hold_to_budget(self) -> None:
        """Let a CUDA device reserve no more than ``memory_budget`` until training ends."""
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            self._held.enter_context(enforced_budget(device, parse_budget(self.options.budget, total_memory(device))))

    def _begin(self, epoch: int) -> None:
        """Cut an epoch for training and tell the loops."""
        source, limit = self.source, self._limit.micro_batch
        assert limit is not None
        self.progress.enter(source, epoch)
        self._arrange(epoch)
        self._begun = source, epoch
        is_cut = not source.cut_in_step and self.fed.micro_batch_size != source.recipe.largest_batch(epoch)
        self._by_batch.begin_epoch(is_cut=is_cut)
        if self._engine.chunked is not None:
            self._begin_chunks(self._engine.chunked)
        if self._window is not None:
            self._window.begin_epoch()
        self.gradients.begin_epoch(self.fed.micro_batch_size, known=not source.counted_later)
        # If one rank has a limit, ranks count their pieces together: so all have one.
        if source.cut_in_step and (source.may_grow or self._limit.cuts(epoch) or source.world_size > 1):
            self._engine.lower("training", limit)
        dataloaders.resize_epoch(self.trainer, source.length, at_most=source.epoch_plan.length)

    def _begin_chunks(self, chunked: ChunkedModules) -> None:
        """Run chunks as planned; refuse a window of several batches."""
        plan = self.plan
        assert plan is not None
        if plan.factor > 1:
            raise UserError(
                f"whole={chunked.names!r} needs a window of one batch, and the loader's own batches make it one of "
                f"{plan.factor}: let it yield batches of {plan.effective_batch_size // plan.world_size} samples."
            )
        chunked.size.samples, chunked.size.even = self._limit.most, True
        chunked.size.keep = plan.kept_chunks
        chunked.size.recomputes_all = self.plans_several_passes

    def _arrange(self, epoch: int) -> None:
        """Cut an epoch; the loader yields nothing while the limit is unknown."""
        limit, progress = self._limit.micro_batch, self.progress
        place, done = progress.place(epoch), progress.windows_done(epoch)
        self._planned = plan_epoch(self.source, self.request, place, micro_batch=limit, windows_done=done)
        self._factors.begin_epoch(self.source.epoch_plan, self.fed.factor)

    @cached_property
    def _reader(self) -> BatchReader:
        """Counts and cuts the batches of training."""
        return self._engine.reader("training")

    @property
    def _accumulates(self) -> bool:
        """Whether a window takes several passes, be it after an error."""
        samples = self.fed.micro_batch_size
        return self.plans_several_passes or (self._engine.limit("training") or samples) < samples

    @property
    def plans_several_passes(self) -> bool:
        """Whether a window is planned in several passes, or chunks of one."""
        plan = self.plan
        if plan is None or plan.chunk_size is None:
            return plan is not None and plan.factor > 1
        return plan.chunk_size < plan.micro_batch_size

    # --- records -------------------------------------------------------------------------------

    def state(self) -> RunState:
        """Return what a checkpoint keeps."""
        events = self._reporter.events
        lowest = self._engine.limit("training") if events else None
        return RunState(self.progress.position, self._limit.hardware(), self.probe, lowest, events)

    def restore(self, state: RunState) -> None:
        """Go on where a checkpoint was written."""
        self.progress.restore(state)
        self._reporter.events = state.oom_events

    def save_loop(self, checkpoint: dict[str, Any], key: str) -> None:
        """Let a checkpoint count the recipe's batches, and keep the place of data that have one."""
        done, before = self.progress.recipe_counts()
        loops.count_recipe_batches(checkpoint, key, done=done, before=before)
        self._data.save_place(checkpoint)
        if self._rates is not None:
            self._rates.save(checkpoint)

    def load_loop(self, checkpoint: dict[str, Any], key: str) -> None:
        """Undo ``save_loop`` in a checkpoint that is being read."""
        loops.count_micro_batches(checkpoint, key)
        self._data.load_place(checkpoint)

    def optimizer_steps(self, *, of_recipe: bool = False) -> int | None:
        """Count the optimizer steps of the whole training; ``None`` if the data or the epochs have no end."""
        epochs = loops.all_epochs(self.trainer)
        if epochs is None or self._planned is None:
            return None
        limit, most = self._limit.micro_batch, self.trainer.max_steps
        request = read_request(None, None, "auto", None) if of_recipe else self.request
        return optimizer_steps(self.source, request, epochs, micro_batch=limit, max_steps=most)
