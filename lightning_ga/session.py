"""One fit: the loader it is fed by, the plan of its epochs, its weights and its place in the data."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from lightning_ga import seams
from lightning_ga.feed import Feed
from lightning_ga.loaders import count_samples
from lightning_ga.plan import AccumulationPlan
from lightning_ga.probe import hardware, probe
from lightning_ga.request import Budget, Request
from lightning_ga.search import ProbeResult
from lightning_ga.state import Position, RunState
from lightning_ga.weights import KnownWindow, LateWindow

Normalize = Literal["samples"] | Callable[[Any], Any] | None


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
        self.normalize = normalize
        self.recipe_factor: int = trainer.accumulate_grad_batches
        self.plan: AccumulationPlan | None = None
        self.probe: ProbeResult | None = None
        self.weight = 1.0
        self._position = Position(seams.shared_seed(trainer), seams.training_epoch(trainer), 0, 0)
        self._restored: RunState | None = None
        self._feed: Feed | None = None
        self._micro_batch: int | None = None  # known once training starts
        self._weights: KnownWindow | LateWindow | None = None
        self._held: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []
        self._sparse = sparse_parameters(trainer.lightning_module)

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

    # --- weights -------------------------------------------------------------------------------

    def weigh(self, batch: Any) -> None:
        """Set the weight of the micro-batch that is about to be trained on."""
        if self._weights is None:
            return
        index, factor = seams.micro_batch_index(self.trainer), self.trainer.accumulate_grad_batches
        chunk = self.feed.chunk(index)
        self.weight = self._weights.weigh(
            self._count(batch, chunk.count) if chunk.count else 0,
            window=chunk.window_samples * self.feed.ranks_apart,
            factor=factor,
            first=index % factor == 0,
        )

    def apply_weight(self, loss: torch.Tensor) -> None:
        """Let the backward pass of the micro-batch weigh as much, and keep a weightless one out altogether."""
        if self._weights is not None:
            self._weights.trained()
        if self.weight != 1.0:
            weight = self.weight
            loss.register_hook(lambda gradient: gradient * weight)
        if self.weight == 0.0 and not (seams.is_distributed(self.trainer) and seams.window_is_over(self.trainer)):
            # A mean over nothing is NaN, and 0 × NaN too. Ranks that reduce must leave gradients where they are.
            self._held = [(p, p.grad) for group in self.trainer.optimizers[0].param_groups for p in group["params"]]
            for parameter, _ in self._held:
                parameter.grad = None

    def settle_gradients(self) -> None:
        """After each backward pass: put held gradients back, and keep sparse ones from growing with the factor."""
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held = []
        for parameter in self._sparse:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()

    def close_window(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients of a window to the mean over what turned out to be in it."""
        scale = 1.0 if self._weights is None else self._weights.close(self.trainer.accumulate_grad_batches)
        if scale != 1.0:
            scale_gradients(optimizer, scale)

    def _count(self, batch: Any, expected: int) -> float:
        if self.normalize != "samples":
            return float(self.normalize(batch))
        return count_samples(batch, expected=expected) if self.feed.counted_later else expected

    def _new_weights(self) -> KnownWindow | LateWindow | None:
        world_size, sum_over_ranks = self.trainer.world_size, partial(seams.sum_over_ranks, self.trainer)
        if self.normalize is None:
            return None
        if self.normalize != "samples":
            return LateWindow(world_size, sum_over_ranks=sum_over_ranks)
        if self.feed.counted_later:
            assert self.plan is not None
            return LateWindow(world_size, sum_over_ranks=sum_over_ranks, reference=self.plan.micro_batch_size)
        return KnownWindow(world_size)

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
        if self._weights is None or self.feed.counted_later:
            self._weights = self._new_weights()
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


def sparse_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Weights of embeddings that ask for sparse gradients."""
    return [part.weight for part in module.modules() if getattr(part, "sparse", False) and hasattr(part, "weight")]


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Scale all gradients in place; sparse ones stay sparse and coalesced."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                (parameter.grad._values() if parameter.grad.is_sparse else parameter.grad).mul_(scale)
