"""Install survival of out-of-memory errors in a Trainer, and take it out again."""

import warnings
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

from lightning_ga.compat import closures, ranks, transfer
from lightning_ga.compat.reduction import GradientReducer
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.evaluation import EvaluationBatches, evaluate
from lightning_ga.fit.messages import OomEvent, in_the_update
from lightning_ga.fit.retry_policy import Ranks
from lightning_ga.fit.training_batches import TrainingBatches
from lightning_ga.fit.window import TrainingWindow
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.loading.training_source import TrainingSource
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

    Without ``retries`` an out-of-memory error ends the run: only batches that are known to be too large run in pieces.
    ``batches`` are those of training, if there is any.
    """

    def __init__(
        self, trainer: Any, *, retries: bool, reporter: OomReporter, batches: TrainingBatches | None = None
    ) -> None:
        self._trainer, self._wanted, self.reporter, self._batches = trainer, retries, reporter, batches
        self.evaluation = EvaluationBatches(trainer)
        policy = Ranks.of(trainer).in_evaluation(wanted=retries)
        self.engine = Engine(trainer, policy, report=self._report, training=batches, evaluation=self.evaluation)
        self.window: TrainingWindow | None = None
        self._untold: list[Callable[[], OomEvent]] = []
        self._retries = RetryWatch(trainer.strategy.root_device)
        self._held, self._training_held = ExitStack(), ExitStack()  # what is to be given back, and what after training
        self._held.enter_context(transfer.intercepted_evaluation(trainer, self._evaluate, self.engine.to_device))

    def read_module(self, source: TrainingSource) -> None:
        """Look at the module anew, as it has been moved, and make what training keeps on the device."""
        trainer, engine = self._trainer, self.engine
        must_average = ranks.needs_averaging_by_hand(trainer)
        engine.read_module()
        engine.policy = Ranks.of(trainer).in_training(
            wanted=self._wanted, cut_in_step=source.cut_in_step, must_average=must_average
        )
        engine.reducer = GradientReducer(ranks.distributed_module(trainer)) if engine.policy.by_hand else None

    def watch_training(self, source: TrainingSource, gradients: WindowGradients, changing: Collection[str]) -> None:
        """Guard training from here on; its step is known to change the tensors with the names ``changing``."""
        trainer, engine = self._trainer, self.engine
        if engine.policy.by_hand:
            ranks.take_over(trainer)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        names = {name for name, parameter in trainer.lightning_module.named_parameters() if id(parameter) in updated}
        engine.read_module(frozenset(changing) - names)
        if engine.policy.lockstep:
            engine.lockstep.add("training")
        engine.undecided = {"training"} if engine.policy.undecided else set()
        # Windows may hold micro-batches without a sample, which are not to be run.
        fills_up = source.keeps_groups and not source.cut_in_step
        cuts = self._wanted or source.cut_in_step
        if self._batches is not None and (cuts or fills_up or engine.reducer is not None):
            self.window = TrainingWindow(trainer, engine, gradients, self._batches, engine.reducer, fills_up=fills_up)
            self._training_held.enter_context(closures.intercepted_closures(trainer, self.window.closure))

    @property
    def has_events(self) -> bool:
        """Whether memory has run out in training, and the user does not know it yet."""
        return bool(self._untold)

    def tell(self, *, was_measured: bool = False) -> None:
        """Report what was survived in training, once it is known whether the result is the same."""
        if was_measured:  # which may have run out of memory too
            self._retries.begin_again()
        events, self._untold = self._untold, []
        for event in events:
            self.reporter(event())

    def after_batch(self, micro_batch: int, *, window_is_over: bool) -> None:
        """Plan smaller passes between two windows if the allocator struggles with passes of this size."""
        if self.window is not None:
            self.window.is_updating = False
        if not window_is_over or not self.engine.policy.retries or micro_batch == 1 or not self._retries.struggles():
            return
        self.engine.lower("training", max(1, micro_batch * 15 // 16))
        warnings.warn(
            f"The allocator had to free its cache to go on with {micro_batch} samples, which is slow and may end in an "
            f"out-of-memory error: from now on no pass has more than {self.engine.limit('training')}.",
            stacklevel=2,
        )

    def explain(self, error: BaseException) -> None:
        """Add a note to an out-of-memory error that nothing could be done about: where it was, and the way out."""
        self.tell()
        if is_out_of_memory(error) and self.window is not None and self.window.is_updating:
            error.add_note(in_the_update(self.engine.memory()))

    def stop_training(self) -> None:
        """Give the training loop its own ways back."""
        self.tell()
        self._training_held.close()

    def stop(self) -> None:
        """Take everything out."""
        self.stop_training()
        self.engine.stop()
        self._held.close()

    def _report(self, stage: str, event: Callable[[], OomEvent]) -> None:
        """Note that memory ran out, which the allocator's counts show too: that was no struggle."""
        self._retries.begin_again()
        self._untold.append(event)
        if stage != "training":
            self.tell()

    def _evaluate(self, name: str, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run a step of an evaluation loop."""
        self._retries.begin_again()  # evaluation has a limit of its own
        return evaluate(self.engine, self.evaluation, name, step, *arguments)
