"""Run the batches of a Trainer so that memory running out costs a retry: whole if they fit, else in pieces.

A batch is tried whole, or, where it is known to be too large, in near-equal pieces. What runs out of
memory is undone (``snapshot.attempt``) and tried again in halves (``attempts``); what it logs is logged once
(``log_buffer``). Here is what training and evaluation share; what is special to training is in
``closure``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import agreement, log_capture, loops, ranks, transfer
from lightning_ga.errors import UserError
from lightning_ga.fit.attempts import Outcome, Piece, even_pieces, run_pieces
from lightning_ga.fit.batch_metrics import whole_batch_metrics
from lightning_ga.fit.log_buffer import LogBuffer
from lightning_ga.fit.messages import (
    OomEvent,
    a_piece_failed,
    cannot_be_cut,
    cannot_run_again,
    changed_by_the_step,
    fewer_samples_than_ranks,
    of_rank,
    one_sample_too_large,
)
from lightning_ga.loading.reader import BatchReader, BatchSlices, BatchSource, CollatedAgain
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import is_ambiguous_out_of_memory, is_out_of_memory, release
from lightning_ga.plan.accumulation import plan_accumulation, split_evenly
from lightning_ga.probe.fingerprint import describe_value
from lightning_ga.probe.isolation import hooks_apart
from lightning_ga.snapshot.attempt import AttemptState
from lightning_ga.snapshot.state import RandomState


@dataclass(frozen=True, slots=True)
class BatchTask:
    """One batch and how it is run.

    Attributes:
        batch: The batch, whole.
        stage: What it is for: ``"training"``, ``"validation"``, ``"test"`` or ``"prediction"``.
        run: Runs some samples of it: the part of the batch, and which piece it is.
        expected: Samples that it should hold, where that is known.
        loader: Which of several loaders of its stage it comes from.
        weigh: What a piece weighs in means over the batch.
        failed: Undoes what an attempt at a piece changed beyond what all stages change.
        again: Fetches the samples of the batch again, where they are at hand.
    """

    batch: Any
    stage: str
    run: Callable[[Any, Piece | None], Any]
    expected: int | None = None
    loader: int = 0
    weigh: Callable[[Any, Piece], float] = lambda _, piece: float(piece.samples)
    failed: Callable[[Piece | None], None] = lambda _: None
    again: Callable[[], CollatedAgain | None] = lambda: None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a batch.

    Attributes:
        results: What the pieces returned; one result for a batch that ran whole.
        sizes: Samples of each piece; empty for a batch that ran whole.
        weights: What each weighs in means.
    """

    results: tuple[Any, ...]
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


