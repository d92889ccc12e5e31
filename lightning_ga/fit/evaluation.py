"""Survive out-of-memory errors in evaluation: a batch is the unit of undo, and runs again in smaller pieces."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning_ga.batch.pytree import LayoutError
from lightning_ga.compat import loaders, ranks
from lightning_ga.errors import UserError
from lightning_ga.fit import messages
from lightning_ga.fit.pieces import Pieces, cut_in_pieces
from lightning_ga.loading.cutter import BatchCutter
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import attempt, is_ambiguous_out_of_memory, may_be_out_of_memory, retry_once
from lightning_ga.plan.config import Options
from lightning_ga.plan.pieces import halved, piece_sizes
from lightning_ga.snapshot.kept_batch import KeptBatch, undo
from lightning_ga.snapshot.savepoint import Savepoint

_EXCHANGES = "its step exchanges values with the other ranks (all_gather, all_reduce, the compute of a metric)"
_RESULT = "Logged and returned values are merged by samples. A loss that compares samples compares those of a piece."


class Evaluation:
    """Runs the batches of validation, test and prediction; each loader of a stage has a limit of its own."""

    def __init__(self, trainer: Any, reporter: messages.OomReporter, options: Options) -> None:
        self._trainer, self._reporter = trainer, reporter
        self._retries = options.on_oom == "split" and not ranks.is_sharded(trainer)
        self._loaders: dict[tuple[str, int], _LoaderPieces] = {}  # by stage
        self._savepoint: Savepoint | None = None
        self._held = loaders.intercepted_evaluation(trainer, self._evaluate)
        self._held.__enter__()

    def stop(self) -> None:
        """Let Lightning run evaluation by itself again."""
        self._held.__exit__(None, None, None)

    def _evaluate(self, name: str, step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Run a step; if memory runs out, undo what it has done, and run it on half of the samples, and so on."""
        if not self._retries or isinstance(batch, Iterator):  # such a step fetches batches by itself
            return step(batch, *others)
        trainer = self._trainer
        loader = loaders.loader_of_step(trainer, others)
        ranks.share_buffers_before_forward(trainer.strategy.model)
        if self._savepoint is None or loaders.batches_begun(trainer) == 1:  # a new evaluation may have new metrics
            results = trainer._results  # none in prediction
            find = partial(Savepoint, trainer.lightning_module, lambda: {} if results is None else results)
            self._savepoint = retry_once(find)
        retry_once(self._savepoint.take)
        kept = retry_once(partial(KeptBatch, batch))
        stage = name.removesuffix("_step").replace("predict", "prediction")
        known = self._loaders.setdefault((stage, loader), _LoaderPieces(trainer, stage, loader))
        collectives_before = ranks.collectives_run()
        run = partial(known.run, lambda part: step(part, *others), batch, kept, collectives_before)
        while (outcome := attempt(run, _is_survived)).failure is not None:
            event = known.begin_again(outcome.failure, kept, collectives_before, self._savepoint)
            self._reporter.report(event, _RESULT)
        return outcome.result


class _LoaderPieces:
    """The batches of one loader of a stage, in pieces that fit; an error halves the pieces."""

    def __init__(self, trainer: Any, stage: str, loader: int) -> None:
        self._trainer, self._stage = trainer, stage
        self._cutter = BatchCutter(*loaders.loaders_of(trainer, loader), loaders.BatchTransfer(trainer, loader))
        self._limit: int | None = None
        self._running = 0  # samples of the pass that runs; 0 if none does, or if they were not counted

    def run(self, step: Callable[[Any], Any], batch: Any, kept: KeptBatch, collectives_before: int) -> Any:
        """Run the step on a batch, or on pieces of its copy."""
        self._running = 0
        samples = 0 if self._limit is None else self._cutter.count(kept.batch)
        sizes = piece_sizes(samples, self._limit)
        in_pieces = len(sizes) > 1
        is_held = in_pieces or self._trainer.world_size > 1  # ranks log values after the step
        pieces = Pieces(self._trainer._results if is_held else None)
        for piece, size, _ in cut_in_pieces(self._cutter, kept.batch if in_pieces else batch, sizes):
            self._running = size
            with pieces.piece(samples=size, weight=float(size)):
                pieces.add(step(piece))
            if in_pieces and ranks.collectives_run() != collectives_before:
                raise self._error(messages.OTHERS_WAIT, _EXCHANGES)
        self._running = sizes[0]  # what follows needs the outputs of all
        return pieces.finish()

    def begin_again(
        self, failure: Exception, kept: KeptBatch, collectives_before: int, savepoint: Savepoint
    ) -> messages.OomEvent:
        """Undo a failed run, and lower the limit to half of the pass that failed; if it cannot run again, raise why."""
        try:
            samples = retry_once(partial(self._cutter.count, kept.batch))
        except LayoutError as why:
            raise self._error("({memory}). {what}", why) from failure
        failed = self._running
        if failed <= 1:  # a short last piece is no reason to give up while others have two samples
            failed = min(samples, self._limit or samples)
        fits = halved(failed)
        if fits is None:
            raise failure if is_ambiguous_out_of_memory(failure) else self._error(messages.ONE_SAMPLE) from failure
        if ranks.collectives_run() != collectives_before:
            raise self._error(messages.OTHERS_WAIT, _EXCHANGES) from failure
        if moved := retry_once(partial(undo, savepoint, [kept])):
            raise self._error(messages.CHANGED, moved) from failure
        self._limit = fits
        memory, step = describe_memory(self._trainer.strategy.root_device), self._trainer.global_step
        return messages.OomEvent(self._stage, step, failed, fits, memory)

    def _error(self, sentence: str, what: object = "") -> UserError:
        return messages.out_of_memory(self._trainer, self._stage, sentence, what)


def _is_survived(error: Exception) -> bool:
    return not isinstance(error, UserError) and may_be_out_of_memory(error)
