"""Run a batch of a window: whole if it fits, else in pieces; if memory runs out, the window again, in smaller ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_ga.batch.layout import BatchSlices, LayoutError
from lightning_ga.batch.pytree import same_values
from lightning_ga.compat import dataloaders
from lightning_ga.compat.logs import LogBuffer, LogTap, current_hook, return_to_hook
from lightning_ga.errors import UserError
from lightning_ga.fit import oom_messages
from lightning_ga.fit.batch_metrics import whole_batch_metrics
from lightning_ga.fit.engine import Engine
from lightning_ga.fit.parts import BatchResult, Part, Piece, Window, even_pieces, tensors_of
from lightning_ga.loading.padding import SizedSlices
from lightning_ga.memory.oom import is_ambiguous_out_of_memory, is_out_of_memory
from lightning_ga.plan.accumulation import plan_accumulation, split_evenly
from lightning_ga.plan.exactness import SAME_RESULT
from lightning_ga.plan.lengths import SizeLimits
from lightning_ga.probe.cache import describe_value
from lightning_ga.snapshot.plain import PlainState


def run_window(engine: Engine, window: Window, *, begins: bool, all_parts: bool = False) -> BatchResult:
    """Run the last batch of a window; if memory runs out, all of the window again, in smaller pieces.

    ``begins`` if the window begins with this batch; ``all_parts`` if all batches are to run, though none has failed,
    because an optimizer evaluates its closure again.
    """
    stage, part, failure = window.stage, window.parts[-1], engine.not_moved
    tap, hook = engine.tap(stage), current_hook(engine.module)
    part.tensors = tensors_of(part.batch)
    if (begins or all_parts) and engine.policy.retries:
        engine.retry_once(window.savepoint.take)
    pieces = engine.pieces(stage, part) if engine.limits else 1
    if pieces == 1 and part.move is None and not all_parts:
        logs = LogBuffer() if engine.distributed else None
        if logs is not None:  # what ranks exchange in logs comes after all passes, as on a rank that runs pieces
            logs.begin_piece(1.0, 0)
        tap.buffer = logs
        outcome = engine.catch(stage, window.run_pass, part, part.batch, None, 1.0)
        tap.buffer = None
        if outcome.failure is None:
            engine.finish(stage)
            if logs is not None:
                logs.replay(tap.log, engine.retry_once)
            return BatchResult((outcome.result,))
        failure = outcome.failure
        return_to_hook(engine.module, hook)
    result = WindowRun(engine, window, tap, pieces=pieces, all_parts=all_parts).run(failure)
    engine.finish(stage)
    return result


class WindowRun:
    """One run of a window whose last batch does not run whole."""

    def __init__(self, engine: Engine, window: Window, tap: LogTap, *, pieces: int, all_parts: bool) -> None:
        self._engine, self._window, self._stage, self._last = engine, window, window.stage, window.parts[-1]
        self._tap, self._batches = tap, engine.batches(self._stage)
        self._hook = current_hook(engine.module)
        self._failure: Exception | None = None  # of the last pass that ran out of memory
        self._pieces = pieces  # in how many the last batch runs at first
        self._all_parts = all_parts  # whether all its batches are to run, though none has failed
        self._chunks = engine.chunked_in(window.stage)
        self._refused: list[tuple[int, int]] = []  # cost and samples of the passes that ran out of memory
        self._each = 1  # what a sample of the pass that runs costs
        self._costs: list[tuple[int, int]] = []  # cost and samples of each pass of the last batch
        self._running = 0  # samples of the pass that runs
        self._cut: Any = None  # these samples
        self._plain: PlainState | None = None  # state that is not put back, as it was before the retry
        self._skips = False  # whether a step returned nothing for some pieces of a batch
        self._draws = False  # whether samples that are fetched again are others: their dataset draws random numbers

    def run(self, failure: Exception | None) -> BatchResult:
        """Run until all goes through, and report the errors that were survived, that of the whole batch among them."""
        engine, last, self._failure = self._engine, self._last, failure
        if last.batch is None:  # it was let go, as micro-batches without a sample followed
            last.batch, last.move = self._fetch(last), engine.mover
        if failure is not None:
            self._renew_batch(last)
        slices = self._slices(last)
        self._running, self._cut, self._each = self._size(slices.samples), last.batch, self._largest(last, slices)
        while True:
            if self._failure is not None:
                self._undo(self._failure)
            self._running, self._cut = min(self._most(last, slices), slices.samples), last.batch
            if self._chunks is not None:
                self._chunks.size.samples, self._chunks.size.keep = self._running, 0
            outcome = engine.catch(self._stage, self._run_parts, slices)
            if outcome.failure is None:
                break
            self._failure = outcome.failure
            self._renew_batch(last)
            slices = self._slices(last)
        result: BatchResult = outcome.result
        result.logs.replay(self._tap.log, engine.retry_once)
        if self._refused:
            self._report(result)
        return result

    def _undo(self, failure: Exception) -> None:
        """Refuse the size that failed, and put the window's start back; end with an error if that cannot be done."""
        window, engine = self._window, self._engine
        self._refused.append((self._running * self._each, self._running))
        cut, self._cut = self._cut, None
        if self._running == 1 and is_ambiguous_out_of_memory(failure):
            raise failure
        if self._running == 1:
            sentence = oom_messages.ONE_SAMPLE if self._chunks is None else oom_messages.ONE_CHUNK
            raise engine.error(self._stage, sentence, describe_value(cut)) from failure
        return_to_hook(engine.module, self._hook)
        lost = engine.retry_once(window.savepoint.restore) or engine.retry_once(window.undo)
        if lost is not None:
            raise engine.error(self._stage, oom_messages.CHANGED, lost) from failure
        self._plain = window.savepoint.not_put_back(window.gradients_left())

    def _run_parts(self, slices: BatchSlices) -> BatchResult:
        """Run the batches of the window; earlier ones log again only if the optimizer evaluates its closure again."""
        window = self._window
        if self._failure is not None or self._all_parts:
            for number, part in enumerate(window.parts[:-1]):
                self._run_again(part)
                window.savepoint.go_on(number + 1)
        result = self._run_pieces(self._last, slices)
        window.savepoint.go_on(len(window.parts))
        return result

    def _run_again(self, part: Part) -> None:
        """Run an earlier batch of the window once more; afterwards no more of it is kept than before."""
        engine, kept, move = self._engine, part.batch, part.move
        if kept is None:
            part.batch, part.move = self._fetch(part), engine.mover
        else:
            self._renew_batch(part)
        try:
            if part.move is not None and engine.moves_whole(self._stage):
                part.batch, part.move = engine.move_whole(self._stage, part.move, part.batch), None
            result = self._run_pieces(part, self._slices(part))
            if self._failure is None and self._tap.results is not None:
                with self._tap.of_batch(part.batch):
                    result.logs.replay(self._tap.log)
        finally:
            part.batch, part.move = kept, move

    def _renew_batch(self, part: Part) -> None:
        """Take a batch from the host again, as a step may overwrite the one on the device.

        If there is no other, and the step has overwritten it, end with an error.
        """
        engine = self._engine
        if part.move is not None:
            return
        if part.host is not None and not part.is_changed and not engine.moves_whole(self._stage):
            part.batch, part.move = part.host, engine.mover
            return
        changed = tensors_of(part.batch) != part.tensors
        if changed or engine.retry_once(lambda: self._is_another(part)):
            what = "its batch in place" if changed else "its batch in place (or its dataset makes other samples now)"
            raise engine.error(self._stage, oom_messages.CHANGED, what) from self._failure

    def _is_another(self, part: Part) -> bool:
        """Return whether a batch differs from what its samples give now, if they give the same every time."""
        if part.is_changed or self._stage != "training":  # an evaluation's sampler may draw another order each time
            return False
        if self._engine.hooks_move_batches or self._batches.fetch(part.number, part.loader) is None:
            return False
        fetched, draws = self._fetched(part)
        return not draws and not same_values(part.batch, fetched)

    def _fetch(self, part: Part) -> Any:
        """Fetch the samples of a batch that was let go, and note if they are others than before."""
        fetched, draws = self._fetched(part)
        self._draws |= draws
        return fetched

    def _fetched(self, part: Part) -> tuple[Any, bool]:
        """Return a batch made of its samples once more, and whether its dataset draws random numbers."""
        batches, draws = [], False
        for seed in (0, 1):
            again = self._batches.fetch(part.number, part.loader, seed)
            assert again is not None, "batches that cannot be fetched again are kept"
            batches.append(again.collate(0, again.count, seed=seed))
            draws |= again.draws
        draws = draws or not same_values(*batches)
        return dataloaders.BatchTransfer(self._engine.trainer, part.loader).on_host(batches[0]), draws

    def _size(self, samples: int) -> int:
        """Return the samples of a pass, or of a chunk of it if submodules run in chunks."""
        return samples if self._chunks is None else min(samples, self._chunks.size.samples or samples)

    def _largest(self, part: Part, slices: BatchSlices) -> int:
        """Return what the longest sample of a batch costs."""
        if isinstance(slices, SizedSlices):  # the whole is as wide as it was padded
            return max(1, slices.width + self._limits(part).offset)
        return self._batches.relative_size(part.number)[0]

    def _most(self, part: Part, slices: BatchSlices) -> int:
        """Return the most samples of a pass: half of what failed, in samples × size."""
        size, of = self._largest(part, slices), self._batches.relative_size(part.number)[1]
        if isinstance(slices, SizedSlices):
            return max(1, self._limits(part).budget // size)
        limit = self._engine.limit(self._stage)
        costs = [2**31 * size if limit is None else limit * of, *((cost + size) // 2 for cost, _ in self._refused)]
        return max(1, min(costs) // size)

    def _limits(self, part: Part) -> SizeLimits:
        """Return what a pass may hold of a batch that is cut by size: half of what failed."""
        limits, _ = self._engine.reader(self._stage, part.loader).limits(self._engine.limit(self._stage))
        halves = ((cost + cost // samples) // 2 for cost, samples in self._refused)
        return replace(limits, budget=min([limits.budget, *halves]))

    def _run_pieces(self, part: Part, slices: BatchSlices) -> BatchResult:
        """Run a batch in pieces of near-equal size, and hold back what they log."""
        engine, window, samples = self._engine, self._window, slices.samples
        pieces = self._pieces if part is self._last and not self._refused else 0
        most = samples if self._chunks is not None else self._most(part, slices)
        if isinstance(slices, SizedSlices):
            sizes: Sequence[int] = slices.pieces(self._limits(part), pieces)
        else:
            sizes = plan_accumulation(samples, micro_batch=most).chunks[0]
            sizes = split_evenly(samples, pieces) if len(sizes) <= pieces <= samples else sizes
        exchanged, logs = engine.collectives(), LogBuffer()
        self._each, self._costs = self._largest(part, slices), []
        results, weights = [], []
        metrics = whole_batch_metrics(window.savepoint.metrics, lambda: (logs.samples, samples))
        with self._tap.held(logs), metrics:
            for piece in even_pieces(sizes):
                self._running = self._size(piece.samples)
                if isinstance(slices, SizedSlices):
                    self._each = max(1, slices.sizes[piece.start] + self._limits(part).offset)
                self._costs.append((self._running * self._each, self._running))
                cut = self._cut = slices.take(piece.start, piece.stop)
                weight = window.weigh(part, cut, piece)
                moved = cut if part.move is None else part.move(cut)
                logs.begin_piece(weight, piece.samples)
                results.append(self._run_piece(part, moved, piece, weight))
                weights.append(weight)
                exchanges = engine.collectives() != exchanged and self._chunks is None
                if self._failure is not None and exchanges:  # others would wait for the rest
                    engine.lockstep.add(self._stage)
                    engine.raise_if_others_wait(self._stage, self._failure)
        self._skips |= len({result is None for result in results}) > 1
        return BatchResult(results, sizes, weights, logs, slices.order if isinstance(slices, SizedSlices) else ())

    def _run_piece(self, part: Part, batch: Any, piece: Piece, weight: float) -> Any:
        """Run a piece; an error of the user's code tells which samples ran."""
        try:
            return self._window.run_pass(part, batch, piece, weight)
        except StopIteration:  # the loop would take it for the end of the epoch
            if self._failure is None:
                raise
            raise self._engine.error(
                self._stage, oom_messages.CHANGED, "a generator, which it ended"
            ) from self._failure
        except Exception as error:
            is_ours = isinstance(error, UserError) or is_out_of_memory(error) or is_ambiguous_out_of_memory(error)
            if not is_ours and piece.samples < piece.of:
                ran_out = self._failure is not None
                error.add_note(oom_messages.part_of_a_batch(self._stage, piece, out_of_memory=ran_out))
            raise

    def _slices(self, part: Part) -> BatchSlices:
        """Read where a batch may be cut; if it cannot be, after an error, say so."""
        try:
            return self._engine.slices(self._stage, part)
        except LayoutError as why:
            if self._failure is None:
                raise
            raise self._engine.error(self._stage, oom_messages.NOT_CUT, why) from self._failure

    def _report(self, result: BatchResult) -> None:
        """Lower the limit to the largest piece below all that failed, and say what it cost."""
        engine, stage, savepoint = self._engine, self._stage, self._window.savepoint
        (cost, smallest), of = min(self._refused), self._batches.relative_size(self._last.number)[1]
        reader = engine.reader(stage, self._last.loader)
        if reader.cuts_by_size:
            of = reader.limits(1)[1]
        most, fits = max((each for each in self._costs if each[0] < cost), default=(self._each, 1))
        engine.lower(stage, max(1, most // of))
        engine.allocator.begin_again()  # its counts show the error, which was no struggle
        left, hooked = () if self._plain is None else self._plain.changed(), savepoint.changed_by_hooks
        draws = self._draws or savepoint.draws_numbers()
        step, memory, batches, chunks = engine.trainer.global_step, engine.memory(), self._batches, self._chunks
        apart = oom_messages.HOOKS_APART if self._last.move is not None and engine.hooks_move_batches else None
        known = oom_messages.SKIPPED if stage == "training" and self._skips else apart

        def event() -> oom_messages.OomEvent:  # made later, when the batch is gone
            verdict = known or batches.verdict(hooked)
            said = oom_messages.SAME_BUT_RANDOM if verdict == SAME_RESULT and draws else verdict
            later = batches.later_epochs() if chunks is None else ""
            unit = "parts" if chunks is None else "chunks"
            return oom_messages.OomEvent(stage, step, smallest, fits, memory, said, left, later, unit, of > 1)

        if stage == "training":  # told once it is measured whether the result is the same
            engine.reporter.untold.append(event)
        else:
            engine.reporter.report(event())
