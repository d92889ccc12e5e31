"""One fit: wires data, plan, limit, weights and survival to the hooks of a Trainer.

Tested in tests/integration/test_fits.py and tests/integration/test_schedules.py.
"""

import gc
from collections.abc import Callable
from math import inf
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.compat.logged_values import StepValues
from lightning_ga.compat.loop_counters import LoopPlace
from lightning_ga.compat.replicas import AnyExchange, exchange_of
from lightning_ga.fit.checks import BY_HAND, check_automatic, check_trainer
from lightning_ga.fit.data_progress import DataProgress
from lightning_ga.fit.gradients import Gradients
from lightning_ga.fit.learning_rates import WindowRates
from lightning_ga.fit.left_out import LeftOut
from lightning_ga.fit.limit import Limit
from lightning_ga.fit.limit_search import LimitSearch
from lightning_ga.fit.messages import OomReporter
from lightning_ga.fit.parts import FitParts
from lightning_ga.fit.remedies import Remedies
from lightning_ga.fit.rerun_windows import Rewinder
from lightning_ga.fit.shares import Shares
from lightning_ga.fit.training_data import TrainingData
from lightning_ga.fit.verdict import Verdict
from lightning_ga.loading.step_source import StepSource
from lightning_ga.memory.device import enforced_budget, is_emulated, total_memory
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.accumulation import AccumulationPlan, require_effective_batch, require_few_micro_batches
from lightning_ga.plan.config import Options, Request
from lightning_ga.plan.exactness_verdicts import INEXACT
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.run_state import RunState
from lightning_ga.plan.units import format_bytes, parse_budget
from lightning_ga.probe.trials import older_objects_frozen


