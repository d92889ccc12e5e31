"""Survive out-of-memory errors in evaluation: a batch is the unit of undo, and runs again in smaller pieces."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import loaders, ranks
from lightning_ga.errors import UserError
from lightning_ga.fit import messages
from lightning_ga.fit.pieces import Pieces, cut_in_pieces
from lightning_ga.fit.undo_passes import undo_passes
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.trial_batches import BatchCutter
from lightning_ga.memory.oom import attempt, may_be_out_of_memory, retry_once
from lightning_ga.plan.config import Options
from lightning_ga.plan.piece_sizes import halved, piece_sizes
from lightning_ga.snapshot.kept_batch import KeptBatch, undo
from lightning_ga.snapshot.savepoint import Savepoint

_RESULT = "Logged and returned values are merged by samples. A loss that compares samples compares those of a piece."


class Evaluation:
    """Runs the batches of validation, test and prediction; each loader of a stage has a limit of its own."""

    def __init__(self, trainer: Any, reporter: messages.OomReporter, options: Options) -> None:
        self._trainer = trainer
        self._reporter = reporter
        self._retries = options.on_oom != "raise" and not ranks.is_sharded(trainer)
        self._loaders: dict[tuple[str, int], _LoaderPieces] = {}  # by stage and number of the loader
        self._savepoint: Savepoint | None = None
        self._held = ExitStack()
        self._held.enter_context(loaders.intercepted_evaluation(trainer, self._evaluate))

    def stop(self) -> None:
        """Let Lightning run evaluation by itself again."""
        self._held.close()

    def _evaluate(self, name: str, step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Run a step; if memory runs out, undo what it has done, and run it on half of the samples, and so on."""
        if not self._retries or isinstance(batch, Iterator):  # such a step fetches batches by itself
            return step(batch, *others)
        trainer = self._trainer
        stage = name.removesuffix("_step").replace("predict", "prediction")
        loader_index = loaders.loader_index_of_step(trainer, others)
        key = (stage, loader_index)
        if key not in self._loaders:
            self._loaders[key] = _LoaderPieces(trainer, stage, loader_index)
        known = self._loaders[key]
        ranks.share_buffers_before_forward(trainer.strategy.model)
        savepoint = self._taken_savepoint()
        kept = retry_once(partial(KeptBatch, batch))
        exchanged = partial(_exchanged, before=ranks.collectives_run())
        run = partial(known.run, lambda part: step(part, *others), batch, kept.batch, exchanged)
        while (outcome := attempt(run, _is_survived)).failure is not None:
            failed = known.failed_samples(kept.batch, outcome.failure)
            fits = halved(failed)
            if fits is None:
                messages.give_up(trainer, stage, outcome.failure)
            back = partial(undo, savepoint, [kept])
            undo_passes(trainer, stage, outcome.failure, leave_ranks=exchanged, undo=back)
            known.lower(fits)
            self._reporter.report(self._reporter.survived(stage, failed, fits), _RESULT)
        return outcome.result

    def _taken_savepoint(self) -> Savepoint:
        """Return the savepoint, taken now."""
        if self._savepoint is None or loaders.batches_begun(self._trainer) == 1:  # an evaluation may have new metrics
            results = self._trainer._results
            if results is None:  # in prediction
                results = {}
            self._savepoint = retry_once(partial(Savepoint, self._trainer.lightning_module, lambda: results))
        retry_once(self._savepoint.take)
        return self._savepoint


class _LoaderPieces:
    """The batches of one loader of a stage, in pieces that fit; an error halves the pieces."""

    def __init__(self, trainer: Any, stage: str, loader_index: int) -> None:
        self._trainer = trainer
        self._stage = stage
        found, combine = loaders.loaders_of(trainer, loader_index)
        self._cutter = BatchCutter(
            list(map(KnownSamples, found)), combine, loaders.BatchTransfer(trainer, loader_index)
        )
        self._limit: int | None = None  # most samples of a pass; ``None`` before an error
        self._running = 0  # samples of the pass that runs; 0 if none does, or if they were not counted

    def lower(self, limit: int) -> None:
        """Lower the limit: the batch runs again, and so do later ones."""
        self._limit = limit

    def run(self, step: Callable[[Any], Any], batch: Any, kept_batch: Any, exchanged: Callable[[], str | None]) -> Any:
        """Run the step on a batch, or on pieces of its copy."""
        self._running = 0
        sizes: Sequence[int] = (0,)  # not counted
        if self._limit is not None:
            sizes = piece_sizes(self._cutter.count(kept_batch), self._limit)
        in_pieces = len(sizes) > 1
        if in_pieces:
            batch = kept_batch
        is_held = in_pieces or self._trainer.world_size > 1  # ranks log values after the step
        pieces = Pieces(self._trainer._results if is_held else None)
        for piece, size, _ in cut_in_pieces(self._cutter, batch, sizes):
            self._running = size
            with pieces.piece(samples=size, share=float(size)):
                pieces.add(step(piece))
            others = exchanged()
            if in_pieces and others is not None:  # with a collective for each piece, they meet another one of that rank
                raise messages.out_of_memory(self._trainer, self._stage, messages.OTHERS_WAIT, others)
        self._running = sizes[0]  # merging needs the outputs of all pieces: it counts as the largest
        return pieces.finish()

    def failed_samples(self, batch: Any, failure: Exception) -> int:
        """Return the samples of the pass that failed; raise an error if the batch cannot be cut."""
        try:
            samples = int(retry_once(partial(self._cutter.count, batch)))
        except LayoutError as why:
            raise messages.out_of_memory(self._trainer, self._stage, "({memory}). {what}", why) from failure
        if self._running > 1:
            return self._running
        return min(samples, self._limit or samples)  # one sample is no reason to give up while other pieces have two


def _exchanged(*, before: int) -> str | None:
    """Return why other ranks wait for this one, if it has begun collectives since there were so many ``before``."""
    return None if ranks.collectives_run() == before else messages.EXCHANGES


def _is_survived(error: Exception) -> bool:
    return not isinstance(error, UserError) and may_be_out_of_memory(error)
