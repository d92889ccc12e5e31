"""Run one batch in pieces that fit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.errors import UserError
from lightning_ga.fit.attempt import AttemptRunner
from lightning_ga.fit.batch_metrics import whole_batch_metrics
from lightning_ga.fit.batch_readers import BatchReaders
from lightning_ga.fit.batch_task import BatchResult, BatchTask, TaskAttempt
from lightning_ga.fit.log_buffer import LogBuffer
from lightning_ga.fit.messages import a_piece_failed
from lightning_ga.fit.metric_calls import Call
from lightning_ga.fit.piece_buffer import PieceBuffer
from lightning_ga.fit.pieces import Again, Piece, even_pieces, run_pieces
from lightning_ga.loading.reader import BatchSlices
from lightning_ga.memory.oom import is_ambiguous_out_of_memory, is_out_of_memory, release
from lightning_ga.plan.accumulation import plan_accumulation, split_evenly
from lightning_ga.probe.fingerprint import describe_value


@dataclass(frozen=True, slots=True)
class _PieceError:
    """What a piece ended in, if not for want of memory."""

    error: Exception


class PiecewiseRun:
    """One batch that runs in pieces.

    Args:
        attempts: Runs attempts.
        readers: Cut batches.
        task: The batch.
        ledger: Where its pieces log.
        move: Moves a piece to the device; ``None`` if the batch is there.
        failure: The error that the whole batch ended in; ``None`` if it was not tried.
    """

    def __init__(
        self,
        attempts: AttemptRunner,
        readers: BatchReaders,
        task: BatchTask,
        ledger: LogBuffer,
        *,
        move: Callable[[Any], Any] | None,
        failure: Exception | None,
    ) -> None:
        self._attempts, self._readers, self._task, self._ledger = attempts, readers, task, ledger
        self._move, self._failure = move, failure
        self._calls = PieceBuffer[Call]()  # of metrics, which are made again for the whole batch
        self._refused: list[int] = []  # samples of the attempts that ran out of memory
        self._anew = not task.within_window or failure is not None  # whether all state is looked at anew
        self._draws = False
        # To keep what each piece may change takes longer than to run some again, once in a training.
        self._from_start = task.may_begin_again and attempts.knows_what_changes
        self._part: Any = task.batch  # what runs, or is cut
        self._slices = self._cut_batch()

    def run(self, limit: int | None, pieces: int | None) -> BatchResult:
        """Run the pieces, of no more samples than the limit, or as many as the ranks have agreed on.

        Raises:
            UserError: If one sample alone does not fit, or something cannot be undone.
        """
        samples = self._slices.samples
        if self._failure is not None:
            self._refuse(samples, self._failure)
        most = min([samples if limit is None else limit, *((size + 1) // 2 for size in self._refused)])
        sizes = plan_accumulation(samples, micro_batch=most).chunks[0]
        sizes = sizes if pieces is None else split_evenly(samples, pieces)
        metrics, again = self._attempts.state.metrics, self._attempts.again_if_memory_runs_out
        with whole_batch_metrics(metrics, again, self._calls):
            done = run_pieces(even_pieces(sizes), self._run_piece, from_start=self._from_start)
        results, weights = zip(*(ran for _, ran in done))
        sizes = tuple(piece.samples for piece, _ in done)
        return BatchResult(results, sizes, weights, tuple(self._refused), self._draws)

    def _run_piece(self, piece: Piece) -> tuple[Any, float] | Again | None:
        """Run one piece; return its result and what it weighs, or ``None`` if memory ran out."""
        task, attempts = self._task, self._attempts
        tried = task.attempt(piece, from_start=self._from_start)
        ran = attempts.attempt(task.stage, partial(self._run, tried, piece))
        if isinstance(ran.result, _PieceError):
            self._cut_otherwise(ran.result.error, piece, tried)
            return Again()
        if ran.failure is not None:
            self._drop(tried, ran.failure)
            self._failed(piece.samples, ran.failure)
            return None
        attempts.learn()
        if self._failure is not None:  # a step that failed before it came to wait for the others
            attempts.raise_if_others_wait(task.stage, self._failure)
            self._draws = self._draws or attempts.state.draws_numbers()
        result, weight = ran.result
        self._ledger.keep(weight, piece.samples)
        self._calls.keep(weight, piece.samples)
        return result, weight

    def _run(self, tried: TaskAttempt, piece: Piece) -> Any:
        """Cut a piece, keep what may change, and run it."""
        self._part = self._task.batch
        if piece.start == 0 or not self._from_start:
            self._attempts.take(self._part, anew=self._anew)
            self._anew = False
        self._part = part = self._slices.take(piece.start, piece.stop)
        try:
            weight = self._task.weigh(part, piece)
            return tried(part if self._move is None else self._move(part)), weight
        except Exception as error:
            if is_out_of_memory(error) or is_ambiguous_out_of_memory(error) or isinstance(error, UserError):
                raise
            return _PieceError(error)

    def _drop(self, tried: TaskAttempt, failure: Exception | None) -> None:
        """Forget what a failed piece logged, and undo what it changed."""
        self._ledger.drop(from_start=self._from_start)
        self._calls.drop(from_start=self._from_start)
        self._attempts.undo(self._task.stage, tried.undo, failure)

    def _failed(self, samples: int, failure: Exception) -> None:
        self._failure, self._anew = failure, True
        self._refuse(samples, failure)

    def _refuse(self, samples: int, failure: Exception) -> None:
        """Note that so many samples do not fit."""
        self._refused.append(samples)
        if samples > 1:
            return
        if is_ambiguous_out_of_memory(failure):
            raise failure
        told = self._attempts.out_of_memory(self._task.stage).one_sample_too_large(describe_value(self._part))
        raise self._attempts.told(told) from failure

    def _cut_batch(self) -> BatchSlices:
        """Read where the batch may be cut.

        Raises:
            UserError: If it cannot be cut, from the out-of-memory error that made it necessary.
        """
        task, on_host = self._task, self._move is not None
        reader = self._readers.reader(task.stage, task.loader)
        try:
            with self._readers.reading(reader, on_host=on_host):
                return reader.slices(task.batch, expected=task.expected, on_host=on_host, samples=task.again)
        except LayoutError as why:
            if self._failure is None:
                raise
            told = self._attempts.out_of_memory(task.stage).cannot_be_cut(str(why))
            raise self._attempts.told(told) from self._failure

    def _cut_otherwise(self, error: Exception, piece: Piece, tried: TaskAttempt) -> None:
        """Collate pieces anew after one has failed where nothing but its being a piece may be the cause.

        Raises:
            Exception: The piece's own, with a note, or a sentence from an out-of-memory error before it.
        """
        slices = self._collated_anew(error, tried)
        if slices is not None:
            self._slices = slices
            release(error)
            return
        stage, failure = self._task.stage, self._attempts.last_failure(self._task.stage)
        if failure is None:
            error.add_note(str(a_piece_failed(stage, piece, None, error)))
            raise error
        told = a_piece_failed(stage, piece, self._attempts.memory(), error)
        raise self._attempts.told(told) from failure

    def _collated_anew(self, error: Exception, tried: TaskAttempt) -> BatchSlices | None:
        task, on_host = self._task, self._move is not None
        reader = self._readers.reader(task.stage, task.loader)
        if not self._attempts.policy.retries or reader.collates_anew:
            return None
        self._drop(tried, self._failure)
        self._anew = True
        try:
            with self._readers.reading(reader, on_host=on_host, anew=True):
                again = task.again()
                return None if again is None else reader.collated_anew(task.batch, again, on_host=on_host)
        except LayoutError as why:
            error.add_note(str(why))
            return None