class Fit:
    """One fit, from ``setup`` to ``teardown``. The strategy's environment is set up before.

    Lightning's tuners remove all callbacks while they run steps of their own. Then ``is_installed`` is false, and the
    loop gets the recipe as the user wrote it.
    """

    _rewinder: Rewinder  # from ``start`` on

    def __init__(
        self, trainer: Any, request: Request, options: Options, reporter: OomReporter, is_installed: Callable[[], bool]
    ) -> None:
        self.trainer = trainer
        self._options = options
        self._reporter = reporter
        place = LoopPlace(trainer)
        earlier = place.take_back()  # first: it restores the recipe's factor, which others read
        check_trainer(trainer, trainer.lightning_module, request)
        limit = Limit(trainer, options.whole)
        shares = Shares(trainer, options)
        progress = DataProgress(trainer, place, earlier)
        gradients = Gradients(trainer, options)
        self.parts = FitParts(
            request,
            limit,
            shares,
            progress,
            gradients,
            StepValues(trainer, place, lambda: gradients.counted, shares.waiting),
        )
        self.data = TrainingData(self.parts, options)
        self.search = LimitSearch(self.parts, options, self.data, lambda: self._rewinder.tensors_kept())
        self.verdict = Verdict(self.parts, options, self.data)
        self.rates = WindowRates(trainer, options.scale_lr, varies=request.varies)
        self.parts.undo_at_end.enter_context(self.data.intercepted(is_installed))

    @property
    def plan(self) -> AccumulationPlan | None:
        """How a full window is cut; ``None`` before the data are set up."""
        return self.data.windows.planner.plan if self.data.is_set_up else None

    # --- training ------------------------------------------------------------------------------

    def start(self) -> None:
        """Find the limit and begin the epoch with it; a restored run continues at its sample."""
        device = self.trainer.strategy.root_device
        if device.type != "cpu" or is_emulated(device):  # tensors that nobody refers to use memory of the device
            gc.collect()
        parts = self.parts
        windows = self.data.windows
        continues_epoch = windows.adopt_position()  # first: it may reopen the loop's epoch
        self._hold_to_budget()
        parts.undo_at_end.callback(parts.gradients.end_weightless_pass)
        parts.undo_at_end.enter_context(parts.gradients.summed_in_float32())
        if parts.limit.chunked is not None:
            parts.undo_at_end.enter_context(parts.limit.chunked.installed())
        parts.undo_at_end.callback(self.search.recomputed.use, ())
        parts.shares.check()
        exchange = exchange_of(self.trainer, parts.shares.note_sending)
        remedies = Remedies(parts, self._options, self.search, LeftOut(parts, self._options, self.data), windows)
        self._rewinder = Rewinder(
            parts, windows, remedies, self._reporter, exchange, repeats=self._options.on_oom != "raise"
        )
        with older_objects_frozen():  # one full collection may take longer than a step
            self.search.begin()
            parts.shares.follow_limits(parts.limit.samples)
            self._require_possible()
            windows.begin_epoch(parts.place.epoch)  # the hook of the epoch's start finds it begun
            self.verdict.measure_at_start()
        self._begin_windows(remedies, exchange)
        windows.begin_reading(continues_epoch=continues_epoch)

    def _begin_windows(self, remedies: Remedies, exchange: AnyExchange | None) -> None:
        """Let the loop run windows from here on; their members begin each of them in this order."""
        parts = self.parts
        members = [
            self.search.begin_window,  # first: windows are planned by the limit
            remedies.begin_window,  # notes the limit, which ``end_window`` may take back
            self.data.windows.begin_window,
            parts.gradients.begin_window,
            parts.values.begin_window,
            self._begin_rates,  # after the window is planned
        ]
        if exchange is not None:
            members.append(exchange.begin_window)
        members.append(parts.shares.begin_window)  # last but the Rewinder's savepoint: a window's time begins here
        parts.undo_at_end.enter_context(parts.values.installed())
        parts.undo_at_end.callback(self.rates.give_back)
        parts.undo_at_end.enter_context(self.rates.unscaled_for_schedulers())
        parts.undo_at_end.enter_context(self._rewinder.guarding(members))
        self.data.windows.install(exchange)

    def _hold_to_budget(self) -> None:
        """Bound what a CUDA device reserves by ``memory_budget`` until training ends."""
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            self.parts.undo_at_end.enter_context(
                enforced_budget(device, parse_budget(self._options.budget, total_memory(device)))
            )

    def _require_possible(self) -> None:
        """Refuse a schedule that would fail in a later epoch, before any work is lost; warn of too large a batch."""
        parts = self.parts
        planner = self.data.windows.planner
        world_size = planner.recipe.world_size
        largest = 0
        for epoch in parts.place.epochs:
            effective = parts.request.asked_effective(epoch)
            if effective is not None:
                require_effective_batch(effective, world_size)
                require_few_micro_batches(effective, parts.limit.of_first_passes, world_size)
                largest = max(largest, effective)
                if isinstance(planner.source, StepSource) and parts.request.by_window is None:
                    planner.source.factor_for(effective)  # a window is whole batches
        total = planner.samples_of_epoch(parts.place.epoch)
        if total is not None and largest > total:
            rank_zero_warn(
                f"The effective batch of {largest:,} samples is above the {total:,} of an epoch: it is a single "
                "optimizer step over all of them, and a larger batch changes nothing."
            )

    def _begin_rates(self) -> None:
        """Scale and log the rates of a window by its effective batch."""
        plan = self.plan
        assert plan is not None, "windows begin once the data are set up"
        if self.parts.place.skips_backward:
            return
        planner = self.data.windows.planner
        of_epoch = planner.samples_of_epoch(self.parts.place.epoch)
        effective = plan.effective_batch_size
        if of_epoch is not None:  # a window ends with its epoch
            effective = min(effective, of_epoch)
        self.rates.begin_window(effective, planner.recipe.effective)

    def start_epoch(self) -> None:
        """Cut the next epoch as its schedule says; ranks agree on limit and verdict.

        If its windows are larger than any before, the limit is looked for again. In the first epoch ``begin_epoch``
        does nothing, because ``start`` has begun it: ``LoaderWindows.begin_window`` follows a limit that changes here.
        """
        parts = self.parts
        parts.shares.follow_limits(parts.limit.samples)
        parts.shares.follow_speeds()
        if not parts.shares.differ:
            parts.limit.agree()
        self.verdict.agree()
        self.search.follow_windows()
        self.data.windows.begin_epoch(parts.place.epoch)
        self.verdict.warn()

    def begin_micro_batch(self, batch: Any) -> None:
        """Begin the next batch of the loop; if it begins a window, measure on it if that is due."""
        place = self.parts.place
        if place.skips_backward:
            return
        index_in_window = place.index_in_window
        if index_in_window == 0:
            check_automatic(self.trainer.lightning_module)
            self.verdict.begin_window(batch, after_error=self._reporter.has_pending)
            if self._reporter.has_pending:
                self._reporter.report_pending(self.verdict.exactness)
                self.verdict.note_told()
        self.data.windows.begin_batch(batch, index_in_window)

    def close_window(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark that the update begins, and finish the gradients of the window; warn if they may be inexact."""
        if self.parts.place.skips_backward:
            return
        self._rewinder.begin_update(optimizer)
        self.parts.gradients.close_window(optimizer)
        self.rates.log_window()
        self.verdict.warn()  # this window may have been the first of several passes

    def end_micro_batch(self) -> None:
        """Note the new position if a window is over."""
        self.parts.gradients.forget_pass()
        if self.data.windows.is_over and not self.parts.place.skips_backward:
            self.data.windows.end_window()
            self._rewinder.end_window()

    def close(self) -> None:
        """Restore what the fit changed. The factor stays until the next fit, as with Lightning's own scheduler."""
        progress = self.parts.progress
        progress.place.leave(self.data.recipe_factor, progress.position)
        self.parts.undo_at_end.close()
        self._reporter.report_pending(self.verdict.at_end())

    def fail(self, error: BaseException) -> None:
        """After an error: add a note if that helps, such as what holds the memory; restore the user's factor."""
        if "multiple optimizers" in str(error):  # Lightning proposes manual optimization, which is refused
            error.add_note(f"AutoAccumulate steers the automatic optimization of one optimizer: {BY_HAND}")
        probe = self.search.found.result
        if is_out_of_memory(error) and probe is not None and probe.holders is not None:
            error.add_note(f"As the probe recorded it: {probe.holders.sentence()}")
        self.parts.place.set_factor(self.data.recipe_factor)  # before: ``close`` notes it for the next fit
        self.close()

    # --- records -------------------------------------------------------------------------------

    def state(self) -> RunState:
        """Return what a checkpoint keeps."""
        return RunState(
            self.parts.progress.position,
            self.search.hardware(),
            self.search.found.result,
            self.parts.limit.after_errors,
            self._reporter.events,
            self.data.windows.kept_order() if self.data.is_set_up else None,
            self.data.is_set_up and self.data.windows.in_step,
        )

    def restore(self, state: RunState) -> None:
        """Continue at the position of a checkpoint."""
        self.parts.progress.restore(state)
        self._reporter.events = state.oom_events

    def optimizer_steps(self) -> int | None:
        """Count the optimizer steps of the whole training; ``None`` if the data or the epochs have no end.

        Raises:
            UserError: If windows count samples, and no batch has shown yet how many it has.
        """
        last = self.trainer.max_epochs
        if last is None or last < 0 or not self.data.is_set_up:
            return None
        max_steps = inf if self.trainer.max_steps == -1 else self.trainer.max_steps
        steps = 0
        samples = 0
        for epoch in range(max(1, last)):  # ``estimated_stepping_batches``, too, counts ``max_epochs=0`` as one
            if steps >= max_steps:
                break
            counted = self.data.windows.planner.steps_of(epoch, steps=steps, samples=samples)
            if counted is None:
                return None
            steps_of_epoch, samples_of_epoch = counted
            steps += steps_of_epoch
            samples += samples_of_epoch
        return int(min(steps, max_steps))

    # --- what a user reads at the start --------------------------------------------------------

    def summary(self) -> str:
        """Return plan and probe in one line, and the verdict unless that is exact, or inexact, which a warning says."""
        plan = str(self.plan)
        if self.parts.request.by_window:
            plan += f", the first of {self.parts.request.by_window!r}"
        found = [plan]
        how_cut = self.data.windows.how_cut()
        if how_cut:
            found.append(how_cut)
        if self.search.fits is not None:
            found.append(f"fits: {self.search.fits}")
        if self.search.chosen is not None:
            found.append(f"computed again: {self.search.chosen}")
        if self.search.found.result is not None:
            found.append(_found_by(self.search.found.result))
        exactness = self.verdict.exactness
        if exactness is not None and exactness.cause not in ("exact", *INEXACT):
            found.append(f"exactness: {str(exactness).removesuffix('.')}")
        return f"{'; '.join(found)}."


def _found_by(probe: ProbeResult) -> str:
    """Return in words what the limit is, and how it was found."""
    of_longest = "" if probe.sizes is None else " of the longest"
    how = probe.method if probe.source == "probe" else probe.source
    return (
        f"limit {probe.limit}{of_longest} within {format_bytes(probe.budget_bytes)}, found by {how} in {probe.steps} "
        f"steps and {probe.seconds:.1f} s"
    )
