"""What stands between a Trainer and an out-of-memory error: where it is put in, and how it is taken out again."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_ga.batch.merge import merge_outputs
from lightning_ga.compat import agreement, closures, dataloaders, evaluation, loops, ranks
from lightning_ga.fit.closure import MakeClosure, MicroBatchClosures
from lightning_ga.fit.lbfgs import LbfgsWindow, evaluates_again
from lightning_ga.fit.messages import OomEvent
from lightning_ga.fit.oom_retry import BatchTask, OomRetrier, why_no_retries
from lightning_ga.fit.optimizer_retry import OptimizerRetry
from lightning_ga.fit.window_gradients import WindowGradients
from lightning_ga.loading.reader import (
    BatchSource,
    CollatedAgain,
    CollatedBatches,
    NoBatches,
    PreparedBatch,
    indices_of,
    is_collated,
)
from lightning_ga.loading.samples import collect_samples
from lightning_ga.memory.allocator import RetryWatch


class OomReporter:
    """Counts what was survived, and tells of it: a warning, and a value in the loggers.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.events = 0

    def __call__(self, event: OomEvent) -> None:
        """An error was survived, on this rank."""
        self.events += 1
        rank = f"Rank {self._trainer.global_rank}: " if self._trainer.world_size > 1 else ""
        warnings.warn(f"{rank}{event}", stacklevel=2)
        for logger in self._trainer.loggers:
            logger.log_metrics({"oom_events": self.events}, step=self._trainer.global_step)


