"""Install survival of out-of-memory errors in a Trainer, and take it out again."""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from lightning_ga.compat import agreement, closures, evaluation, ranks
from lightning_ga.compat.reduction import GradientReducer
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.evaluation import EvaluationBatches, evaluate
from lightning_ga.fit.messages import OomEvent, in_the_update
from lightning_ga.fit.retry_policy import RankFacts, RetryPolicy, evaluation_policy, training_policy
from lightning_ga.fit.training_batches import TrainingBatches
from lightning_ga.fit.window import TrainingWindow
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.loading.reader import BatchReader
from lightning_ga.memory.allocator import RetryWatch
from lightning_ga.memory.oom import is_out_of_memory


class OomReporter:
    """Counts the errors that were survived, and reports each: a warning, and a value in the loggers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.events = 0  # those before a resume too

    def count_on(self, events: int) -> None:
        """Count on from what a checkpoint says."""
        self.events = events

    def __call__(self, event: OomEvent) -> None:
        """An error was survived, on this rank."""
        self.events += 1
        rank = f"Rank {self._trainer.global_rank}: " if self._trainer.world_size > 1 else ""
        warnings.warn(f"{rank}{event}", stacklevel=2)
        for logger in self._trainer.loggers:
            logger.log_metrics({"oom_events": self.events}, step=self._trainer.global_step)


class OomHandler:
    """Installs what lets batches of all stages run in pieces if they do not fit.

    Args:
        trainer: The Trainer.
        retries: Whether the user wants an out-of-memory error to lead to a retry.
        report: Told of every error that was survived.
        batches: What is known of the batches of training; ``None`` without training.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        retries: bool,
        report: Callable[[OomEvent], None],
        batches: TrainingBatches | None = None,
    ) -> None:
        self._trainer, self._wanted, self._told, self._batches = trainer, retries, report, batches
        self.evaluation = EvaluationBatches(trainer)
        policy = evaluation_policy(rank_facts(trainer), wanted=retries)
        self.engine = Engine(trainer, policy, report=self._report, training=batches, evaluation=self.evaluation)
        self._reducer: GradientReducer | None = None  # if gradients are averaged over ranks by hand
        self.window: TrainingWindow | None = None
        self._retries = RetryWatch(trainer.strategy.root_device)
        self._held, self._training_held = ExitStack(), ExitStack()  # what is to be given back, and what after training

    @property
    def limit(self) -> int | None:
        """Most samples of a pass in training, if that is less than a batch."""
        return self.engine.limit("training")

    def lower(self, samples: int) -> None:
        """Run no more samples of training at once from here on."""
        self.engine.lower("training", samples)

    def reader(self) -> BatchReader:
        """Return what counts and cuts the batches of training."""
        return self.engine.readers.reader("training")

    def memory(self) -> Iterator[torch.Tensor]:
        """Yield what is kept on the device while training runs."""
        yield from self.engine.memory_kept()
        if self._reducer is not None:
            yield from self._reducer.memory()

    def read_module(self, *, cut_in_step: bool) -> None:
        """Look at the module anew, as it has been moved, and make what training keeps if batches are cut so."""
        self.engine.read_module()
        self._reducer = ranks.gradient_reducer(self._trainer) if self._policy(cut_in_step).by_hand else None

    def watch_batches(self) -> None:
        """Guard evaluation, and the way of every batch to the device."""
        self._held.enter_context(
            evaluation.intercepted_evaluation(self._trainer, self._evaluate, self.engine.to_device)
        )

    def watch_training(
        self, gradients: WindowGradients, *, cut_in_step: bool, fills_up: bool, changing: Collection[str]
    ) -> None:
        """Guard training from here on.

        Args:
            gradients: The weights of the window.
            cut_in_step: Whether batches are cut in the step even if nothing fails.
            fills_up: Whether windows may hold micro-batches without a sample that are not to be run.
            changing: Names of what the step is known to change.
        """
        trainer, engine = self._trainer, self.engine
        policy = self._policy(cut_in_step)
        if policy.by_hand:
            ranks.take_over(trainer)
            self._reducer = self._reducer or ranks.gradient_reducer(trainer)
        reducer = self._reducer if policy.by_hand else None
        engine.reducer, engine.policy = reducer, policy
        updated = {
            id(parameter)
            for optimizer in trainer.optimizers
            for g in optimizer.param_groups
            for parameter in g["params"]
        }
        names = {name for name, parameter in trainer.lightning_module.named_parameters() if id(parameter) in updated}
        engine.read_module(frozenset(changing) - names)
        engine.lockstep |= {"training"} if policy.lockstep else set()
        engine.undecided = {"training"} if policy.undecided else set()
        if self._batches is not None and (self._wanted or cut_in_step or fills_up or reducer is not None):
            self.window = TrainingWindow(trainer, engine, gradients, self._batches, reducer, fills_up=fills_up)
            self._training_held.enter_context(closures.intercepted_closures(trainer, self.window.closure))

    def _policy(self, cut_in_step: bool) -> RetryPolicy:
        must_average = ranks.needs_averaging_by_hand(self._trainer)
        return training_policy(
            rank_facts(self._trainer), wanted=self._wanted, cut_in_step=cut_in_step, must_average=must_average
        )

    def begin_epoch(self) -> None:
        """Look through the module again: parts may have been added."""
        if self.window is not None:
            self.window.begin_epoch()

    def after_batch(self, micro_batch: int, *, window_is_over: bool) -> None:
        """Plan smaller passes between two windows if the allocator struggles with passes of this size."""
        if self.window is not None:
            self.window.is_updating = False
        if not window_is_over or not self.engine.policy.retries or micro_batch == 1 or not self._retries.struggles():
            return
        self.lower(min(self.limit or micro_batch, max(1, micro_batch * 15 // 16)))
        warnings.warn(
            f"The allocator had to free its cache to go on with {micro_batch} samples, which is slow and may end in an "
            f"out-of-memory error: from now on no pass has more than {self.limit}.",
            stacklevel=2,
        )

    def explain(self, error: BaseException) -> None:
        """Add a note to an out-of-memory error that nothing could be done about: where it was, and the way out."""
        if is_out_of_memory(error) and self.window is not None and self.window.is_updating:
            error.add_note(in_the_update(self.engine.memory()))

    def stop_training(self) -> None:
        """Give the training loop its own ways back."""
        self._training_held.close()

    def stop(self) -> None:
        """Take everything out."""
        self.stop_training()
        self.engine.stop()
        self._held.close()

    def _report(self, event: OomEvent) -> None:
        """Note that memory ran out, which the allocator's counts show too: that was no struggle."""
        self._retries.begin_again()
        self._told(event)

    def _evaluate(self, name: str, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run a step of an evaluation loop."""
        self._retries.begin_again()  # evaluation has a limit of its own
        return evaluate(self.engine, self.evaluation, name, step, *arguments)


def rank_facts(trainer: Any) -> RankFacts:
    """Read off a Trainer how its ranks depend on each other."""
    distributed, sharded = agreement.is_distributed(trainer), agreement.is_sharded(trainer)
    return RankFacts(
        strategy=type(trainer.strategy).__name__,
        distributed=distributed,
        sharded=sharded,
        reduces_itself=distributed and not sharded and ranks.distributed_module(trainer) is None,
        waits_in_forward=None if sharded else ranks.waits_in_forward(trainer),
    )
