"""Survive out-of-memory errors in evaluation: a batch is the unit of undo, and runs again in smaller pieces.

Tested in tests/fit/test_evaluation.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import loaders, ranks
from lightning_ga.errors import UserError
from lightning_ga.fit import messages
from lightning_ga.fit.pieces import Pieces, cut_in_pieces
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.trial_batches import BatchCutter
from lightning_ga.memory.oom import attempt, may_be_out_of_memory, retry_once
from lightning_ga.plan.accumulation import halved, micro_batch_sizes
from lightning_ga.plan.config import Options
from lightning_ga.snapshot.kept_batch import KeptBatch, undo
from lightning_ga.snapshot.window_savepoint import Savepoint

WHOLE = (0,)  # sizes of the pieces of a batch that runs as it is, without being counted
_RESULT = "Logged and returned values are merged by samples. A loss that compares samples compares those of a piece."


class Evaluation:
    """Runs the batches of validation, test and prediction; each loader of a stage has a limit of its own."""

    def __init__(self, trainer: Any, reporter: messages.OomReporter, options: Options) -> None:
        self._trainer = trainer
        self._reporter = reporter
        self._retries = options.on_oom != "raise" and not ranks.is_sharded(trainer)
        self._limits: dict[tuple[str, int], int] = {}  # after errors: units of a pass, by stage and loader
        self._loaders: dict[int, _LoaderPieces] = {}  # of the running evaluation
        self._savepoint: Savepoint | None = None  # of the running evaluation
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
        ranks.share_buffers_before_forward(trainer.strategy.model)  # first: the savepoint keeps what was shared
        savepoint = self._taken_savepoint()
        if loader_index not in self._loaders:
            self._loaders[loader_index] = _LoaderPieces(trainer, stage, loader_index)
        loader = self._loaders[loader_index]
        kept = retry_once(partial(KeptBatch, batch))
        exchanged = partial(_exchanged, before=ranks.collectives_run())
        run = partial(loader.run, lambda part: step(part, *others), batch, kept.batch, exchanged)
        while (outcome := attempt(run, _is_survived, self._limits.get(key))).failure is not None:
            failure = outcome.failure
            failed = loader.failed_units(kept.batch, failure, self._limits.get(key))
            fits = halved(failed)
            if fits is None:
                messages.give_up(trainer, stage, failure)
            messages.end_run_if(exchanged(), trainer, stage, messages.OTHERS_WAIT, failure)
            changed = retry_once(partial(undo, savepoint, [kept]))
            messages.end_run_if(changed, trainer, stage, messages.CHANGED, failure)
            self._limits[key] = fits
            each = loader.samples_of_unit
            self._reporter.report(self._reporter.survived(stage, failed * each, fits * each), _RESULT)
        return outcome.result

    def _taken_savepoint(self) -> Savepoint:
        """Return the savepoint, taken now; as an evaluation begins, also forget what was known of the one before."""
        if self._savepoint is None or loaders.batches_begun(self._trainer) == 1:
            results = self._trainer._results
            if results is None:  # in prediction
                results = {}
            self._savepoint = retry_once(partial(Savepoint, self._trainer.lightning_module, lambda: results))
            self._loaders = {}  # they may have been loaded again
        retry_once(self._savepoint.take)
        return self._savepoint


class _LoaderPieces:
    """Runs the batches of one loader of an evaluation, whole or in pieces."""

    def __init__(self, trainer: Any, stage: str, loader_index: int) -> None:
        self._trainer = trainer
        self._stage = stage
        found, combine = loaders.loaders_of(trainer, loader_index)
        self._cutter = BatchCutter(
            list(map(KnownSamples, found)), combine, loaders.BatchTransfer(trainer, loader_index)
        )
        self._largest_batch = 0  # samples of it so far
        self.samples_of_unit = 1  # of the largest loader, in a unit of the batch that was counted last
        self._pass_size = 0  # units of the last pass that has begun; 0 if they were not counted

    def run(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        kept_batch: Any,
        exchanged: Callable[[], str | None],
        limit: int | None,
    ) -> Any:
        """Run the step on a batch, or on pieces of its copy that are within the ``limit`` which errors have left."""
        self._pass_size = 0
        sizes: Sequence[int] = WHOLE
        if limit is not None:
            with suppress(LayoutError):  # one that cannot be cut may fit as a whole
                units = self._count(kept_batch)
                self._largest_batch = max(self._largest_batch, units * self.samples_of_unit)
                sizes = micro_batch_sizes(units, limit)
        in_pieces = len(sizes) > 1
        # A rank that repeats a step logs after it, so that no value is exchanged twice.
        logs_after_steps = in_pieces or self._trainer.world_size > 1
        pieces = Pieces(self._trainer._results if logs_after_steps else None, self._largest_batch)
        for piece, size, _ in cut_in_pieces(self._cutter, kept_batch if in_pieces else batch, sizes):
            self._pass_size = size
            with pieces.piece(samples=size * self.samples_of_unit, share=float(size), units=size):
                pieces.add(step(piece))
            if in_pieces and exchanged():  # other ranks run one collective a batch, this one would run more
                raise messages.out_of_memory(self._trainer, self._stage, messages.OTHERS_WAIT, messages.EXCHANGES)
        self._pass_size = sizes[0]  # an error in merging, which needs all outputs, counts as one of the largest piece
        return pieces.finish()

    def _count(self, batch: Any) -> int:
        """Return the units of a batch: its samples or, of several loaders, parts with samples of each."""
        units = self._cutter.count(batch)
        self.samples_of_unit = self._cutter.weight(batch, units) // max(1, units)
        return units

    def failed_units(self, batch: Any, failure: Exception, limit: int | None) -> int:
        """Return the units of the pass that failed within the ``limit``; raise an error if the batch cannot be cut."""
        try:
            units = int(retry_once(partial(self._count, batch)))
        except LayoutError as why:
            raise messages.out_of_memory(self._trainer, self._stage, "({memory}). {what}", why) from failure
        if self._pass_size > 1:
            return self._pass_size
        return min(units, limit or units)  # one sample is no reason to give up while other pieces have two


def _exchanged(*, before: int) -> str | None:
    """Return why other ranks wait for this one, if it has begun collectives since there were so many ``before``."""
    return None if ranks.collectives_run() == before else messages.EXCHANGES


def _is_survived(error: Exception) -> bool:
    return not isinstance(error, UserError) and may_be_out_of_memory(error)
