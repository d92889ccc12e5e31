"""Run the batches of a Trainer so that memory running out costs a retry: whole if they fit, else in pieces.

A batch is tried whole, or, where it is known to be too large, in near-equal pieces (``piecewise``). What
runs out of memory is undone (``attempt``) and tried again in halves; what it logs is logged once
(``log_buffer``). Here is what training and evaluation share; what is special to training is in ``closure``.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from lightning_ga.compat import agreement, log_capture, loops, transfer
from lightning_ga.fit.attempt import AttemptRunner
from lightning_ga.fit.batch_readers import BatchReaders
from lightning_ga.fit.batch_task import BatchResult, BatchTask
from lightning_ga.fit.log_buffer import LogBuffer
from lightning_ga.fit.messages import (
    HOOKS_APART,
    SAME_BUT_RANDOM,
    SKIPPED,
    OomEvent,
    fewer_samples_than_ranks,
)
from lightning_ga.fit.piecewise import PiecewiseRun
from lightning_ga.fit.retry_policy import RetryPolicy
from lightning_ga.loading.batch_source import BatchSource
from lightning_ga.memory.oom import Attempt
from lightning_ga.plan.exactness import SAME_RESULT
from lightning_ga.snapshot.random_numbers import RandomState

LOOKS = 3


class OomRetrier:
    """Runs batches, whole or in pieces, and knows how large a piece of each stage may be.

    Args:
        trainer: The Trainer.
        policy: What an out-of-memory error leads to.
        report: Told of every error that was survived.
        source: Says what is known of the batches of a loader, by its stage and number.
        verdict: Says in a sentence whether a batch in pieces gives the same result, by its stage.
        samples_of_next: Says how many samples the next batch of training should hold, where that is known.
    """

    def __init__(
        self,
        trainer: Any,
        policy: RetryPolicy,
        *,
        report: Callable[[OomEvent], None],
        source: Callable[[str, int], BatchSource],
        verdict: Callable[[str], str],
        samples_of_next: Callable[[Any], int | None],
    ) -> None:
        self._trainer = trainer
        self._report, self._verdict, self._samples_of_next = report, verdict, samples_of_next
        self.attempts = AttemptRunner(trainer, policy)  # runs and undoes attempts
        self.readers = BatchReaders(trainer, self.attempts, source)  # count and cut batches
        self._limits: dict[str, int] = {}  # most samples of a piece, by stage
        self._looks = LOOKS  # batches before which parts are looked for that steps may have added
        self._unmovable: set[str] = set()  # stages in which there was no memory for the hooks of a transfer
        self._move: Callable[[Any], Any] | None = None  # of pieces, while the current batch stays on the host
        self._not_moved: Exception | None = None  # why it does, if memory ran out

    @property
    def policy(self) -> RetryPolicy:
        """What an out-of-memory error leads to."""
        return self.attempts.policy

    @property
    def on_host(self) -> bool:
        """Whether the current batch stays on the host, to be moved in pieces."""
        return self._move is not None

    @property
    def move_of_pieces(self) -> Callable[[Any], Any] | None:
        """What moves the pieces of the current batch to the device; ``None`` if it is there."""
        return self._move

    def move_pieces(self, move: Callable[[Any], Any] | None) -> None:
        """Go on with a batch that was current before, whose pieces are moved so."""
        self._move = move

    def limit(self, stage: str) -> int | None:
        """Return the most samples of a piece; ``None`` where whole batches are tried."""
        return self._limits.get(stage)

    def lower(self, stage: str, samples: int) -> None:
        """Run no more samples at once from here on."""
        self._limits[stage] = min(samples, self._limits.get(stage, samples))

    def memory(self) -> Iterator[Tensor]:
        """Yield what is kept on the device while batches run."""
        if self.policy.retries:
            yield from self.attempts.state.tensors()

    def run(self, task: BatchTask) -> BatchResult:
        """Run a batch, whole if that is not known to be too much.

        Raises:
            UserError: If one sample alone does not fit, or the batch cannot be split.
        """
        if task.is_first:
            self._looks = LOOKS
        if self._looks:
            self._looks -= 1
            self.attempts.look_for_parts()
        ledger = LogBuffer()
        results = log_capture.hold_back(self._trainer, task.stage, ledger.note)
        try:
            done = self._run(task, ledger)
            if ledger.noted:
                ledger.replay(partial(log_capture.log, results), self.attempts.again_if_memory_runs_out)
        finally:
            log_capture.let_go(results)
        self.attempts.ran(task.stage)
        self._move = self._not_moved = None
        return done

    def move(self, move: Callable[[Any], Any], batch: Any, loader: int = 0) -> Any:
        """Move a batch to the device; one that is too large stays on the host and is moved in pieces.

        Where hooks of the user make something of a batch on its way, they are given all of it, as long
        as there is memory for that: so callbacks and the step find what they expect.
        """
        self._move = self._not_moved = None
        if not self.attempts.is_active:
            return move(batch)
        stage = loops.stage(self._trainer)
        if self._limits and self._stays_on_host(batch, stage, loader):
            self._move = move
            return batch
        before = RandomState() if self._hooks_move_batches and self.policy.retries else None
        moved = self.attempts.attempt(stage, partial(move, batch))
        if moved.failure is None:
            return moved.result
        if before is not None:  # they may draw numbers
            before.restore()
            self._unmovable.add(stage)
        self._move, self._not_moved = move, moved.failure
        return batch

    @cached_property
    def _hooks_move_batches(self) -> bool:
        """Whether hooks of the user make something of a batch on its way to the device."""
        return transfer.hooks_move_batches(self._trainer)

    def _stays_on_host(self, batch: Any, stage: str, loader: int) -> bool:
        limit = self._limits.get(stage)
        if limit is None or (self._hooks_move_batches and stage not in self._unmovable):
            return False
        expected = self._samples_of_next(batch) if stage == "training" else None
        return self.readers.count(batch, stage, expected, loader, on_host=True) > limit

    def _samples(self, task: BatchTask) -> int:
        return self.readers.count(task.batch, task.stage, task.expected, task.loader, on_host=self.on_host)

    def _pieces_of_all_ranks(self, task: BatchTask, limit: int) -> int | None:
        """Return how many pieces every rank runs, where they wait for each other; ``None``: each as it likes."""
        if not self.attempts.may_wait_for_others(task.stage):
            return None
        samples = self._samples(task)
        pieces = agreement.largest_over_ranks(self._trainer, -(-samples // limit))
        if pieces <= samples:
            return pieces
        if not self.attempts.waits_for_others(task.stage):
            return None
        raise self.attempts.told(fewer_samples_than_ranks(pieces, samples))

    def _run(self, task: BatchTask, ledger: LogBuffer) -> BatchResult:
        limit, pieces, fits, failure = self._limits.get(task.stage), None, True, self._not_moved
        if limit is not None:
            pieces = self._pieces_of_all_ranks(task, limit)
            fits = self._samples(task) <= limit if pieces is None else pieces == 1
        if fits and self._move is None:
            ran = self._whole(task, ledger)
            if ran.failure is None:
                return BatchResult((ran.result,))
            failure = ran.failure
        made = PiecewiseRun(self.attempts, self.readers, task, ledger, move=self._move, failure=failure)
        result = made.run(limit, pieces)
        self._learn_limit(task.stage, result)
        return result

    def _whole(self, task: BatchTask, ledger: LogBuffer) -> Attempt:
        """Run the batch as it is."""
        attempts, tried = self.attempts, task.attempt(None, from_start=task.may_begin_again)

        def run() -> Any:
            attempts.take(task.batch, anew=not task.within_window)
            return tried(task.batch)

        ran = attempts.attempt(task.stage, run)
        if ran.failure is not None:
            ledger.drop()
            attempts.undo(task.stage, tried.undo, ran.failure)
            return ran
        attempts.learn()
        if ledger.noted:
            ledger.keep(1.0)
        return ran

    def _learn_limit(self, stage: str, result: BatchResult) -> None:
        """Where memory ran out, the largest piece that fits is the limit from now on."""
        if not result.refused:
            return
        fits, attempts = result.largest_that_fits(), self.attempts
        self.lower(stage, fits)
        verdict = self._result_of(stage, result)
        step = self._trainer.global_step
        refused, left = min(result.refused), attempts.pop_left()
        self._report(OomEvent(stage, step, refused, fits, attempts.memory(), verdict, left))

    def _result_of(self, stage: str, result: BatchResult) -> str:
        """Say whether a batch in pieces gives the same result."""
        if stage == "training" and result.skips_some:
            return SKIPPED
        if self.on_host and self._hooks_move_batches:
            return HOOKS_APART
        verdict = self._verdict(stage)
        return SAME_BUT_RANDOM if verdict == SAME_RESULT and result.draws else verdict
