"""One fit: the loader it is fed by, the plan of its epochs, its weights and its place in the data."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_ga import seams
from lightning_ga.feed import Feed
from lightning_ga.gradients import Normalize, WindowGradients
from lightning_ga.plan import AccumulationPlan
from lightning_ga.probe import hardware, probe
from lightning_ga.request import Budget, Request
from lightning_ga.search import ProbeResult
from lightning_ga.state import Position, RunState


class Session:
    """What lives from ``setup`` to ``teardown`` of one fit.

    Args:
        trainer: The Trainer, with its strategy's environment set up.
        request: What the user asked for.
        budget: ``memory_budget`` as the user wrote it.
        normalize: What micro-batches are weighted by.
    """

    def __init__(self, trainer: Any, request: Request, budget: Budget, *, normalize: Normalize) -> None:
        self.trainer = trainer
        self.request = request
        self.budget = budget
        self.recipe_factor: int = trainer.accumulate_grad_batches
        self.plan: AccumulationPlan | None = None
        self.probe: ProbeResult | None = None
        self._position = Position(seams.shared_seed(trainer), seams.training_epoch(trainer), 0, 0)
        self._restored: RunState | None = None
        self._feed: Feed | None = None
        self._micro_batch: int | None = None  # known once training starts
        self.gradients = WindowGradients(trainer, normalize)

    # --- data ----------------------------------------------------------------------------------

    def cut(self, loader: Any) -> Any:
        """The user's loader, cut into micro-batches; it yields none before the micro-batch is known."""
        trainer = self.trainer
        self._feed = Feed(
            loader,
            recipe_factor=self.recipe_factor,
            world_size=trainer.world_size,
            rank=trainer.global_rank,
            seed=self._position.seed,
            limit_batches=self._limit_batches,
            shard=self._shard,
            shuffle=not trainer.overfit_batches,
        )
        self._arrange(seams.training_epoch(trainer))
        return self._feed.loader

    def set_up_data(self, set_up: Callable[[], None]) -> None:
        """Let the loop set its data up, with the recipe's limits read in the recipe's batches."""
        trainer = self.trainer
        self._limit_batches, self._shard = trainer.limit_train_batches, seams.shards_data(trainer)
        known = self._feed
        with seams.micro_batch_units(trainer):
            set_up()
        if self._feed is not None and self._feed is not known:
            seams.check_validation_interval(trainer, self._epoch_batches())
            seams.resize_epoch(trainer, self._feed.length)

    # --- epochs --------------------------------------------------------------------------------

    def start(self) -> None:
        """Find the micro-batch and begin with it, where a restored run left off."""
        trainer, epoch = self.trainer, seams.training_epoch(self.trainer)
        same_epoch = self._restored is not None and self._position.epoch == epoch
        if not same_epoch:
            self._position = replace(self._position, epoch=epoch, samples_done=0)
        self._micro_batch = self._find_micro_batch(epoch)
        self._begin(epoch)
        if seams.restarts_in_epoch(trainer):
            done = self.feed.epoch_plan.done
            seams.expect_positions_to_be_kept()
            seams.move_to_micro_batch(trainer, done, same_epoch=same_epoch)
            if done:
                self._schedule_validation(done - 1)
            seams.align_logger_steps(trainer)
        seams.iterate_again(trainer)

    def start_epoch(self) -> None:
        """Cut the next epoch as its schedule says; the loop iterates it anew."""
        epoch = seams.training_epoch(self.trainer)
        if self.feed.epoch != epoch:
            self._begin(epoch)

    def advance(self) -> None:
        """After each micro-batch: keep the position, and let validation run when the recipe says."""
        index = seams.micro_batch_index(self.trainer)
        if seams.window_is_over(self.trainer):
            done = self.feed.chunk(index).window_end * self.feed.ranks_apart
            self._position = replace(self._position, samples_done=done)
        self._schedule_validation(index)

    def weigh(self, batch: Any) -> None:
        """Set the weight of the micro-batch that is about to be trained on."""
        chunk = self.feed.chunk(seams.micro_batch_index(self.trainer))
        known = not self.feed.counted_later
        self.gradients.weigh(batch, chunk, ranks_apart=self.feed.ranks_apart, known=known)

    # --- records -------------------------------------------------------------------------------

    def state(self) -> RunState:
        """What a checkpoint keeps."""
        return RunState(self._position, hardware(self.trainer, self.budget), self.probe)

    def restore(self, state: RunState) -> None:
        """Go on where a checkpoint was written."""
        self._restored, self._position = state, state.position

    def summary(self) -> str:
        """Plan and probe in one line."""
        found = ""
        if self.probe is not None:
            found = (
                f"; limit {self.probe.limit} within {self.probe.budget_bytes / 2**20:,.0f} MiB, found by "
                f"{self.probe.method} in {self.probe.steps} steps and {self.probe.seconds:.1f} s"
            )
        return f"{self.plan}{found}."

    @property
    def feed(self) -> Feed:
        """The loader as it is cut."""
        assert self._feed is not None, "the training data are not set up yet"
        return self._feed

    def _begin(self, epoch: int) -> None:
        """Cut an epoch for training and tell the loops."""
        if epoch != self._position.epoch:
            before = self._position.batches_before + (self._epoch_batches() or 0)
            self._position = replace(self._position, epoch=epoch, samples_done=0, batches_before=before)
        self._arrange(epoch)
        assert self.plan is not None
        self.trainer.accumulate_grad_batches = self.plan.factor
        self.gradients.begin_epoch(self.plan.micro_batch_size, known=not self.feed.counted_later)
        seams.resize_epoch(self.trainer, self.feed.length)

    def _arrange(self, epoch: int) -> None:
        known = self._micro_batch
        world_size = self.trainer.world_size
        guess = self.request.capped(-(-self.feed.recipe_effective(epoch) // (self.recipe_factor * world_size)))
        effective = self.request.effective_batch(epoch, known or guess, world_size)
        if known is None and self.request.factor(epoch) is None:
            guess = effective or self.feed.recipe_effective(epoch)  # whole windows: the right count of optimizer steps
        done = self._position.samples_done if epoch == self._position.epoch else 0
        self.plan = self.feed.arrange(
            epoch,
            effective,
            known or guess,
            samples_done=done // self.feed.ranks_apart,
            armed=known is not None,
        )
        if known is None:
            self.trainer.accumulate_grad_batches = self.plan.factor

    def _find_micro_batch(self, epoch: int) -> int:
        if self.request.micro_batch is not None:
            return self.request.capped(self.request.micro_batch)
        trainer, feed = self.trainer, self.feed
        total = feed.total(epoch)
        high = self.request.useful_limit(
            seams.training_epochs(trainer),
            recipe=feed.recipe_effective(epoch),
            total=None if total is None else total * feed.ranks_apart,
            world_size=trainer.world_size,
        )
        self.probe = self._remembered(high) or probe(
            trainer, feed.user_loader, feed.sample_indices(epoch), high=high, budget=self.budget
        )
        return min(high, self.probe.limit)

    def _remembered(self, high: int) -> ProbeResult | None:
        """The limit of the run that wrote the checkpoint, if it was found on this hardware and is high enough."""
        kept = self._restored
        if kept is None or kept.probe is None or kept.hardware != hardware(self.trainer, self.budget):
            return None
        bounded = kept.probe.limit < high and all(trial.fits for trial in kept.probe.trials)
        return None if bounded else replace(kept.probe, method="checkpoint", steps=0, seconds=0.0)

    def _schedule_validation(self, index: int) -> None:
        plan, before = self.feed.epoch_plan, self._position.batches_before
        done = [self.feed.recipe_batches(plan.samples_after(i)) if i >= 0 else 0 for i in (index - 1, index)]
        offset = before if self.trainer.check_val_every_n_epoch is None else 0
        seams.validate_when_due(self.trainer, offset + done[0], offset + done[1], self._epoch_batches())

    def _epoch_batches(self) -> int | None:
        epoch = self._position.epoch
        total = self.feed.total(epoch)
        return None if total is None or self.feed.length is None else self.feed.recipe_batches(total)
