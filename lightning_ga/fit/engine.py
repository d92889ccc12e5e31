"""Run batches so that an out-of-memory error costs a retry, not the run.

The unit of undo is a window: the batches between two optimizer steps, or one batch of evaluation. Where a window
begins, a savepoint is taken. If memory runs out anywhere in it, the savepoint is restored and the window runs again
from its first batch, in smaller pieces (``fit/window_run.py``). No state is saved for a single pass.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from lightning_ga.batch.layout import BatchSlices
from lightning_ga.compat import dataloaders, logs, loops, ranks
from lightning_ga.compat.ranks import Ranks
from lightning_ga.compat.reduction import GradientReducer
from lightning_ga.errors import UserError
from lightning_ga.fit.chunks import ChunkedModules
from lightning_ga.fit.oom_messages import EXCHANGES, OTHERS_WAIT, OomReporter, fewer_samples_than_ranks, of_rank
from lightning_ga.fit.parts import Move, Part, StageBatches, tensors_of
from lightning_ga.loading.padding import SizedSlices
from lightning_ga.loading.reader import BatchReader
from lightning_ga.memory.allocator import RetryWatch
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import Outcome, attempt, is_ambiguous_out_of_memory, is_out_of_memory, retry_once
from lightning_ga.probe.training import hooks_apart
from lightning_ga.snapshot.random_numbers import RandomState
from lightning_ga.snapshot.savepoint import Savepoint


class Engine:
    """Runs the batches of all stages, and knows how large a pass of each may be.

    Without ``retries`` an out-of-memory error ends the run: only batches that are known to be too large run in pieces.
    """

    def __init__(
        self, trainer: Any, reporter: OomReporter, *, retries: bool, training: StageBatches, evaluation: StageBatches
    ) -> None:
        self.trainer, self.module, self.reporter = trainer, trainer.lightning_module, reporter
        self._wanted = retries
        self._training, self._evaluation = training, evaluation
        self.is_active = True  # whether errors are acted upon
        self.allocator = RetryWatch(trainer.strategy.root_device)
        self.distributed = ranks.is_distributed(trainer)
        self.policy = Ranks.of(trainer).in_evaluation(wanted=retries)
        self.reducer: GradientReducer | None = None  # its collectives are not run again by a retry
        self.has_validated = False  # since the last batch of training
        self.lockstep: set[str] = set()  # stages in which ranks wait for each other
        self.undecided: set[str] = set()  # stages whose first batch has yet to show whether they do
        self.move: Move | None = None  # of pieces, if the current batch stays on the host
        self.mover: Move = lambda batch: batch  # moves any batch of the current loader
        self._has_host = trainer.strategy.root_device.type != "cpu"
        self.host: Any = None  # the current batch on the host, if that is another than on the device
        self.not_moved: Exception | None = None  # the error of its transfer
        self.watches_batches = False  # whether hooks may change a batch after its transfer
        self._moved: list[tuple[int, int]] = []  # the tensors of the current batch after its transfer
        self._unmovable: set[str] = set()  # stages in which there was no memory for the hooks of a transfer
        self.limits: dict[str, int] = {}
        self.chunked: ChunkedModules | None = None  # submodules that run in chunks over whole batches of training
        self._readers: dict[tuple[str, int], BatchReader] = {}
        self._taps: dict[str, logs.LogTap] = {}
        self._savepoints: dict[bool, Savepoint] = {}
        self._changing: Collection[str] = ()  # names of tensors that steps change

    def begin_training(self, *, cut_in_step: bool) -> None:
        """Look at the module anew, as it has been moved, and make what training keeps on the device."""
        trainer, by_hand = self.trainer, ranks.needs_averaging_by_hand(self.trainer)
        self._savepoints.clear()
        self.policy = Ranks.of(trainer).in_training(wanted=self._wanted, cut_in_step=cut_in_step, must_average=by_hand)
        self.reducer = GradientReducer(ranks.distributed_module(trainer)) if self.policy.by_hand else None

    def guard_training(self, changing: Collection[str]) -> None:
        """Act upon errors of training from here on; its step changes the tensors with the names ``changing``."""
        trainer, policy = self.trainer, self.policy
        if policy.by_hand:
            ranks.take_over(trainer)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        weights = trainer.lightning_module.named_parameters()
        self._savepoints.clear()
        self._changing = {*changing}.difference(name for name, weight in weights if id(weight) in updated)
        self.lockstep |= {"training"} if policy.lockstep else set()
        self.undecided = {"training"} if policy.undecided else set()

    def batches(self, stage: str) -> StageBatches:
        """Return what is known of the batches of a stage."""
        return self._training if stage == "training" else self._evaluation

    # --- limits --------------------------------------------------------------------------------

    def limit(self, stage: str) -> int | None:
        """Return the most samples of a pass; ``None`` if whole batches are tried."""
        return self.limits.get(stage)

    def lower(self, stage: str, samples: int) -> None:
        """Run no more samples at once from here on."""
        self.limits[stage] = min(samples, self.limits.get(stage, samples))
        if (chunked := self.chunked_in(stage)) is not None:
            chunked.size.samples, chunked.size.keep = min(samples, chunked.size.samples or samples), 0

    def chunked_in(self, stage: str) -> ChunkedModules | None:
        """Return the submodules that run in chunks in a stage: its batches run whole, limits are those of chunks."""
        return self.chunked if stage == "training" else None

    def pieces(self, stage: str, part: Part) -> int:
        """Return in how many pieces a batch runs: the same number on all ranks if they wait for each other."""
        limit = self.limits.get(stage)
        if limit is None or self.chunked_in(stage) is not None:
            return 1
        samples, (size, of) = self._count(stage, part), self.batches(stage).relative_size(part.number)
        pieces = max(1, -(-samples // max(1, limit * of // size)))
        slices = self.slices(stage, part) if self.reader(stage, part.loader).cuts_by_size else None
        if isinstance(slices, SizedSlices):
            pieces = len(slices.pieces(self.reader(stage, part.loader).limits(limit)[0]))
        if stage not in self.lockstep and stage not in self.undecided:
            return pieces
        agreed = ranks.largest_over_ranks(self.trainer, pieces)
        if agreed <= max(1, samples):
            return agreed
        if stage not in self.lockstep:
            return pieces
        raise fewer_samples_than_ranks(agreed, samples)

    def finish(self, stage: str) -> None:
        """Forget a batch that has run."""
        self.undecided.discard(stage)
        self.host = self.move = self.not_moved = None

    # --- transfer ------------------------------------------------------------------------------

    def to_device(self, move: Move, batch: Any, loader: int = 0) -> Any:
        """Move a batch to the device; one that is too large stays on the host and is moved in pieces."""
        if not self.is_active:  # a batch of a trial: what is known of training's stays
            return move(batch)
        self.move = self.not_moved = None
        self.host, self.mover = batch if self._has_host else None, move
        if not self._has_host and not self.hooks_move_batches:  # nothing is moved, so nothing can fail
            moved = move(batch)
        else:
            stage = loops.stage(self.trainer)
            if self.limits and self._stays_on_host(batch, stage, loader):
                self.move = move
                return batch
            before = RandomState() if self.hooks_move_batches and self.policy.retries else None
            outcome = self.catch(stage, move, batch)
            if outcome.failure is not None:
                if before is not None:  # hooks of the transfer may draw numbers
                    before.restore()
                    self._unmovable.add(stage)
                self.move, self.not_moved = move, outcome.failure
                return batch
            moved = outcome.result
        if self.watches_batches:
            self._moved = tensors_of(moved)
        if moved is batch:  # some batches move by changing themselves (``Data.to`` of PyG)
            self.host = None
        return moved

    def is_changed(self, batch: Any) -> bool:
        """Return whether hooks have changed the current batch since it was moved."""
        return self.move is None and tensors_of(batch) != self._moved

    def moves_whole(self, stage: str) -> bool:
        """Return whether batches are moved before they are cut: hooks of the transfer see them whole, if that fits."""
        return self.hooks_move_batches and stage not in self._unmovable

    def move_whole(self, stage: str, move: Move, batch: Any) -> Any:
        """Move a batch that is cut afterwards; if memory runs out, later ones are cut before they are moved."""
        self._unmovable.add(stage)
        moved = move(batch)
        self._unmovable.discard(stage)
        return moved

    @cached_property
    def hooks_move_batches(self) -> bool:
        """Whether hooks of the user's own take part in the transfer: they get whole batches while there is memory."""
        return dataloaders.hooks_move_batches(self.trainer)

    def _stays_on_host(self, batch: Any, stage: str, loader: int) -> bool:
        limit = self.limits.get(stage)
        if limit is None or self.moves_whole(stage) or self.chunked_in(stage) is not None:
            return False
        expected = self.batches(stage).samples_of_next(batch, self.reader(stage, loader))
        return self._count(stage, Part(batch, 0, self.mover, loader, expected)) > limit

    # --- samples -------------------------------------------------------------------------------

    def reader(self, stage: str, loader: int = 0) -> BatchReader:
        """Return what counts and cuts the batches of a loader."""
        key = stage, loader
        if key not in self._readers:
            source = self.batches(stage).batch_source(loader)
            self._readers[key] = BatchReader(dataloaders.BatchTransfer(self.trainer, loader), source)
        return self._readers[key]

    def slices(self, stage: str, part: Part) -> BatchSlices:
        """Return what cuts a batch; a ``LayoutError`` says why it cannot be cut."""
        if self.chunked_in(stage) is not None:
            return BatchSlices(part.expected or 1, lambda *_: part.batch)
        reader, on_host = self.reader(stage, part.loader), part.move is not None
        fetch = partial(self.batches(stage).fetch, part.number, part.loader)
        with self._reading(stage, part):
            cut = partial(reader.slices, part.batch, expected=part.expected, on_host=on_host, samples=fetch)
            slices: BatchSlices = self.retry_once(cut)
        return slices

    def _count(self, stage: str, part: Part) -> int:
        """Return how many samples a batch holds: those expected, if that is known."""
        if part.expected is not None:
            return part.expected
        with self._reading(stage, part):
            return self.reader(stage, part.loader).count(part.batch, on_host=part.move is not None)

    @contextmanager
    def _reading(self, stage: str, part: Part) -> Iterator[None]:
        """Return a context in which samples may be read so that nothing is left of it: hooks take part."""
        if self.reader(stage, part.loader).is_read(on_host=part.move is not None):
            yield
            return
        with self.suspended(), hooks_apart(self.trainer):
            yield

    # --- errors --------------------------------------------------------------------------------

    def catch(self, stage: str, run: Callable[..., Any], *arguments: Any) -> Outcome:
        """Run a part of a step; if memory runs out, free what that keeps alive.

        Raises:
            UserError: If memory runs out and other ranks would wait for a retry.
        """
        before = self.collectives() if self.distributed else 0
        try:
            outcome = attempt(run, self._acts_upon, *arguments)
        finally:
            if self.distributed and self.collectives() != before:
                self.lockstep.add(stage)
        # With ``whole=`` a retry repeats the whole pass: others wait only if an exchange has already begun.
        waits_for_it = self.chunked_in(stage) is None or (self.distributed and self.collectives() != before)
        if outcome.failure is not None and (waits_for_it or self.policy.refusal):
            self.raise_if_others_wait(stage, outcome.failure)
        return outcome

    def raise_if_others_wait(self, stage: str, failure: Exception) -> None:
        """End here if other ranks would wait for what a retry does."""
        why = self.policy.refusal or (EXCHANGES if stage in self.lockstep else None)
        if why is not None and is_ambiguous_out_of_memory(failure):
            raise failure
        if why is not None:
            raise self.error(stage, OTHERS_WAIT, why) from failure

    def retry_once(self, run: Callable[[], Any]) -> Any:
        """Run it once more if memory runs out: the step's memory is free then, and it undoes itself if it fails.

        Not if it has exchanged values with other ranks: they would not do that again.
        """
        before = self.collectives()
        return retry_once(run, lambda error: self._acts_upon(error) and self.collectives() == before)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which nothing is caught: a probe wants to see its own errors."""
        before, self.is_active = self.is_active, False
        try:
            yield
        finally:
            self.is_active = before
            self.allocator.begin_again()  # what ran was not training

    def _acts_upon(self, error: Exception) -> bool:
        if isinstance(error, UserError):  # it says already what to do about the error that it was raised from
            return False
        if is_out_of_memory(error):
            return self.policy.retries or self.policy.refusal is not None
        return self.policy.retries and is_ambiguous_out_of_memory(error)

    def collectives(self) -> int:
        """Return how many collectives this rank has begun but for those that average gradients."""
        if not self.distributed:
            return 0
        return ranks.collectives_run() - (0 if self.reducer is None else self.reducer.collectives)

    # --- state ---------------------------------------------------------------------------------

    def savepoint(self, stage: str) -> Savepoint:
        """Return what keeps the state of a stage: one of training, and one of all others, which may come within it."""
        key = stage == "training"
        if key not in self._savepoints:
            make = partial(Savepoint, self.trainer.lightning_module, self._changing)
            self._savepoints[key] = self.retry_once(make)
        return self._savepoints[key]

    def memory_kept(self) -> Iterator[Tensor]:
        """Yield what is kept on the device while batches run."""
        if self.policy.retries:
            yield from self.savepoint("training").tensors()
        if self.reducer is not None:
            yield from self.reducer.memory()

    def tap(self, stage: str) -> logs.LogTap:
        """Return what takes the values that a batch of a stage logs, as the batch begins."""
        results = logs.results_of(self.trainer, stage)
        tap = self._taps.get(stage)
        if tap is None or tap.results is not results:
            tap = self._taps[stage] = logs.LogTap(results)
        tap.begin()
        tap.batch_sizes = self.batches(stage).logged_batch_sizes
        return tap

    def stop(self) -> None:
        """Give the loops their own ``log`` back."""
        for tap in self._taps.values():
            tap.release()
        self._taps.clear()

    # --- what is told --------------------------------------------------------------------------

    def error(self, stage: str, sentence: str, what: object = "") -> UserError:
        """Return the error for memory that ran out where there is no way on: a sentence of ``fit/oom_messages.py``."""
        text = f"Memory ran out in {stage} {sentence.format(what=what, memory=self.memory())}"
        return of_rank(UserError(text), self.trainer.world_size)

    def memory(self) -> str:
        """Describe the device's memory."""
        return describe_memory(self.trainer.strategy.root_device)
