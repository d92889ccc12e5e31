"""Run batches so that memory running out costs a retry: a window of batches is a transaction.

Nothing is noted for an attempt at a batch. Where a window begins, a ``Savepoint`` is taken; where memory runs out
anywhere in it, all of the window is undone and runs again from its start, in smaller pieces. A batch of evaluation, and
one that makes up its window, are transactions of one part. Here is what training and evaluation share.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import agreement, log_capture, loops, transfer
from lightning_ga.compat.agreement import collectives_run
from lightning_ga.errors import UserError
from lightning_ga.fit.batch_metrics import whole_batch_metrics
from lightning_ga.fit.batch_readers import BatchReaders
from lightning_ga.fit.log_buffer import LogBuffer
from lightning_ga.fit.messages import (
    HOOKS_APART,
    SAME_BUT_RANDOM,
    SKIPPED,
    OomEvent,
    OutOfMemory,
    a_piece_failed,
    fewer_samples_than_ranks,
    of_rank,
)
from lightning_ga.fit.pieces import Piece, even_pieces
from lightning_ga.fit.retry_policy import RetryPolicy
from lightning_ga.loading.batch_source import BatchSource
from lightning_ga.loading.reader import BatchSlices, CollatedAgain
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import attempt, is_ambiguous_out_of_memory, is_out_of_memory, release
from lightning_ga.plan.accumulation import plan_accumulation, split_evenly
from lightning_ga.plan.exactness import SAME_RESULT
from lightning_ga.probe.fingerprint import describe_value
from lightning_ga.snapshot.random_numbers import RandomState
from lightning_ga.snapshot.savepoint import Savepoint

Move = Callable[[Any], Any]
NO_LIMIT = 2**31
_EXCHANGES = "its step exchanges values with the other ranks (all_gather, all_reduce, the compute of a metric)"


@dataclass(slots=True, eq=False)
class Part:
    """One batch of a transaction."""

    batch: Any
    # Runs samples of a part: all of them, or a piece of a weight. (Bound to a part, it would keep its batch alive.)
    run: Callable[[Any, Any, Piece | None, float], Any]
    move: Move | None = None  # moves pieces to the device; ``None`` if the batch is there
    number: int = 0
    loader: int = 0
    expected: int | None = None  # samples that it should hold, where that is known
    again: Callable[[], CollatedAgain | None] = lambda: None  # fetches its samples again
    weigh: Callable[[Any, Any, Piece], float] = lambda _, __, piece: float(piece.samples)  # what a piece weighs in means


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a batch."""

    results: tuple[Any, ...]  # what the pieces returned; one result for a batch that ran whole
    sizes: tuple[int, ...] = ()  # samples of each piece; empty for a batch that ran whole
    weights: tuple[float, ...] = ()  # what each weighs in means


@dataclass(frozen=True, slots=True)
class _PieceError:
    """What a piece ended in, if not for want of memory."""

    error: Exception
    piece: Piece


