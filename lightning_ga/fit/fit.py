"""One fit: wires data, plan, limit, weights and survival to the hooks of a Trainer.

Tested in tests/integration/test_fits.py and tests/integration/test_schedules.py.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.chunks import ChunkedModules
from lightning_ga.compat import loaders, ranks
from lightning_ga.compat.place import LoopPlace
from lightning_ga.compat.replicas import AnyExchange, exchange_of
from lightning_ga.compat.step_values import StepValues
from lightning_ga.fit.evaluation import Evaluation
from lightning_ga.fit.gradients import Gradients
from lightning_ga.fit.left_out import MOST_OF_EPOCH, LeftOut
from lightning_ga.fit.limit import NO_LIMIT, Limit
from lightning_ga.fit.messages import OomReporter, check_automatic, check_shares, check_trainer, check_unequal_passes
from lightning_ga.fit.progress import Progress
from lightning_ga.fit.rates import WindowRates
from lightning_ga.fit.rewind import Rewinder
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.fit.verdict import Verdict
from lightning_ga.fit.window_protocol import Windows, require_possible
from lightning_ga.memory.device import enforced_budget, is_emulated, total_memory
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.accumulation import AccumulationPlan, ceil_div
from lightning_ga.plan.config import Options, Request
from lightning_ga.plan.exactness import INEXACT
from lightning_ga.plan.run_state import RunState
from lightning_ga.plan.units import format_bytes, parse_budget
from lightning_ga.probe.probed_trainer import TrainingSetup
from lightning_ga.probe.prober import older_objects_frozen


class Fit:
    """One fit, from ``setup`` to ``teardown``. The strategy's environment is set up before.

    Lightning's tuners remove all callbacks while they run steps of their own. Then ``is_installed`` is false, and the
    loop gets the recipe as the user wrote it.
    """

    def __init__(
        self, trainer: Any, request: Request, options: Options, reporter: OomReporter, is_installed: Callable[[], bool]
    ) -> None:
        self.request = request
        self.options = options
        self.reporter = reporter
        place = LoopPlace(trainer)
        earlier = place.take_back()
        check_trainer(trainer, trainer.lightning_module, request)
        check_shares(trainer, options)
        chunked = ChunkedModules(trainer, options.whole) if options.whole else None
        self.limit = Limit(trainer, request, options, chunked)
        self.progress = Progress(trainer, place, earlier)
        self.gradients = Gradients(trainer, None if options.whole else options.normalize)
        speed = self.limit.speed
        waiting = nullcontext if speed is None else speed.waiting
        self.values = StepValues(trainer, place, lambda: self.gradients.counted, waiting)
        self.data = TrainingData(trainer, request, options, self.limit, self.progress, self.gradients, self.values)
        self.verdict = Verdict(trainer, options, request.multiple, lambda: self.windows.several_passes)
        self.evaluation = Evaluation(trainer, reporter, options)
        self.rates: WindowRates | None = None  # none if they are neither scaled nor logged
        if options.scale_lr != "none" or request.varies:
            self.rates = WindowRates(trainer, options.scale_lr)
        self.left_out: LeftOut | None = None
        if options.on_oom == "skip":
            self.left_out = LeftOut(
                self.progress, self.gradients, lambda at: self.windows.index_of(at), self._most_left_out
            )
        self.rewinder: Rewinder | None = None  # none before training
        self._held = ExitStack()
        self._held.enter_context(
            loaders.intercepted_loaders(
                trainer,
                cut=lambda loader: self.data.read_loader(loader) if is_installed() else loader,
                around=lambda set_up: self.data.set_up(set_up) if is_installed() else set_up(),
            )
        )

    @property
    def trainer(self) -> Any:
        """The Trainer that fits."""
        return self.progress.trainer

    @property
    def windows(self) -> Windows:
        """The windows into which the data are cut."""
        return self.data.windows

    @property
    def plan(self) -> AccumulationPlan | None:
        """How a full window is cut; ``None`` before the data are set up."""
        return self.windows.plan if self.data.is_set_up else None

    # --- training ------------------------------------------------------------------------------

    def start(self) -> None:
        """Find the limit and begin the epoch with it; a restored run continues at its sample."""
        device = self.trainer.strategy.root_device
        if device.type != "cpu" or is_emulated(device):  # tensors that nobody refers to use memory of the device
            gc.collect()
        with older_objects_frozen():
            self._start()

    def _start(self) -> None:
        trainer = self.trainer
        options = self.options
        place = self.progress.place
        windows = self.windows
        same_epoch = windows.begin_training()
        epoch = place.epoch
        self._hold_to_budget()
        self._held.enter_context(self.gradients.summed_in_float32())
        chunked = self.limit.chunked
        if chunked is not None:
            self._held.enter_context(chunked.installed())
        check_unequal_passes(trainer, options)
        speed = self.limit.speed
        exchange = exchange_of(trainer) if speed is None else exchange_of(trainer, before_sending=speed.note_sending)
        self._held.callback(self.limit.parts.use, ())
        rewinder = Rewinder(
            trainer,
            place,
            windows,
            self.limit,
            self.reporter,
            retries=options.on_oom != "raise",
            exchange=exchange,
            search=self._limit_below,
            last_resort=self._last_resort,
        )
        self.rewinder = rewinder
        self._find_limit(self.progress.restored, begins=True)
        self.limit.share_out()
        world_size = ranks.data_ranks(trainer)[0]
        require_possible(self.request, place.epochs, self.limit.initial_micro_batch, world_size)
        windows.begin_epoch(epoch)
        if options.verify and self._is_cut():
            high = windows.useful_limit(place.epochs)
            batches = windows.trial_batches(epoch)
            limit = min(high, self.limit.most)
            self.verdict.measure_at_start(batches, limit=limit, in_step=windows.in_step, chunked=chunked)
        self._begin_windows(rewinder, exchange)
        windows.begin_reading(same_epoch=same_epoch)

    def _find_limit(self, restored: RunState | None, *, begins: bool) -> None:
        """Find the limit for the windows of this epoch, or of all epochs if it is wanted at once.

        If windows are asked about again because they have grown, nothing happens unless nothing is known of them.
        """
        windows = self.windows
        if self.request.micro_batch is not None:
            if begins:
                self.limit.use_given(restored, windows.sizes)
            return
        epochs = self.progress.place.epochs
        if not self.limit.is_asked_at_once:
            epochs = epochs[:1]
        high = windows.useful_limit(epochs)
        if begins or self.limit.is_to_be_asked_again(high):
            recipe = min(high, windows.micro_batch)
            setup = self._trial_setup(begins=begins)
            self.limit.find(setup, restored, high=high, recipe=recipe, varies=windows.varies)

    def _trial_setup(self, *, begins: bool) -> TrainingSetup:
        """Return the training as trial steps run it."""
        assert self.rewinder is not None, "the limit is found once windows can run again"
        windows = self.windows
        epoch = self.progress.place.epoch
        chunked = self.limit.chunked
        ranks_of_share = 1 if self.limit.differs_by_rank else ranks.data_ranks(self.trainer)[0]
        return TrainingSetup(
            self.trainer,
            windows.trial_batches(epoch),
            rank_samples=ceil_div(windows.effective(epoch), ranks_of_share),
            kept=self.rewinder.tensors_kept,
            chunks=None if chunked is None else chunked.size,
            multiple=self.request.multiple,
            alone=self.limit.differs_by_rank,
            sizes=windows.sizes,
            begins=begins,
        )

    def _limit_below(self, failed: int) -> int | None:
        """Look for the limit after an error, if that was not done; ranks halve: the others wait for one."""
        if self.limit.fits is None or self.trainer.world_size > 1:
            return None
        return self.limit.search_below(self._trial_setup(begins=False), failed)

    def _last_resort(self) -> bool:
        """Let the running window compute again all that can be, or leave out the sample, if that is asked for."""
        if self.options.checkpoint == "auto" and self.limit.recompute_window(self._trial_setup(begins=False)):
            return True
        if self.left_out is None or not self.left_out.add():
            return False
        self.limit.leave_window()
        return True

    def _most_left_out(self) -> int | None:
        """Return the most samples of an epoch that may be left out."""
        epoch = self.progress.place.epoch
        steps = self.windows.steps(range(epoch, epoch + 1))
        return None if steps is None else ceil_div(steps * self.windows.effective(epoch), MOST_OF_EPOCH)

    def _is_cut(self) -> bool:
        """Return whether windows of some rank run in several passes or chunks, or later ones may: they are measured."""
        windows = self.windows
        may_be = self.limit.chunked is not None or (windows.varies and self.limit.piece_samples is not None)
        is_cut = may_be or windows.several_passes
        return ranks.sum_over_ranks(self.trainer, float(is_cut)) > 0

    def _begin_windows(self, rewinder: Rewinder, exchange: AnyExchange | None) -> None:
        """Let the loop run windows from here on, in each of which the same members begin in the same order."""
        members = [self.windows.begin_window, self.gradients.begin_window, self.values.begin_window]
        self._held.callback(self.values.close)
        if self.rates is not None:
            self._held.callback(self.rates.give_back)
            self._held.enter_context(self.rates.unscaled_for_schedulers())
            members.append(self._begin_rates)
        if self.options.checkpoint == "auto" or self.left_out is not None:
            members.insert(0, self.limit.begin_window)
        if self.left_out is not None:
            members.append(self.left_out.begin_window)
            self._held.enter_context(self.left_out.installed())
        if exchange is not None:
            members.append(exchange.begin_window)
        if self.limit.speed is not None:
            members.append(self.limit.speed.begin_window)
        self._held.enter_context(rewinder.guarding(members))
        self._held.enter_context(self.windows.patches(exchange))

    def _begin_rates(self) -> None:
        """Scale and log the rates of a window by its effective batch."""
        plan = self.windows.plan
        if self.rates is not None and plan is not None and not self.progress.place.skips_backward:
            self.rates.begin_window(plan.effective_batch_size, self.windows.recipe_effective)

    def start_epoch(self) -> None:
        """Cut the next epoch as its schedule says; ranks agree on limit and verdict.

        If windows have grown, they are asked about as at the start.
        """
        self.limit.agree()
        self.verdict.agree()
        self._find_limit(None, begins=False)
        self.windows.begin_epoch(self.progress.place.epoch)
        self.verdict.warn()

    def begin_micro_batch(self, batch: Any) -> None:
        """Weigh the next micro-batch; if it begins a window, measure on it if that is due."""
        place = self.progress.place
        if place.skips_backward:
            return
        position = place.index_in_window
        if position == 0:
            check_automatic(self.trainer.lightning_module)
            after_error = bool(self.reporter.pending)
            if self.verdict.is_due(after_error=after_error):
                cutter = self.data.cutter_of_training()
                limit = self.limit.piece_samples or NO_LIMIT
                if self.verdict.exactness is None:  # as at the start, on samples that differ
                    batches = self.windows.trial_batches(place.epoch)
                    self.verdict.measure_first(batches, limit=limit, in_step=self.windows.in_step)
                else:
                    self.verdict.measure_in_training(batch, cutter, limit=limit, in_step=self.windows.in_step)
            if after_error:
                self.reporter.report_pending(self.verdict.exactness)
        self.windows.weigh(batch, position)

    def close_window(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark that the update begins, and scale the gradients if their window was not known in advance."""
        if self.rewinder is None or self.progress.place.skips_backward:
            return
        self.rewinder.begin_update(optimizer)
        self.gradients.close_window(optimizer)
        known = self.verdict.exactness
        if known is not None and known.cause != "exact" and self.limit.lowest is None:  # else a report said so
            self.verdict.warn()

    def end_micro_batch(self) -> None:
        """Note the new position if a window is over."""
        windows = self.data.windows
        if self.left_out is not None:
            self.left_out.end_pass()
        if windows.is_over and not self.progress.place.skips_backward:
            windows.end_window()

    def close(self) -> None:
        """Restore what the fit changed. The factor stays until the next fit, as with Lightning's own scheduler."""
        self.progress.place.leave(self.data.recipe_factor, self.progress.position)
        if self.data.is_set_up:
            self.windows.close()
        self._held.close()
        self.reporter.report_pending(self.verdict.exactness)

    def fail(self, error: BaseException) -> None:
        """After an error: add what holds the memory, if memory ran out; restore the user's factor."""
        if is_out_of_memory(error) and self.limit.probe is not None and self.limit.probe.holders is not None:
            error.add_note(f"As the probe recorded it: {self.limit.probe.holders.sentence()}")
        self.progress.place.set_factor(self.data.recipe_factor)
        self.close()

    def _hold_to_budget(self) -> None:
        """Bound what a CUDA device reserves by ``memory_budget`` until training ends."""
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            self._held.enter_context(enforced_budget(device, parse_budget(self.options.budget, total_memory(device))))

    # --- records -------------------------------------------------------------------------------

    def state(self) -> RunState:
        """Return what a checkpoint keeps."""
        return RunState(
            self.progress.position,
            self.limit.hardware(),
            self.limit.probe,
            self.limit.lowest,
            self.reporter.events,
            self.windows.kept_order() if self.data.is_set_up else None,
        )

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Write learning rates into a checkpoint as they would be without the callback."""
        if self.rates is not None:
            self.rates.save(checkpoint)

    def restore(self, state: RunState) -> None:
        """Continue at the position of a checkpoint."""
        self.progress.restore(state)
        self.reporter.events = state.oom_events

    def optimizer_steps(self) -> int | None:
        """Count the optimizer steps of the whole training; ``None`` if the data or the epochs have no end."""
        last = self.trainer.max_epochs
        if last is None or last < 0 or not self.data.is_set_up:
            return None
        steps = self.windows.steps(range(max(1, last)))
        if steps is None or self.trainer.max_steps == -1:
            return steps
        return min(steps, int(self.trainer.max_steps))

    # --- what a user reads at the start --------------------------------------------------------

    def summary(self) -> str:
        """Return plan and probe in one line, and a verdict that no warning shows."""
        plan = str(self.windows.plan)
        if self.request.is_by_window:
            plan += f", the largest of {self.request.by_window!r}"
        found = [plan]
        how_cut = self.windows.how_cut()
        if how_cut:
            found.append(how_cut)
        if self.limit.fits is not None:
            found.append(f"fits: {self.limit.fits}")
        if self.limit.recomputed is not None:
            found.append(f"computed again: {self.limit.recomputed}")
        probe = self.limit.probe
        if probe is not None:
            of_longest = "" if probe.sizes is None else " of the longest"
            how = probe.method if probe.source == "probe" else probe.source
            found.append(
                f"limit {probe.limit}{of_longest} within {format_bytes(probe.budget_bytes)}, found by "
                f"{how} in {probe.steps} steps and {probe.seconds:.1f} s"
            )
        exactness = self.verdict.exactness
        if exactness is not None and exactness.cause not in ("exact", *INEXACT):
            found.append(f"exactness: {str(exactness).removesuffix('.')}")
        return f"{'; '.join(found)}."

    def warn_at_start(self) -> None:
        """Warn of inexact gradients, and of an effective batch larger than the data."""
        self.verdict.warn()
        advice = self.windows.advice(self.progress.place.epochs)
        if advice:
            rank_zero_warn(advice)
