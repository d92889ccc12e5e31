"""One fit: wires data, plan, limit, weights and survival to the hooks of a Trainer."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_ga.batch.layout import LayoutError
from lightning_ga.chunks import ChunkedModules
from lightning_ga.compat import closures, loaders, place
from lightning_ga.compat.reduction import Exchange
from lightning_ga.errors import UserError
from lightning_ga.fit.batch_passes import BatchPasses
from lightning_ga.fit.data import TrainingData
from lightning_ga.fit.evaluation import Evaluation
from lightning_ga.fit.gradients import Gradients
from lightning_ga.fit.messages import OomReporter, check_trainer
from lightning_ga.fit.progress import Progress
from lightning_ga.fit.rates import WindowRates
from lightning_ga.fit.rewind import Rewinder
from lightning_ga.fit.verdict import Verdict
from lightning_ga.fit.windows import TrainingWindows
from lightning_ga.loading.source import LoaderSource
from lightning_ga.memory.device import enforced_budget, total_memory
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.config import Options, Request
from lightning_ga.plan.exactness import INEXACT
from lightning_ga.plan.state import RunState
from lightning_ga.plan.units import format_bytes, parse_budget
from lightning_ga.probe.limit import NO_LIMIT, Limit
from lightning_ga.probe.trials import TrainingSetup


class Fit:
    """One fit, from ``setup`` to ``teardown``. The strategy's environment is set up before.

    Lightning's tuners remove all callbacks while they run steps of their own. Then ``is_installed`` is false, and the
    loop gets the recipe as the user wrote it.
    """

    def __init__(
        self, trainer: Any, request: Request, options: Options, reporter: OomReporter, is_installed: Callable[[], bool]
    ) -> None:
        self.trainer, self.options, self.reporter = trainer, options, reporter
        left, recipe = vars(trainer).pop("_recipe_factor", (None, None))
        if trainer.accumulate_grad_batches == left:  # as the fit before has left it
            trainer.accumulate_grad_batches = recipe
        check_trainer(trainer, trainer.lightning_module, request)
        loop = place.LoopPlace(trainer)
        self.progress = Progress(trainer, loop)
        self.data = TrainingData(trainer, loop, options, lambda: self.progress.position)
        chunked = ChunkedModules(trainer, options.whole) if options.whole else None
        self.limit = Limit(trainer, request, options, chunked)
        self.gradients = Gradients(trainer, None if options.whole else options.normalize)
        self.verdict = Verdict(trainer, options, lambda: self.windows.several_passes)
        rates = WindowRates(trainer, options.scale_lr) if options.scale_lr != "none" or request.varies else None
        self.windows = TrainingWindows(request, self.data, self.progress, self.limit, rates)
        self.evaluation = Evaluation(trainer, reporter, options)
        self.rewinder: Rewinder | None = None  # none before training
        self._held = ExitStack()
        self._held.callback(self.windows.give_back)
        self._held.enter_context(
            loaders.intercepted_loaders(
                trainer,
                cut=lambda loader: self._cut(loader, loop.epoch) if is_installed() else loader,
                around=lambda set_up: self.data.set_up(set_up) if is_installed() else set_up(),
            )
        )

    def _cut(self, loader: Any, epoch: int) -> Any:
        """Cut the user's loader; the result yields nothing before the limit is known."""
        source = self.data.read_loader(loader)
        if not isinstance(source, LoaderSource):
            return loader
        self.limit.set_size_limits(source.sizes)
        self.windows.arrange(epoch, enabled=self.limit.samples is not None)
        return source.loader

    # --- training ------------------------------------------------------------------------------

    def start(self) -> None:
        """Find the limit and begin the epoch with it; a restored run continues at its sample."""
        trainer, options, loop = self.trainer, self.options, self.progress.place
        source = self.data.source
        cut = source if isinstance(source, LoaderSource) else None
        same_epoch = self.progress.take_over(cut, self.data.recipe_factor)
        epoch = loop.epoch
        self._hold_to_budget()
        self._held.enter_context(self.gradients.summed_in_float32())
        chunked = self.limit.chunked
        if chunked is not None:
            self._held.enter_context(chunked.installed())
        exchange = Exchange.of(trainer)
        rewinder = self.rewinder = Rewinder(
            trainer,
            loop,
            self.windows,
            self.reporter,
            retries=options.on_oom == "split",
            exchange=exchange,
        )
        self.data.see_first_batch()
        wanted = self.windows.wanted
        high, share = wanted.useful_limit(loop.epochs), -(-wanted.effective(epoch) // int(trainer.world_size))
        setup = TrainingSetup(
            trainer,
            self.data.trial_batches(epoch),
            rank_samples=share,
            kept=rewinder.tensors_kept,
            chunks=None if chunked is None else chunked.size,
            sizes=None if cut is None else cut.sizes,
        )
        recipe = min(high, wanted.micro_batch)
        self.limit.find(setup, self.progress.restored, high=high, recipe=recipe, varies=source.varies)
        self.windows.wanted.check(loop.epochs)  # the limit is known now
        self.windows.begin_epoch(epoch)
        if options.verify:
            limit, in_step = min(high, self.limit.samples or high), cut is None
            batches = self.data.trial_batches(epoch)
            self.verdict.measure_at_start(batches, limit=limit, in_step=in_step, chunked=chunked)
        self._patch_loop(rewinder, exchange)
        if isinstance(source, LoaderSource):
            self._begin_reading(source, same_epoch=same_epoch)
        else:
            source.batch = None
            loop.begin_epoch_after_last_batch()
            if self.windows.request.by_window is not None and loop.ready != loop.batches_of_epoch:
                loop.first_micro_batch = loop.ready  # a run that is resumed in mid-epoch begins with a window

    def _patch_loop(self, rewinder: Rewinder, exchange: Exchange | None) -> None:
        """Guard the windows of the loop from here on; run batches in pieces if the step cuts them."""
        trainer, held, loop = self.trainer, self._held, self.progress.place
        if self.windows.rates is not None:
            held.enter_context(self.windows.rates.unscaled_for_schedulers())
        in_step = self.data.source.cut_in_step
        held.enter_context(rewinder.guarding(in_step=in_step))
        if in_step or exchange is not None:
            passes = BatchPasses(trainer, loop, self.gradients, self.limit, exchange, self.data)
            self.windows.passes = passes
            held.enter_context(closures.intercepted_closures(trainer, passes.closure, lambda: loop.index_in_window))
        if in_step and self.windows.request.by_window is not None:
            held.enter_context(loop.windows_begin_anywhere())

    def _begin_reading(self, source: LoaderSource, *, same_epoch: bool) -> None:
        loop = self.progress.place
        if loop.restarts:
            self._held.enter_context(place.positions_are_kept())
            self.windows.set_due(source.plan.done, int(self.trainer.accumulate_grad_batches))  # before the loop asks
            loop.begin_at(source.plan.done, same_epoch=same_epoch)
        with source.seeded_as_before():
            loop.iterate_again()

    def start_epoch(self) -> None:
        """Cut the next epoch as its schedule says; ranks agree on limit and verdict."""
        self.limit.agree()
        self.verdict.agree()
        self.windows.begin_epoch(self.progress.place.epoch)
        self.verdict.warn()

    def begin_micro_batch(self, batch: Any) -> None:
        """Weigh the next micro-batch; if it begins a window, measure on it if that is due."""
        loop = self.progress.place
        if loop.skips_backward:
            return
        window, position = self.windows.window, loop.index_in_window
        if position == 0:
            self.gradients.begin_window()
            pending = bool(self.reporter.pending)
            if self.verdict.is_due(after_error=pending):
                limit, in_step = self.limit.piece_samples or NO_LIMIT, self.data.source.cut_in_step
                self.verdict.measure_in_training(batch, self.data.cutter_of_training(), limit=limit, in_step=in_step)
            if pending:
                self.reporter.report_pending(self.verdict.exactness)
        if window is not None:
            samples = self._count(batch) if self.data.source.may_drop_samples else None
            self.gradients.weigh_micro_batch(batch, window, position, samples=samples)

    def _count(self, batch: Any) -> int | None:
        """Count the samples of a batch whose collate function may drop some; ``None`` if they cannot be counted."""
        try:
            return self.data.cutter_of_training().count(batch)
        except LayoutError:
            return None

    def close_window(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark that the update begins, and scale the gradients if their window was not known in advance."""
        if self.rewinder is None or self.progress.place.skips_backward:
            return
        factor = int(self.trainer.accumulate_grad_batches)
        if self.rewinder.is_updating and factor > 1:
            raise UserError(
                f"{type(optimizer).__name__} evaluated its closure again, which repeats only the last of {factor} "
                'passes: use micro_batching="step", and let the loader yield whole effective batches.'
            )
        self.rewinder.is_updating = True
        self.gradients.close_window(optimizer)
        known = self.verdict.exactness
        if known is not None and known.cause != "exact" and self.limit.lowest is None:  # else a report said so
            self.verdict.warn()

    def end_micro_batch(self) -> None:
        """Note the new position if a window is over."""
        if self.progress.place.window_is_over and not self.progress.place.skips_backward:
            self.windows.end_window()

    def close(self) -> None:
        """Restore what the fit changed. The factor stays until the next fit, as with Lightning's own scheduler."""
        vars(self.trainer)["_recipe_factor"] = (self.trainer.accumulate_grad_batches, self.data.recipe_factor)
        self._held.close()
        self.reporter.report_pending(self.verdict.exactness)

    def fail(self, error: BaseException) -> None:
        """After an error: add what holds the memory, if memory ran out; restore the user's factor."""
        if is_out_of_memory(error) and self.limit.probe is not None and self.limit.probe.holders is not None:
            error.add_note(f"As the probe recorded it: {self.limit.probe.holders.sentence()}")
        self.trainer.accumulate_grad_batches = self.data.recipe_factor
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
            self.progress.position, self.limit.hardware(), self.limit.probe, self.limit.lowest, self.reporter.events
        )

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Write learning rates into a checkpoint as they would be without the callback."""
        if self.windows.rates is not None:
            self.windows.rates.save(checkpoint)

    def restore(self, state: RunState) -> None:
        """Continue at the position of a checkpoint."""
        self.progress.restore(state)
        self.reporter.events = state.oom_events

    def optimizer_steps(self) -> int | None:
        """Count the optimizer steps of the whole training; ``None`` if the data or the epochs have no end."""
        last = self.trainer.max_epochs
        if last is None or last < 0 or not self.data.is_set_up:
            return None
        epochs, batches, most = range(max(1, last)), self.progress.place.batches_of_epoch, self.trainer.max_steps
        return self.windows.wanted.steps(epochs, most, batches=batches)

    # --- what a user reads at the start --------------------------------------------------------

    def summary(self) -> str:
        """Return plan and probe in one line, and a verdict that no warning shows."""
        found, probe, request = "", self.limit.probe, self.windows.request
        if probe is not None:
            of_longest = "" if probe.sizes is None else " of the longest"
            how = probe.method if probe.source == "probe" else probe.source
            found = (
                f"; limit {probe.limit}{of_longest} within {format_bytes(probe.budget_bytes)}, found by "
                f"{how} in {probe.steps} steps and {probe.seconds:.1f} s"
            )
        exactness, source = self.verdict.exactness, self.data.source
        silent = exactness is None or exactness.cause in ("exact", *INEXACT)
        measured = "" if silent else f"; exactness: {str(exactness).removesuffix('.')}"
        grows = "" if request.by_window is None else f", the largest of {request.by_window!r}"
        cut = f"; cut in the step: {source.why}" if source.cut_in_step else ""
        rounded = "" if grows or not str(self.windows.intervals or "") else f"; {self.windows.intervals}"
        return f"{self.windows.plan}{grows}{cut}{rounded}{found}{measured}."

    def warn_at_start(self) -> None:
        """Warn of inexact gradients, and of an effective batch larger than the data."""
        self.verdict.warn()
        source, request, epochs = self.data.source, self.windows.request, self.progress.place.epochs
        asked = max((request.effective(epoch) or 0 for epoch in epochs), default=0)
        if isinstance(source, LoaderSource) and asked > source.total():
            rank_zero_warn(
                f"The effective batch of {asked:,} samples is above the {source.total():,} of an epoch: it is a single "
                "optimizer step over all of them, and a larger batch changes nothing."
            )