class OomHandler:
    """Lets batches of all stages run in pieces where they do not fit.

    Args:
        trainer: The Trainer.
        retries: Whether an out-of-memory error leads to a retry.
        report: Told of every error that was survived.
        source: What is known of the batches of training.
        verdict: Whether a training batch in parts has the gradient of the whole, in a sentence.
        samples_again: Fetches the samples of the batch that is trained on again, where they are at hand.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        retries: bool,
        report: Callable[[OomEvent], None],
        source: Callable[[], BatchSource] = NoBatches,
        verdict: Callable[[], str] = str,
        samples_again: Callable[[], CollatedAgain | None] = lambda: None,
    ) -> None:
        self._trainer = trainer
        self._wanted = retries
        self._told = report
        self._source, self._verdict, self._samples_again = source, verdict, samples_again
        self._evaluated: Any = None  # the batch of an evaluation loop
        self.retrier = OomRetrier(
            trainer,
            retries=retries and not agreement.is_sharded(trainer),
            report=self._report,
            source=self._source_of,
            verdict=lambda stage: verdict() if stage == "training" else "What they log and return is put together.",
        )
        if retries and agreement.is_sharded(trainer):
            self.retrier.refusal = why_no_retries(trainer)
        self._steps: MicroBatchClosures | None = None
        self._retries = RetryWatch(trainer.strategy.root_device)
        self._release_step: Callable[[], None] = lambda: None

    @property
    def limit(self) -> int | None:
        """Most samples of a pass in training, where that is less than a batch."""
        return self.retrier.limits.get("training")

    @limit.setter
    def limit(self, samples: int) -> None:
        self.retrier.limits["training"] = samples

    def watch_batches(self) -> None:
        """Guard evaluation, and the way of every batch to the device."""
        evaluation.intercept_evaluation(self._trainer, self._evaluate, self.retrier.move)

    def memory(self) -> Iterator[torch.Tensor]:
        """What it holds on the device while training runs."""
        if self.retrier.retries:
            yield from self.retrier.state.tensors()

    def watch_training(self, gradients: WindowGradients, *, in_step: bool) -> None:
        """Guard training from here on; ``in_step``: batches are cut there even if nothing fails."""
        trainer = self._trainer
        retrier = self.retrier
        retrier.read_module()
        reason = why_no_retries(trainer)
        retrier.refusal = reason if self._wanted else None
        retrier.retries = self._wanted and reason is None
        wrap: Callable[..., Any] | None = None
        if self._wanted or in_step or ranks.needs_averaging_by_hand(trainer):
            by_hand = agreement.is_distributed(trainer) and reason is None
            if by_hand:
                ranks.take_over(trainer)
            elif agreement.is_distributed(trainer) and (
                agreement.is_sharded(trainer) or ranks.waits_in_forward(trainer)
            ):
                retrier.waiting.add("training")
            retrier.unknown = {"training"} if in_step and agreement.is_distributed(trainer) else set()
            self._steps = MicroBatchClosures(
                trainer, retrier, gradients, by_hand=by_hand, samples_again=self._samples_again
            )
            wrap = self._steps.closure
        if evaluates_again(trainer.optimizers[0]):
            wrap = _chained(LbfgsWindow(trainer, gradients).closure, wrap)
        elif self.retrier.retries:
            repeatable = OptimizerRetry(trainer, self._report)
            self._release_step = closures.intercept_optimizer_step(trainer, repeatable, repeatable.gradients_are_ready)
        if wrap is not None:
            closures.intercept_closures(trainer, wrap)

    def _report(self, event: OomEvent) -> None:
        """Memory ran out, which the allocator's counts show too: that was no struggle."""
        self._retries.begin_again()
        self._told(event)

    def expect(self, samples: int | None) -> None:
        """Before each micro-batch: how many samples it should hold, if that is known."""
        if self._steps is not None:
            self._steps.expected = samples

    def after_window(self, micro_batch: int) -> None:
        """Between two windows: where the allocator struggles with passes of this size, smaller ones from here on."""
        if not self.retrier.retries or not self._retries.struggles() or micro_batch == 1:
            return
        self.limit = min(self.limit or micro_batch, max(1, micro_batch * 15 // 16))
        warnings.warn(
            f"The allocator had to free its cache to go on with {micro_batch} samples, which is slow and may end in an "
            f"out-of-memory error: from now on no pass has more than {self.limit}.",
            stacklevel=2,
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within, nothing is caught: a probe wants to see its own errors."""
        self.retrier.active = False
        try:
            yield
        finally:
            self.retrier.active = True

    def stop_training(self) -> None:
        """Give the training loop its own ways back."""
        closures.release_closures(self._trainer)
        self._release_step()

    def stop(self) -> None:
        """Take everything out."""
        self.stop_training()
        evaluation.release_evaluation(self._trainer)

    def _evaluate(self, name: str, step: Callable[..., Any], *arguments: Any) -> Any:
        """A step of an evaluation loop."""
        retrier = self.retrier
        self._retries.begin_again()  # evaluation has a limit of its own
        guarded = retrier.active and (retrier.retries or retrier.refusal is not None)
        if not guarded or closures.takes_an_iterator(self._trainer.lightning_module, name):
            return step(*arguments)
        if retrier.retries:
            ranks.share_buffers_before_forward(self._trainer)
        batch, *rest = arguments  # the number of the batch, and that of its loader where there are several
        loader = rest[1] if len(rest) > 1 else 0
        self._evaluated = batch
        job = BatchTask(
            batch,
            loops.stage(self._trainer),
            lambda part, _: step(part, *rest),
            loader=loader,
            again=lambda: self._evaluated_again(rest[0], loader),
        )
        done = retrier.run(job)
        self._evaluated = None
        return merge_outputs(done.results, done.sizes) if done.sizes else done.results[0]

    def _evaluated_again(self, number: int, loader: int) -> CollatedAgain | None:
        """The samples of a batch of an evaluation loop, fetched again."""
        (user_loader, *others), _ = dataloaders.evaluation_loaders(self._trainer, loader)
        if others or not is_collated(user_loader) or isinstance(user_loader.dataset, IterableDataset):
            return None
        indices = next(islice(user_loader.batch_sampler, number, None), None)
        return None if indices is None else CollatedAgain(user_loader, collect_samples(user_loader, list(indices)))

    def _source_of(self, stage: str, loader: int) -> BatchSource:
        """What is known of the batches of a stage's loader."""
        if stage == "training":
            return self._source()
        loaders, combine = dataloaders.evaluation_loaders(self._trainer, loader)
        if all(map(is_collated, loaders)):
            return CollatedBatches(loaders, [partial(indices_of, part) for part in loaders], combine)
        return PreparedBatch(lambda: self._evaluated)


def _chained(outer: Callable[..., Any], inner: Callable[..., Any] | None) -> Callable[..., Any]:
    """Closures of ``outer`` that are made of those of ``inner``."""
    if inner is None:
        return outer

    def wrap(make: MakeClosure, *given: Any) -> Any:
        return outer(partial(inner, make), *given)

    return wrap