class Engine:
    """Runs the batches of all stages, and knows how large a pass of each may be.

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
        self._trainer, self.policy = trainer, policy
        self._report, self._verdict, self._samples_of_next = report, verdict, samples_of_next
        self.is_active = True  # whether errors are acted upon
        self.readers = BatchReaders(trainer, self, source)
        self._limits: dict[str, int] = {}
        self._distributed = agreement.is_distributed(trainer)
        self.foreseen: Callable[[], int] = lambda: 0  # collectives that a retry does not run again
        self.lockstep: set[str] = set()  # stages in which ranks wait for each other
        self.undecided: set[str] = set()  # stages of which a first batch has to show that
        self._taps: dict[str, log_capture.LogTap] = {}
        self._tapped: dict[str, Any] = {}
        self._unmovable: set[str] = set()  # stages in which there was no memory for the hooks of a transfer
        self.move: Move | None = None  # of pieces, while the current batch stays on the host
        self.host: tuple[Any, Move] | None = None  # the current batch on the host
        self._not_moved: Exception | None = None
        self._last_failures: dict[str, Exception] = {}  # by stage

    # --- limits --------------------------------------------------------------------------------

    def limit(self, stage: str) -> int | None:
        """Return the most samples of a pass; ``None`` where whole batches are tried."""
        return self._limits.get(stage)

    def lower(self, stage: str, samples: int) -> None:
        """Run no more samples at once from here on."""
        self._limits[stage] = min(samples, self._limits.get(stage, samples))

    # --- transfer ------------------------------------------------------------------------------

    def to_device(self, move: Move, batch: Any, loader: int = 0) -> Any:
        """Move a batch to the device; one that is too large stays on the host and is moved in pieces."""
        self.move = self._not_moved = None
        if not self.is_active:
            return move(batch)
        self.host = batch, move
        stage = loops.stage(self._trainer)
        if self._limits and self._stays_on_host(batch, stage, loader):
            self.move = move
            return batch
        before = RandomState() if self._hooks_move_batches and self.policy.retries else None
        moved = self.attempt(stage, partial(move, batch))
        if moved.failure is None:
            return moved.result
        if before is not None:  # they may draw numbers
            before.restore()
            self._unmovable.add(stage)
        self.move, self._not_moved = move, moved.failure
        return batch

    @cached_property
    def _hooks_move_batches(self) -> bool:
        return transfer.hooks_move_batches(self._trainer)

    def _stays_on_host(self, batch: Any, stage: str, loader: int) -> bool:
        limit = self._limits.get(stage)
        if limit is None or (self._hooks_move_batches and stage not in self._unmovable):
            return False
        expected = self._samples_of_next(batch) if stage == "training" else None
        return self.readers.count(batch, stage, expected, loader, on_host=True) > limit

    # --- transactions --------------------------------------------------------------------------

    def run(
        self,
        stage: str,
        parts: Sequence[Part],
        savepoint: Savepoint,
        undo: Callable[[], str | None],
        *,
        begins: bool = True,
        anew: bool = False,
    ) -> Done:
        """Run the last of these parts; where memory runs out, all of them from the start, in smaller pieces.

        Args:
            stage: What they are for.
            parts: The batches of the transaction so far; all but the last have run.
            savepoint: State before the first of them.
            undo: Undoes what is special to the stage, and names what cannot be undone.
            begins: Whether the transaction begins with the last of them, so that the savepoint is taken.
            anew: Whether all of them are to run, though none has failed: an optimizer evaluates its closure again.

        Raises:
            UserError: If one sample alone does not fit, the batch cannot be cut, or something cannot be undone.
        """
        part, tap = parts[-1], self._tap(stage)
        tap.begin()
        take = savepoint.take if (begins or anew) and self.policy.retries else None
        if take is not None:
            savepoint.is_taken = False
        elif savepoint.is_taken:
            savepoint.mark()
        limit, failure, pieces = self._limits.get(stage), self._not_moved, None
        fits = part.move is None
        if limit is not None:
            pieces = self._pieces_of_all_ranks(stage, part, limit)
            fits = fits and (self._count(stage, part) <= limit if pieces is None else pieces == 1)
        if fits and not anew:
            hook = log_capture.current_hook(self._trainer)
            # What ranks exchange in logs comes after all passes, as it does on a rank that runs pieces.
            ledger = LogBuffer() if self._distributed else None
            tensors = _tensors(part.batch)
            written = [tensor._version for tensor in tensors]
            with nullcontext() if ledger is None else tap.held(ledger.note):
                ran = self.attempt(stage, partial(_whole, take, part))
            if ran.failure is None:
                if ledger is not None:
                    ledger.keep(1.0)
                    ledger.replay(tap.log, self.once_more)
                self.undecided.discard(stage)
                self.host = None
                return Done((ran.result,))
            failure, take = ran.failure, None
            if written != [tensor._version for tensor in tensors]:
                raise self.told(self.out_of_memory(stage).changed_by_the_step("its batch in place")) from failure
            log_capture.return_to_hook(self._trainer, hook)
        done = self._in_pieces(stage, parts, savepoint, undo, tap, failure, limit, pieces, anew=anew, take=take)
        self.undecided.discard(stage)
        self.move = self._not_moved = self.host = None
        return done

    def _in_pieces(
        self,
        stage: str,
        parts: Sequence[Part],
        savepoint: Savepoint,
        undo: Callable[[], str | None],
        tap: log_capture.LogTap,
        failure: Exception | None,
        limit: int | None,
        pieces: int | None,
        *,
        anew: bool,
        take: Callable[[], None] | None,
    ) -> Done:
        part, refused = parts[-1], list[int]()
        first, hook = failure, log_capture.current_hook(self._trainer)
        slices = self._slices(stage, part, failure)
        if failure is not None:
            refused.append(self._refused(stage, slices.samples, failure, part.batch))
        largest: list[int] = []
        while True:
            if failure is not None:
                lost = savepoint.restore() or undo()
                if lost is not None:
                    raise self.told(self.out_of_memory(stage).changed_by_the_step(lost)) from failure
            most = min([limit or NO_LIMIT, *((size + 1) // 2 for size in refused)])
            ledger = LogBuffer()

            self._first, self._seen = first, self._collectives()

            def run(again: bool = anew or failure is not None) -> Done | _PieceError:
                if take is not None and not savepoint.is_taken:
                    take()
                if again:
                    for other in parts[:-1]:
                        with tap.held(lambda *_, **__: None):
                            done = self._pass_by_pass(stage, other, self._slices(stage, other, first), most, None, None)
                            savepoint.shorten()
                            if isinstance(done, _PieceError):
                                return done
                with tap.held(ledger.note):
                    return self._pass_by_pass(stage, part, slices, most, None if refused else pieces, ledger)

            self._running, self._cut = min(most, slices.samples), part.batch
            ran = self.attempt(stage, run)
            if isinstance(ran.result, _PieceError):
                failure = self._cut_otherwise(stage, part, ran.result, first)
                savepoint.restore()
                undo()
                slices = self._slices(stage, part, first)
                continue
            if ran.failure is None:
                break
            failure = ran.failure
            first = first or failure
            log_capture.return_to_hook(self._trainer, hook)
            refused.append(self._refused(stage, self._running, failure, self._cut))
            self._cut = None
        done: Done = ran.result
        ledger.replay(tap.log, self.once_more)
        if refused:
            largest = [size for size in done.sizes if size < min(refused)]
            fits = max(largest, default=1)
            self.lower(stage, fits)
            event = OomEvent(stage, self._trainer.global_step, min(refused), fits, self.memory())
            self._report(self._with_result(event, stage, done, draws=savepoint.draws_numbers()))
        return done

    def _pass_by_pass(
        self, stage: str, part: Part, slices: BatchSlices, most: int, pieces: int | None, ledger: LogBuffer | None
    ) -> Any:
        """Run a batch in near-equal pieces of at most so many samples."""
        samples = slices.samples
        sizes = plan_accumulation(samples, micro_batch=most).chunks[0]
        sizes = sizes if pieces is None else split_evenly(samples, pieces)
        if len(sizes) == 1 and part.move is None and ledger is None:
            self._running = samples
            return Done((part.run(part, part.batch, None, 1.0),))
        results, weights = [], []
        with whole_batch_metrics(self.savepoint(stage).metrics, lambda: self._running / samples):
            for piece in even_pieces(sizes):
                self._running = piece.samples
                cut = self._cut = slices.take(piece.start, piece.stop)
                try:
                    weight = part.weigh(part, cut, piece)
                    results.append(part.run(part, cut if part.move is None else part.move(cut), piece, weight))
                except Exception as error:
                    if is_out_of_memory(error) or is_ambiguous_out_of_memory(error) or isinstance(error, UserError):
                        raise
                    return _PieceError(error, piece)
                weights.append(weight)
                if self._first is not None and self._collectives() != self._seen:  # others would wait for the rest
                    self.lockstep.add(stage)
                    self.raise_if_others_wait(stage, self._first)
                if ledger is not None:
                    ledger.keep(weight, piece.samples)
        return Done(tuple(results), tuple(sizes), tuple(weights))

    # --- cutting -------------------------------------------------------------------------------

    def _count(self, stage: str, part: Part) -> int:
        return self.readers.count(part.batch, stage, part.expected, part.loader, on_host=part.move is not None)

    def _slices(self, stage: str, part: Part, failure: Exception | None) -> BatchSlices:
        """Read where a batch may be cut."""
        reader, on_host = self.readers.reader(stage, part.loader), part.move is not None
        try:
            with self.readers.reading(reader, on_host=on_host):
                return reader.slices(part.batch, expected=part.expected, on_host=on_host, samples=part.again)
        except LayoutError as why:
            if failure is None:
                raise
            raise self.told(self.out_of_memory(stage).cannot_be_cut(str(why))) from failure

    def _cut_otherwise(self, stage: str, part: Part, ended: _PieceError, failure: Exception | None) -> Exception:
        """Collate pieces anew after one has failed where nothing but its being a piece may be the cause."""
        reader, on_host, error = self.readers.reader(stage, part.loader), part.move is not None, ended.error
        try:
            with self.readers.reading(reader, on_host=on_host, anew=True):
                again = part.again() if self.policy.retries and not reader.collates_anew else None
                if again is not None:
                    reader.collated_anew(part.batch, again, on_host=on_host)
                    release(error)
                    return error
        except LayoutError as why:
            error.add_note(str(why))
        failure = failure or self._last_failures.get(stage)
        if failure is None:
            error.add_note(str(a_piece_failed(stage, ended.piece, None, error)))
            raise error
        raise self.told(a_piece_failed(stage, ended.piece, self.memory(), error)) from failure

    def _pieces_of_all_ranks(self, stage: str, part: Part, limit: int) -> int | None:
        """Return how many pieces every rank runs, where they wait for each other; ``None``: each as it likes."""
        if stage not in self.lockstep and stage not in self.undecided:
            return None
        samples = self._count(stage, part)
        pieces = agreement.largest_over_ranks(self._trainer, -(-samples // limit))
        if pieces <= samples:
            return pieces
        if stage not in self.lockstep:
            return None
        raise self.told(fewer_samples_than_ranks(pieces, samples))

    # --- attempts ------------------------------------------------------------------------------

    def attempt(self, stage: str, run: Callable[[], Any]) -> Any:
        """Run something, and free the memory of what failed.

        Raises:
            UserError: If memory runs out and other ranks would wait for a retry.
        """
        before = self._collectives() if self._distributed else 0
        try:
            ran = attempt(run, self._acts_upon)
        finally:
            if self._distributed and self._collectives() != before:
                self.lockstep.add(stage)
        if ran.failure is not None:
            self._last_failures[stage] = ran.failure
            self.raise_if_others_wait(stage, ran.failure)
        return ran

    def raise_if_others_wait(self, stage: str, failure: Exception) -> None:
        """End here if other ranks would wait for what a retry does."""
        why = self.policy.refusal or (_EXCHANGES if stage in self.lockstep else None)
        if why is None:
            return
        if is_ambiguous_out_of_memory(failure):
            raise failure
        raise self.told(self.out_of_memory(stage).cannot_run_again(why)) from failure

    def once_more(self, run: Callable[[], Any]) -> Any:
        """Run what undoes itself where it fails: with the step's memory freed, there is room for it.

        Not so where it has exchanged values with other ranks, as they would not do that again.
        """
        before = self._collectives()

        def may_repeat(error: Exception) -> bool:
            return self.policy.retries and is_out_of_memory(error) and self._collectives() == before

        ran = attempt(run, may_repeat)
        return run() if ran.failure is not None else ran.result

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which nothing is caught: a probe wants to see its own errors."""
        before, self.is_active = self.is_active, False
        try:
            yield
        finally:
            self.is_active = before

    def _acts_upon(self, error: Exception) -> bool:
        if is_out_of_memory(error):
            return self.policy.retries or self.policy.refusal is not None
        return self.policy.retries and is_ambiguous_out_of_memory(error)

    def _collectives(self) -> int:
        return collectives_run() - self.foreseen() if self._distributed else 0

    # --- state ---------------------------------------------------------------------------------

    def savepoint(self, stage: str) -> Savepoint:
        """Return what keeps the state of a stage: one of training, and one of all others, which may come within it."""
        key = stage == "training"
        if key not in self._savepoints:
            self._savepoints[key] = Savepoint(self._trainer.lightning_module, self.changing)
        return self._savepoints[key]

    changing: frozenset[str] = frozenset()  # names of what steps are known to change

    @cached_property
    def _savepoints(self) -> dict[bool, Savepoint]:
        return {}

    def read_module(self, changing: frozenset[str] | None = None) -> None:
        """Look at the module anew: its buffers and metrics are other objects once it has been moved."""
        self._savepoints.clear()
        self.changing = self.changing if changing is None else changing

    def memory_kept(self) -> Iterator[Tensor]:
        """Yield what is kept on the device while batches run."""
        if self.policy.retries:
            yield from self.savepoint("training").tensors()

    def _tap(self, stage: str) -> log_capture.LogTap:
        results = log_capture.results_of(self._trainer, stage)
        if stage not in self._taps or self._tapped[stage] is not results:
            self._taps[stage], self._tapped[stage] = log_capture.LogTap(results), results
        return self._taps[stage]

    def release(self) -> None:
        """Give the loops their own ``log`` back."""
        for tap in self._taps.values():
            tap.release()
        self._taps.clear()

    # --- sentences -----------------------------------------------------------------------------

    def told(self, error: UserError) -> UserError:
        """Return the error as one rank of several says it."""
        return of_rank(error, self._trainer.world_size)

    def out_of_memory(self, stage: str) -> OutOfMemory:
        """Return the sentences for memory that has run out in a stage."""
        return OutOfMemory(stage, self.memory())

    def memory(self) -> str:
        """Describe the device's memory."""
        return describe_memory(self._trainer.strategy.root_device)

    def _refused(self, stage: str, samples: int, failure: Exception, batch: Any) -> int:
        """Note that so many samples do not fit."""
        if samples > 1:
            return samples
        if is_ambiguous_out_of_memory(failure):
            raise failure
        raise self.told(self.out_of_memory(stage).one_sample_too_large(describe_value(batch))) from failure

    def _with_result(self, event: OomEvent, stage: str, done: Done, *, draws: bool) -> OomEvent:
        from dataclasses import replace

        verdict = self._verdict(stage)
        if stage == "training" and len({result is None for result in done.results}) > 1:
            verdict = SKIPPED
        elif self.move is not None and self._hooks_move_batches:
            verdict = HOOKS_APART
        elif verdict == SAME_RESULT and draws:
            verdict = SAME_BUT_RANDOM
        return replace(event, result=verdict)


def _whole(take: Callable[[], None] | None, part: Part) -> Any:
    """Run a batch as it is; where a transaction begins with it, keep what may change."""
    if take is not None:
        take()
    return part.run(part, part.batch, None, 1.0)


def _tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, as far as they lie at hand; those of inference mode have no versions."""
    things = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else (batch,)
    return [thing for thing in things if isinstance(thing, Tensor) and not thing.is_inference()]