class OomRetrier:
    """Runs batches, whole or in pieces.

    Args:
        trainer: The Trainer.
        retries: Whether an out-of-memory error leads to a retry.
        report: Told of every error that was survived.
        source: What is known of the batches of a loader, by its stage and number.
        verdict: Whether a batch that runs in pieces gives the same result, in a sentence, by its stage.

    Attributes:
        limits: Most samples of a piece, by stage; it falls for good when memory runs out.
        refusal: Why an out-of-memory error cannot lead to a retry, though that was asked for.
        waiting: Stages whose steps wait for other ranks: none of them may run more pieces than the others.
        unknown: Stages of which a first batch has to show whether they are of that kind.
        coming: How many samples the next batch of training should hold, where that is known.
        active: False while a probe runs: it wants to see its own errors.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        retries: bool,
        report: Callable[[OomEvent], None],
        source: Callable[[str, int], BatchSource],
        verdict: Callable[[str], str],
    ) -> None:
        self._trainer = trainer
        self._source, self._verdict = source, verdict
        self.retries = retries
        self.active = True
        self.limits: dict[str, int] = {}
        self._unmovable: set[str] = set()  # stages in which there was no memory for the hooks of a transfer
        self.refusal: str | None = None
        self.waiting: set[str] = set()
        self.coming: Callable[[Any], int | None] = lambda _: None
        self.unknown: set[str] = set()
        self._report = report
        self._state: AttemptState | None = None
        self._readers: dict[tuple[str, int], BatchReader] = {}
        self._move: Callable[[Any], Any] = lambda batch: batch
        self._on_host = False  # the current batch stays there, to be moved in pieces
        self._failure: Exception | None = None
        self._ran_out: dict[str, Exception] = {}  # the last time in each stage
        self._refused: list[int] = []  # samples of the attempts at the current batch that failed

    @property
    def on_host(self) -> bool:
        """Whether the current batch stays on the host, to be moved in pieces."""
        return self._on_host

    @property
    def state(self) -> AttemptState:
        """What attempts change."""
        if self._state is None:
            self._state = AttemptState(self._trainer.lightning_module)
        return self._state

    def read_module(self) -> None:
        """Buffers and metrics may be other objects than before: the module has been moved."""
        self._state = AttemptState(self._trainer.lightning_module)

    def run(self, job: BatchTask) -> BatchResult:
        """Run a batch, whole if that is not known to be too much.

        Raises:
            UserError: If one sample alone does not fit, or the batch cannot be split.
        """
        ledger = LogBuffer()
        with log_capture.logs_held_back(self._trainer, ledger.note) as log:
            together = self._pieces_of_all_ranks(job)
            done = self._whole(job, ledger) if self._may_fit(job, together) else None
            done = self._in_pieces(job, ledger, together) if done is None else done
            ledger.replay(log, self._again_if_memory_runs_out)
        self.unknown.discard(job.stage)
        self._on_host = False
        return done

    def move(self, move: Callable[[Any], Any], batch: Any, loader: int = 0) -> Any:
        """Move a batch to the device; one that is too large stays on the host and is moved in pieces.

        Where hooks of the user make something of a batch on its way, they are given all of it, as long
        as there is memory for that: so callbacks and the step find what they expect.
        """
        self._move, self._on_host = move, False
        if not self.active:
            return move(batch)
        stage, hooks = loops.stage(self._trainer), transfer.hooks_move_batches(self._trainer)
        limit = None if hooks and stage not in self._unmovable else self.limits.get(stage)
        if limit is not None:
            expected = self.coming(batch) if stage == "training" else None
            self._on_host = self.samples(batch, stage, expected, loader, on_host=True) > limit
        if self._on_host:
            return batch
        before = RandomState() if self.retries and hooks else None
        went_through, moved = self._attempt(stage, lambda: move(batch))
        if went_through:
            return moved
        if before is not None:  # they may draw numbers
            before.restore()
            self._unmovable.add(stage)
        self._on_host = True
        return batch

    def _pieces_of_all_ranks(self, job: BatchTask) -> int | None:
        """How many pieces every rank runs of its batch, where they wait for each other; ``None``: each as it likes."""
        limit = self.limits.get(job.stage)
        if limit is None or job.stage not in self.waiting | self.unknown:
            return None
        samples = self.samples(job.batch, job.stage, job.expected, job.loader, on_host=self._on_host)
        pieces = agreement.largest_over_ranks(self._trainer, -(-samples // limit))
        if pieces > samples and job.stage not in self.waiting:
            return None
        if pieces > samples:
            raise self._error(fewer_samples_than_ranks(pieces, samples))
        return pieces

    def _may_fit(self, job: BatchTask, together: int | None) -> bool:
        if together is not None:
            return together == 1
        limit = self.limits.get(job.stage)
        return not self._on_host and (
            limit is None or self.samples(job.batch, job.stage, job.expected, job.loader) <= limit
        )

    def _whole(self, job: BatchTask, ledger: LogBuffer) -> BatchResult | None:
        """The batch as it is; ``None`` if it does not fit."""
        self._keep(job.batch)
        went_through, result = self._attempt(job.stage, lambda: job.run(job.batch, None))
        if went_through:
            self._learn()
            ledger.keep(1.0)
            return BatchResult((result,))
        ledger.drop()
        self._undo(job, None)
        return None

    def _in_pieces(self, job: BatchTask, ledger: LogBuffer, together: int | None) -> BatchResult:
        slices = self._slices(job)
        if self._failure is not None:
            self._refuse(slices.samples, job, job.batch)
        limit = min([self.limits.get(job.stage, slices.samples), *((size + 1) // 2 for size in self._refused)])
        sizes = plan_accumulation(slices.samples, micro_batch=limit).chunks[0]
        sizes = sizes if together is None else split_evenly(slices.samples, together)

        current = [slices]  # changes where a piece fails by itself

        def attempt(piece: Piece) -> tuple[bool, Any]:
            while True:
                is_cut, part = self._attempt(job.stage, lambda: self._cut(current[0], piece))
                if not is_cut:
                    self._refuse(piece.samples, job, job.batch)
                    return False, None
                went_through, result = self._attempt(job.stage, partial(self._run_piece, job, part, piece))
                if not isinstance(result, _PieceError):
                    break
                current[0] = self._slices_after(result.error, job, ledger, piece)
            if went_through:
                self._learn()
                if self._refused:  # a step that failed before it came to wait for the others
                    self._raise_if_others_wait(job.stage)
                weight = job.weigh(part, piece)
                ledger.keep(weight, piece.samples)
                return True, (result, weight)
            ledger.drop()
            self._undo(job, piece)
            self._refuse(piece.samples, job, part)
            return False, None

        with whole_batch_metrics(self.state.metrics):
            outcome = run_pieces(even_pieces(sizes), attempt)
        return self._settle(job.stage, outcome)

    def _run_piece(self, job: BatchTask, part: Any, piece: Piece) -> Any:
        try:
            return job.run(self._on_device(part), piece)
        except Exception as error:
            if is_out_of_memory(error) or is_ambiguous_out_of_memory(error) or isinstance(error, UserError):
                raise
            return _PieceError(error)

    def _cut(self, slices: BatchSlices, piece: Piece) -> Any:
        """A slice, and what may change before it has run."""
        part = slices.take(piece.start, piece.stop)
        self._keep(part)
        return part

    def _slices(self, job: BatchTask) -> BatchSlices:
        """The batch, ready to be cut.

        Raises:
            UserError: If it cannot be cut, from the out-of-memory error that made it necessary.
        """
        failure, reader = self._failure, self.reader(job.stage, job.loader)
        try:
            with self._reading(reader):
                return reader.slices(job.batch, expected=job.expected, on_host=self._on_host, samples=job.again)
        except LayoutError as why:
            if failure is None:
                raise
            self._forget_attempts()
            raise self._error(cannot_be_cut(job.stage, str(why), self._memory())) from failure

    def _slices_after(self, error: Exception, job: BatchTask, ledger: LogBuffer, piece: Piece) -> BatchSlices:
        """The batch cut in another way, after a piece has failed where nothing but its being a piece may be the cause.

        Raises:
            Exception: The piece's own, with a note, or a sentence from an out-of-memory error before it.
        """
        reader = self.reader(job.stage, job.loader)
        if self.retries and not reader.collates_anew:
            ledger.drop()
            self._undo(job, piece)
            try:
                with self._reading(reader, anew=True):
                    again = job.again()
                    if again is not None:
                        slices = reader.collated_anew(job.batch, again, on_host=self._on_host)
                        release(error)
                        return slices
            except LayoutError as why:
                error.add_note(str(why))
        self._forget_attempts()
        failure = self._ran_out.get(job.stage)
        if failure is None:
            error.add_note(str(a_piece_failed(job.stage, piece.samples, piece.of, None, error)))
            raise error
        told = a_piece_failed(job.stage, piece.samples, piece.of, self._memory(), error)
        raise self._error(told) from failure

    @contextmanager
    def _reading(self, reader: BatchReader, *, anew: bool = False) -> Iterator[None]:
        """Read samples, if that has to be done, so that nothing is left of it: hooks of the module take part."""
        if reader.is_read(on_host=self._on_host) and not anew:
            yield
            return
        active, self.active = self.active, False
        try:
            with hooks_apart(self._trainer):
                yield
        finally:
            self.active = active

    def _forget_attempts(self) -> None:
        self._refused, self._failure = [], None

    def _settle(self, stage: str, outcome: Outcome[Any]) -> BatchResult:
        """What came of the pieces; where memory ran out, the largest that fits is the limit from now on."""
        sizes = tuple(piece.samples for piece in outcome.pieces)
        if self._refused:
            # A piece as large as one that failed may have gone through before: samples differ.
            fits = max((size for size in sizes if size < min(self._refused)), default=1)
            self.limits[stage] = fits
            apart = self._on_host and transfer.hooks_move_batches(self._trainer)
            step, verdict = self._trainer.global_step, HOOKS_APART if apart else self._verdict(stage)
            event = OomEvent(stage, step, min(self._refused), fits, self._memory(), verdict)
            self._report(event)
        self._forget_attempts()
        results, weights = zip(*outcome.results)
        return BatchResult(results, sizes, weights)

    def _keep(self, batch: Any) -> None:
        if self.retries:
            self.state.keep(batch)

    def _learn(self) -> None:
        if self.retries:
            self.state.learn()

    def _undo(self, job: BatchTask, piece: Piece | None) -> None:
        lost = self.state.put_back()
        job.failed(piece)
        failure = self._failure
        if lost is not None and failure is not None:
            self._forget_attempts()
            raise self._error(changed_by_the_step(job.stage, lost, self._memory())) from failure

    def _attempt(self, stage: str, run: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether it went through, and what came of it; freed outside of the ``except`` block, which pins memory."""
        before = ranks.collectives(self._trainer)
        try:
            with self.state.weights.note_steps() if self.retries else nullcontext():
                return True, run()
        except Exception as error:
            if not self._acts_upon(error):
                raise
            self._failure = error
        finally:
            if ranks.collectives(self._trainer) != before:
                self.waiting.add(stage)
        release(self._failure)
        self._ran_out[stage] = self._failure
        self._raise_if_others_wait(stage)
        return False, None

    def _acts_upon(self, error: Exception) -> bool:
        """Whether it leads to a retry, or to a sentence on why there is none."""
        if is_out_of_memory(error):
            return self.retries or self.refusal is not None
        return self.retries and is_ambiguous_out_of_memory(error)

    def _raise_if_others_wait(self, stage: str) -> None:
        """After a failure: end here if other ranks would wait for what a retry does."""
        failure = self._failure
        why = self.refusal or (EXCHANGES if stage in self.waiting else None)
        if failure is None or why is None:
            return
        self._forget_attempts()
        if is_ambiguous_out_of_memory(failure):
            raise failure
        raise self._error(cannot_run_again(stage, why, self._memory())) from failure

    def _refuse(self, samples: int, job: BatchTask, part: Any) -> None:
        """Note that so many samples do not fit."""
        failure, self._refused = self._failure, [*self._refused, samples]
        if samples > 1 or failure is None:
            return
        self._forget_attempts()
        if is_ambiguous_out_of_memory(failure):
            raise failure
        raise self._error(one_sample_too_large(job.stage, describe_value(part), self._memory())) from failure

    def _again_if_memory_runs_out(self, run: Callable[[], None]) -> None:
        """Run what undoes itself where it fails: with the step's memory freed, there is room for it.

        Not so where it has exchanged values with other ranks, as they would not do that again.
        """
        before = ranks.collectives(self._trainer)
        try:
            run()
        except Exception as error:
            if not self.retries or not is_out_of_memory(error) or ranks.collectives(self._trainer) != before:
                raise
            failure = error
        else:
            return
        release(failure)
        run()

    def _error(self, error: UserError) -> UserError:
        return of_rank(error, self._trainer.world_size)

    def _memory(self) -> str:
        return describe_memory(self._trainer.strategy.root_device)

    def samples(self, batch: Any, stage: str, expected: int | None, loader: int = 0, *, on_host: bool = False) -> int:
        """How many samples a batch holds."""
        if expected is not None:
            return expected
        reader = self.reader(stage, loader)
        with self._reading(reader):
            return reader.count(batch, on_host=on_host)

    def reader(self, stage: str, loader: int = 0) -> BatchReader:
        """What counts and cuts the batches of a loader."""
        key = stage, loader
        if key not in self._readers:
            self._readers[key] = BatchReader(transfer.BatchTransfer(self._trainer, loader), self._source(stage, loader))
        return self._readers[key]

    def _on_device(self, part: Any) -> Any:
        return self._move(part) if self._on_host else part


@dataclass(frozen=True, slots=True)
class _PieceError:
    """What a piece ended in, if not for want of memory."""

    error: Exception


HOOKS_APART = "The hooks of its transfer saw the parts one by one; whether its result is the same was not measured."
EXCHANGES = "its step exchanges values with the other ranks (all_gather, all_reduce, the compute of a metric)"


def why_no_retries(trainer: Any) -> str | None:
    """Why a rank cannot run a training batch again by itself; ``None`` if it can, as far as one can tell beforehand."""
    name = type(trainer.strategy).__name__
    if agreement.is_sharded(trainer):
        return f"{name} shards the model over ranks"
    if agreement.is_distributed(trainer) and ranks.distributed_module(trainer) is None:
        return f"{name} exchanges gradients in a way of its own"
    return ranks.waits_in_forward(trainer)
