"""One fit: the loader it is fed by, the plan of its epochs, its weights and its place in the data."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import IterableDataset

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import agreement, dataloaders, intervals, loops
from lightning_ga.compat import checkpoint as loop_state
from lightning_ga.compat.step_counts import wrong_horizons
from lightning_ga.errors import UserError
from lightning_ga.fit.batch_norm import Momenta
from lightning_ga.fit.exactness import INEXACT, Exactness, uncuttable
from lightning_ga.fit.lbfgs import evaluates_again
from lightning_ga.fit.messages import SAME_RESULT
from lightning_ga.fit.oom_handler import OomHandler, OomReporter
from lightning_ga.fit.verify import SAMPLES, Verdicts, measure_exactness, rounding
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.loading.largest_samples import ScanOrder
from lightning_ga.loading.prebatched import Batches, PrebatchedSource
from lightning_ga.loading.reader import CollatedAgain, length_of_first
from lightning_ga.loading.source import MicroBatchSource
from lightning_ga.loading.stateful import load_states, states_of
from lightning_ga.memory.device import enforced_budget, parse_budget, total_memory
from lightning_ga.memory.oom import is_ambiguous_out_of_memory, is_out_of_memory
from lightning_ga.plan.accumulation import AccumulationPlan, cut_further
from lightning_ga.plan.checkpoint import Position, RunState
from lightning_ga.plan.config import Options, Request
from lightning_ga.plan.records import ProbeResult, lowered, outdated
from lightning_ga.plan.windows import Chunk
from lightning_ga.probe.cache import LimitCache
from lightning_ga.probe.fingerprint import hardware
from lightning_ga.probe.isolation import hooks_apart
from lightning_ga.probe.limit import probe
from lightning_ga.probe.planned.device import current_device
from lightning_ga.probe.planned.estimate import estimate

_NO_LIMIT = 2**31


class Fit:
    """What lives from ``setup`` to ``teardown`` of one fit.

    Args:
        trainer: The Trainer, with its strategy's environment set up.
        request: What the user asked for.
        options: How it is to be done.
        witness: Told of every out-of-memory error that was survived.
        active: Whether the callback takes part. Lightning's tuners take all callbacks out while they
            run steps of their own: they get the recipe as the user wrote it.
    """

    def __init__(
        self, trainer: Any, request: Request, options: Options, reporter: OomReporter, active: Callable[[], bool]
    ) -> None:
        self.trainer = trainer
        self.request = request
        self.options = options
        self._active = active
        self.recipe_factor: int = trainer.accumulate_grad_batches
        self.plan: AccumulationPlan | None = None
        self.probe: ProbeResult | None = None
        self.exactness: Exactness | None = None
        self._splitting: Exactness | None = None  # of batches that are cut in the step, be it after an error
        self.gradients = WindowGradients(trainer, options.normalize)
        self._momenta: Momenta | None = None
        self._begun: tuple[MicroBatchSource | PrebatchedSource, int] | None = None  # what the loops were told of last
        self._frequencies: dict[int, int] = {}
        self._position = Position(agreement.shared_seed(trainer), loops.training_epoch(trainer), 0, 0)
        self._restored: RunState | None = None
        self._loader_states: list[Any] = []
        self._passed = 0, 0  # batches of the recipe after the last micro-batch: of its epoch, and before that
        self._feed: MicroBatchSource | PrebatchedSource | None = None
        self._micro_batch: int | None = None  # known once training starts
        self._in_midst = False  # of a batch of the recipe, after the last micro-batch
        self._given: Any = None  # the training data as the user gave them
        self._why_in_step = ""
        self._fed_at_most = 1  # samples of a batch as the loader yields it
        self._held = ExitStack()
        self._kind: Mapping[str, Any] | None = None  # of training step, as the cache knows it
        self.reporter = reporter
        self.oom_handler = OomHandler(
            trainer,
            retries=options.on_oom == "split",
            report=reporter,
            source=lambda: self.feed.source,
            verdict=self._verdict,
            samples_again=self._samples_again,
        )
        self.oom_handler.retrier.coming = self._samples_of_next
        self.oom_handler.watch_batches()

    # --- data ----------------------------------------------------------------------------------

    def cut(self, loader: Any) -> Any:
        """The user's loader, cut into micro-batches; it yields none before the micro-batch is known."""
        trainer = self.trainer
        if not self._active():
            return loader
        settings: dict[str, Any] = {
            "recipe_factor": self.recipe_factor,
            "world_size": trainer.world_size,
            "rank": trainer.global_rank,
            "seed": self._position.seed,
            "limit_batches": self._limit_batches,
            "shard": self._shard,
            "shuffle": not trainer.overfit_batches,
            "largest_over_ranks": partial(agreement.largest_over_ranks, trainer),
            "keep_batches": self.options.micro_batching == "step",
        }
        dataloaders.warn_of_overfitting(trainer, loader)
        try:
            self._feed = MicroBatchSource(loader, **settings)
        except UserError as why:
            hook = getattr(trainer.lightning_module, "split_batch", None)
            batches = Batches(*dataloaders.batches_of(trainer, loader))
            if self._loader_states:
                load_states(batches.loaders, self._loader_states)
            self._feed = PrebatchedSource(batches, hook=hook, **settings)
            self._why_in_step = str(why)
            if not any(isinstance(getattr(part, "dataset", None), IterableDataset) for part in self._feed.loaders):
                warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")  # it is ours
        else:
            dataloaders.load_later(trainer, self._loader_states)
        self._loader_states = []
        self._arrange(loops.training_epoch(trainer))
        self._given = loader
        return self._feed.loader

    def set_up_data(self, set_up: Callable[[], None]) -> None:
        """Let the loop set its data up, with the recipe's limits read in the recipe's batches."""
        trainer = self.trainer
        if not self._active():
            set_up()
            return
        self._limit_batches, self._shard = trainer.limit_train_batches, dataloaders.shards_data(trainer)
        known = self._feed
        if known is None:
            dataloaders.forget_loaders(trainer)
        with dataloaders.micro_batch_units(trainer), warnings.catch_warnings():
            set_up()
        if self._feed is not None and self._feed is not known:
            dataloaders.show_loaders(trainer, self._given)
            intervals.check_validation_interval(trainer, self._epoch_batches())
            intervals.set_validation_interval(trainer, self._epoch_batches())
            dataloaders.resize_epoch(trainer, self._feed.length, at_most=self._feed.at_most)

    # --- epochs --------------------------------------------------------------------------------

    def start(self) -> None:
        """Find the micro-batch and begin with it, where a restored run left off."""
        trainer = self.trainer
        if loops.restarts_in_epoch(trainer):
            loops.reopen_epoch(trainer)
        epoch = loops.training_epoch(trainer)
        if self._restored is None and loops.restarts_in_epoch(trainer):
            self._take_over(epoch)
        same_epoch = (self._restored is not None or self._position.samples_done > 0) and self._position.epoch == epoch
        self._enter(epoch)
        self._hold_to_budget()
        self.oom_handler.retrier.read_module()
        with self.oom_handler.aside():
            self._read_streams()
            if self.in_step:  # what is learnt of cutting batches is of use to the probe
                self._verify(epoch, self._recipe_batch(epoch))
            self._micro_batch = min(self._find_micro_batch(epoch), self._proved_too_much_before() or _NO_LIMIT)
            if current_device() is not None:
                self._begin(epoch)
                loops.end_training(trainer)  # what fits on another device may not fit here
                return
            self._refuse_what_cannot_be_cut(epoch)
            if self.exactness is None or self.exactness.cause == "unmeasured":
                self._verify(epoch, self._micro_batch)
        if self.options.batch_norm == "rescale":
            self._momenta = Momenta(trainer.lightning_module)
        self._begin(epoch)
        self._frequencies = self._frequencies_in_steps()
        self.oom_handler.watch_training(self.gradients, in_step=self.in_step)
        self._held.callback(intervals.stop_only_unless(trainer, lambda: self._in_midst))
        if loops.restarts_in_epoch(trainer):
            done = self.feed.done
            if not same_epoch:
                loops.begin_next_epoch(trainer)
            elif self.feed.keeps_place:
                loops.expect_positions_to_be_kept()
            loops.move_to_micro_batch(trainer, done, same_epoch=same_epoch)
            if done:
                self._passed = self.feed.batches_after(done - 1), self._position.batches_before
                self._schedule_validation(done - 1)
            loops.align_logger_steps(trainer)
        with self.feed.seeded_as_before():
            dataloaders.iterate_again(trainer)

    def _take_over(self, epoch: int) -> None:
        """Go on from a checkpoint of stock Lightning: its loop tells the place, in batches of the recipe."""
        done, before = loops.batches_done(self.trainer)
        samples = self.feed.samples_of(done - done % self.recipe_factor) * self.feed.sharded_ranks
        self._position = replace(self._position, epoch=epoch, samples_done=samples, batches_before=before)

    def start_epoch(self) -> None:
        """Cut the next epoch as its schedule says; the loop iterates it anew."""
        epoch = loops.training_epoch(self.trainer)
        if self._begun != (self.feed, epoch):
            self._lower()
            self._begin(epoch)

    def _hold_to_budget(self) -> None:
        """Let a CUDA device reserve no more than ``memory_budget`` until training ends."""
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            self._held.enter_context(enforced_budget(device, parse_budget(self.options.budget, total_memory(device))))

    def close(self) -> None:
        """Give model, schedules, loops and device back what they had."""
        self._held.close()
        if self._momenta is not None:
            self._momenta.restore()
        intervals.restore_frequencies(self.trainer, self._frequencies)
        loops.expect_nothing_of_positions()
        self.oom_handler.stop_training()

    def abandon(self) -> None:
        """After an error: count the recipe's batches again, as with its factor."""
        self.trainer.accumulate_grad_batches = self.recipe_factor
        batches = self._epoch_batches() if self._begun is not None else None
        if batches is not None:
            dataloaders.resize_epoch(self.trainer, batches)
        self.close()

    def prepare(self, batch: Any) -> None:
        """Before each micro-batch: its weight, and whether schedules of the learning rate are due after it."""
        chunk = self.feed.chunk(loops.micro_batch_index(self.trainer))
        if self.gradients.counts_samples:
            samples = self._count(batch, chunk, on_host=self.oom_handler.retrier.on_host)
            self.gradients.weigh(batch, chunk, sharded_ranks=self.feed.sharded_ranks, samples=samples)
            self.oom_handler.expect(samples)
        else:
            self.oom_handler.expect(self.feed.expected(chunk))
        intervals.step_schedulers_when_due(self.trainer, self._frequencies, chunk.window)

    def _samples_of_next(self, batch: Any) -> int | None:
        """Samples of the batch that training goes on with, before the loop counts it."""
        if self._begun is None or not self._active():
            return None
        return self._count(batch, self.feed.chunk(loops.micro_batch_index(self.trainer) + 1), on_host=True)

    def _count(self, batch: Any, chunk: Chunk, *, on_host: bool) -> int:
        """Samples of a batch: as planned, but for what a collate function of the user's own has dropped."""
        expected = self.feed.expected(chunk)
        if not chunk.count or (expected is not None and not self.feed.may_drop):
            return chunk.count
        if not self.feed.may_drop:  # stacked: every part is as long as the batch
            return min(chunk.count, length_of_first(batch))
        reader = self.oom_handler.retrier.reader("training")
        return reader.count(batch, expected=expected, otherwise=chunk.count, on_host=on_host)

    def _samples_again(self) -> CollatedAgain | None:
        """The samples of the batch that is being trained on, fetched again."""
        return self.feed.samples_at(loops.micro_batch_index(self.trainer))

    def _verdict(self) -> str:
        """Whether a batch that is cut in the step has the same gradient, as a sentence."""
        found = self._splitting
        if found is None:
            return "Whether its gradient is that of the batch in one pass was not measured (verify=False)."
        if found.cause == "exact":
            return SAME_RESULT
        if found.cause in INEXACT:
            return f"Its gradient is not that of the batch in one pass, {found}."
        return f"Whether its gradient is that of the batch in one pass is not known: {found}."

    def advance(self) -> None:
        """After each micro-batch: keep the position, and let validation run when the recipe says."""
        index = loops.micro_batch_index(self.trainer)
        if loops.window_is_over(self.trainer):
            done = self.feed.chunk(index).window_end * self.feed.sharded_ranks
            self._position = replace(self._position, samples_done=done)
            self.oom_handler.after_window(self._micro_batch or 1)
        done = self.feed.batches_after(index)
        self._passed = done, self._position.batches_before
        self._in_midst = done == self.feed.batches_after(index - 1)
        self._schedule_validation(index)

    # --- records -------------------------------------------------------------------------------

    def state(self) -> RunState:
        """What a checkpoint keeps."""
        lowest = self.oom_handler.limit if self.reporter.events else None
        kind = hardware(self.trainer, self.options.budget)
        return RunState(self._position, kind, self.probe, lowest, self.reporter.events)

    def save_loop(self, checkpoint: dict[str, Any], key: str) -> None:
        """Let a checkpoint count the recipe's batches, and keep the place of data that have one."""
        started = loops.batches_processed(self.trainer) > 0  # the loop counts a new epoch only with its first batch
        done, before = self._passed if started else (0, self._position.batches_before)
        loop_state.count_recipe_batches(checkpoint, key, done=done, before=before)
        if isinstance(self._feed, PrebatchedSource):
            loop_state.save_loaders(checkpoint, states_of(self._feed.loaders))

    def load_loop(self, checkpoint: dict[str, Any], key: str) -> None:
        """Undo ``save_loop`` in a checkpoint that is being read."""
        loop_state.count_micro_batches(checkpoint, key)
        self._loader_states = loop_state.take_loaders(checkpoint)

    def restore(self, state: RunState) -> None:
        """Go on where a checkpoint was written."""
        self._restored, self._position, self.reporter.events = state, state.position, state.oom_events

    def optimizer_steps(self) -> int | None:
        """Optimizer steps of the whole training; ``None`` where the data or the epochs have no end."""
        epochs = loops.all_epochs(self.trainer)
        if epochs is None or self._feed is None:
            return None
        counts = [self.feed.steps(epoch, self._effective(epoch)) for epoch in epochs]
        total = None if None in counts else sum(count for count in counts if count is not None)
        most = self.trainer.max_steps
        return total if total is None or most == -1 else min(total, most)

    def warnings(self) -> list[str]:
        """What the user should know before training: inexact gradients, horizons of schedules that are off."""
        found, steps = [], self.optimizer_steps()
        accumulates = self.plan is not None and self.plan.factor > 1
        if accumulates and self.exactness is not None and self.exactness.cause in INEXACT:
            known = self.exactness.cause == "batch_norm" and self.options.batch_norm != "warn"
            found += [] if known else [f"Accumulation is not exact for this model, {self.exactness}."]
        if accumulates and self.feed.streams and self.feed.workers > 1:
            found.append(
                "Several data workers read an iterable dataset in turn, a micro-batch each, so windows hold other "
                "samples than batches of the whole size would: use num_workers=1 for the same windows."
            )
        for name, length in wrong_horizons(intervals.schedules_by_step(self.trainer), steps) if steps else []:
            found.append(
                f"{name} ends after {length} steps and training takes {steps}: make it with "
                "lightning_ga.optimizer_steps(self.trainer)."
            )
        return found

    def summary(self) -> str:
        """Plan and probe in one line."""
        found = ""
        if self.probe is not None:
            how = self.probe.method if self.probe.source == "probe" else self.probe.source
            found = (
                f"; limit {self.probe.limit} within {self.probe.budget_bytes / 2**20:,.0f} MiB, found by "
                f"{how} in {self.probe.steps} steps and {self.probe.seconds:.1f} s"
            )
        silent = self.exactness is None or self.exactness.cause in ("exact", *INEXACT)
        measured = "" if silent else f"; exactness: {str(self.exactness).removesuffix('.')}"
        return f"{self.plan}{found}{measured}."

    @property
    def in_step(self) -> bool:
        """Whether the loader yields the recipe's batches, and they are cut in the step."""
        return self.options.micro_batching == "step" or isinstance(self._feed, PrebatchedSource)

    @property
    def feed(self) -> MicroBatchSource | PrebatchedSource:
        """The loader as it is cut."""
        assert self._feed is not None, "the training data are not set up yet"
        return self._feed

    def _begin(self, epoch: int) -> None:
        """Cut an epoch for training and tell the loops."""
        self._enter(epoch)
        self._arrange(epoch)
        self._begun, self._in_midst = (self.feed, epoch), False
        assert self.plan is not None
        self.gradients.begin_epoch(self._fed_at_most, known=not self.feed.counted_later)
        assert self._micro_batch is not None
        # Ranks count their pieces together where one of them has a limit, so all have one.
        if self.in_step and (self.feed.may_grow or self._cuts(epoch) or self.trainer.world_size > 1):
            self.oom_handler.limit = self._micro_batch
        if self._momenta is not None:
            self._momenta.rescale(self.plan.factor)
        dataloaders.resize_epoch(self.trainer, self.feed.length, at_most=self.feed.at_most)

    def _enter(self, epoch: int) -> None:
        """Keep count of the recipe's batches where one epoch follows another."""
        if epoch == self._position.epoch:
            return
        passed = self._epoch_batches()
        if passed is None:  # a stream: as many as it turned out to hold
            passed = self.feed.recipe_batches(self._position.samples_done // self.feed.sharded_ranks)
        before = self._position.batches_before + passed * (epoch - self._position.epoch)
        self._position = replace(self._position, epoch=epoch, samples_done=0, batches_before=before)

    def _arrange(self, epoch: int) -> None:
        """Cut an epoch; as whole windows while the micro-batch is not known, so that steps are counted rightly."""
        effective, known = self._effective(epoch), self._micro_batch
        whole = self.request.factor(epoch) is None
        done = self._position.samples_done if epoch == self._position.epoch else 0
        cut = self._recipe_batch(epoch) if self.in_step else known
        fed = self.feed.arrange(
            epoch,
            effective,
            cut or ((effective or self.feed.recipe_effective(epoch)) if whole else self._guess(epoch)),
            samples_done=done // self.feed.sharded_ranks,
            armed=known is not None,
        )
        self.trainer.accumulate_grad_batches = fed.factor
        self._fed_at_most = fed.micro_batch_size
        self.plan = cut_further(fed, micro_batch=known) if self.in_step and known else fed

    def _effective(self, epoch: int) -> int | None:
        asked = self.request.effective(epoch)
        if asked is not None:
            self.feed.check_effective(asked)
        micro_batch = self._recipe_batch(epoch) if self.in_step else self._micro_batch or self._guess(epoch)
        if self.feed.keeps_groups:
            micro_batch = min(micro_batch, self._recipe_batch(epoch))
        return self.request.effective_batch(epoch, micro_batch, self.trainer.world_size)

    def _guess(self, epoch: int) -> int:
        """The recipe's own micro-batch, or what the user fixed, until the limit is known."""
        return self.request.capped(self._recipe_batch(epoch))

    def _recipe_batch(self, epoch: int) -> int:
        """What the user's loader yields to a rank, at most."""
        share: int = self.recipe_factor * self.trainer.world_size
        return -(-self.feed.recipe_effective(epoch) // share)

    def _read_streams(self) -> None:
        """Look at what comes as it comes before training reads it: later there is nothing to look at."""
        if self.feed.streams and (self.in_step or self.options.on_oom == "split"):
            reader = self.oom_handler.retrier.reader("training")
            with hooks_apart(self.trainer):
                for on_host in (True, False):
                    reader.look(on_host=on_host)

    def _verify(self, epoch: int, limit: int) -> None:
        """Measure exactness on no more samples than the limit, if that is wanted."""
        if not self.options.verify or current_device() is not None:
            return
        try:
            verdicts = measure_exactness(
                self.trainer,
                self.feed.user_loader,
                self.feed.sample_indices(epoch)[: SAMPLES if self.feed.keeps_groups else None],
                reader=self.oom_handler.retrier.reader("training"),
                count=self.options.normalize if callable(self.options.normalize) else None,
                limit=limit,
                in_step=self.in_step,
            )
        except LayoutError as why:
            verdict = uncuttable(rounding(self.trainer), str(why))
            verdicts = Verdicts(verdict, verdict)
        self.exactness, self._splitting = verdicts.training, verdicts.splitting

    def _refuse_what_cannot_be_cut(self, epoch: int) -> None:
        """Before any work is lost: batches that are too large, and have no samples that could be told apart."""
        if not self.in_step or not self._cuts(epoch):
            return
        self.feed.check_cut()
        with hooks_apart(self.trainer):
            self.oom_handler.retrier.reader("training").check(lambda: self.feed.samples_at(0), on_host=True)
        if self._why_in_step:
            rank_zero_info(
                f"AutoAccumulate cuts batches in the training step, where they are too large. {self._why_in_step}"
            )

    def _frequencies_in_steps(self) -> dict[int, int]:
        """Frequencies of schedules by step, where the loop counts other batches than the recipe's."""
        found = intervals.frequencies_by_step(self.trainer)
        of_recipe = self.trainer.accumulate_grad_batches == self.recipe_factor
        if not found or self.in_step or (of_recipe and self._fed_at_most == self._recipe_batch(self._position.epoch)):
            return {}
        rank_zero_info(
            f"The frequency of schedules by step ({', '.join(map(str, found.values()))}) counts optimizer steps here, "
            "as batches of the loop are micro-batches."
        )
        return found

    def _cuts(self, epoch: int) -> bool:
        """Whether batches of the recipe have to be cut, or may have to be where they do not tell their samples."""
        assert self._micro_batch is not None
        return self._micro_batch < self.feed.largest_extent(self._recipe_batch(epoch))

    def _find_micro_batch(self, epoch: int) -> int:
        device = current_device()
        if self.request.micro_batch is not None and device is None:
            return self.request.capped(self.request.micro_batch)
        trainer, feed = self.trainer, self.feed
        total = feed.total(epoch)
        total = None if total is None else total * feed.sharded_ranks
        high = self.request.useful_limit(
            loops.training_epochs(trainer),
            recipe=feed.recipe_effective(epoch),
            total=total,
            world_size=trainer.world_size,
        )
        high = min(high, self._recipe_batch(epoch)) if self.in_step or feed.keeps_groups else high
        if evaluates_again(trainer.optimizers[0]):
            raise UserError(
                f"{type(trainer.optimizers[0]).__name__} keeps a history that grows over many steps, so that no trial "
                "of one step shows what it takes: give micro_batch_size=… to do without a probe."
            )
        share = -(-(self._effective(epoch) or feed.recipe_effective(epoch)) // trainer.world_size)
        if self._cannot_cut():
            return _NO_LIMIT
        looks, budget = feed.looks(epoch), self.options.budget
        if device is not None:
            self.probe = estimate(
                trainer,
                feed.user_loader,
                looks,
                device,
                high=high,
                rank_samples=share,
                budget=budget,
                extra_resident=self.oom_handler.memory,
            )
            return self.probe.limit
        self.probe = self._remembered(high)
        if self.probe is None:
            self._probe(looks, high=high, share=share, whole=self._recipe_batch(epoch) if self.in_step else None)
        if self.probe is None:
            return self._guess(epoch)
        found = min(high, self.probe.fastest or self.probe.limit)
        if total is None or self.request.factor(epoch) is not None or found * trainer.world_size < total:
            return found
        # No batch is larger than the epoch, whatever the window may hold.
        return self.request.capped(max(found, min(share, self._recipe_batch(epoch)) if self.in_step else share))

    def _probe(self, looks: ScanOrder, *, high: int, share: int, whole: int | None) -> None:
        """Look for the limit; there is none of data that are empty, or of steps that fail before training begins.

        What a step needs may be made ready by hooks that run later, and must not cost the run.
        """
        try:
            found = probe(
                self.trainer,
                self.feed.user_loader,
                looks,
                high=high,
                rank_samples=share,
                options=self.options,
                extra_resident=self.oom_handler.memory,
                batch_samples=whole,
                reader=self.oom_handler.retrier.reader("training"),
            )
        except Exception as error:
            memory = is_out_of_memory(error) or is_ambiguous_out_of_memory(error)
            if memory or isinstance(error, UserError) or agreement.is_distributed(self.trainer):
                raise  # ranks probe together or not at all
            failure = error
        else:
            self.probe, self._kind = found or (None, None)
            return
        rank_zero_warn(
            f"The probe found no limit, as a trial step ended in {type(failure).__name__}: {failure}. Training goes on "
            "with micro-batches as the recipe has them; give micro_batch_size=… to choose."
        )

    def _cannot_cut(self) -> bool:
        """Whether batches come ready-made and cannot be cut, so that none of another size can be tried.

        Raises:
            LayoutError: If they have to be cut all the same.
        """
        if not isinstance(self._feed, PrebatchedSource):
            return False
        try:
            _ = self._feed.user_loader
        except LayoutError:
            if self.options.budget is not None or self.request.most is not None:
                raise
            return True
        return False

    def _remembered(self, high: int) -> ProbeResult | None:
        """The limit of the run that wrote the checkpoint, if it was found on this hardware and is high enough."""
        kept = self._restored
        if kept is None or kept.probe is None or not self._on_hardware_of(kept):
            return None
        reason = outdated(kept.probe, kept.probe.budget_bytes, high)
        return None if reason else replace(kept.probe, source="checkpoint", steps=0, seconds=0.0)

    def _proved_too_much_before(self) -> int | None:
        """The limit of a restored run that memory ran out in, on this hardware."""
        kept = self._restored
        return kept.limit if kept is not None and self._on_hardware_of(kept) else None

    def _on_hardware_of(self, kept: RunState) -> bool:
        """Whether all ranks run on what the first rank of a restored run had: they probe together or not at all."""
        same = kept.hardware == hardware(self.trainer, self.options.budget)
        return agreement.smallest_over_ranks(self.trainer, int(same)) == 1

    def _lower(self) -> None:
        """Between two epochs: what proved too much on any rank is not planned any more."""
        limit = agreement.smallest_over_ranks(self.trainer, self.oom_handler.limit or _NO_LIMIT)
        if self._micro_batch is None or limit >= self._micro_batch:
            return
        self._micro_batch = limit
        self.oom_handler.limit = limit
        if self.probe is not None:
            self.probe = lowered(self.probe, limit)
            if self._kind is not None and self.options.cache:
                LimitCache().write(self._kind, self.probe)

    def _schedule_validation(self, index: int) -> None:
        before = self._position.batches_before
        done = [self.feed.batches_after(i) for i in (index - 1, index)]
        offset = before if self.trainer.check_val_every_n_epoch is None else 0
        intervals.validate_when_due(self.trainer, offset + done[0], offset + done[1], self._epoch_batches())

    def _epoch_batches(self) -> int | None:
        epoch = self._position.epoch
        total = self.feed.total(epoch)
        return None if total is None or self.feed.length is None else self.feed.recipe_batches(total)
