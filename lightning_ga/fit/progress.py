"""Cut epochs as schedule and limit say, and keep the place of a fit in its data, across checkpoints and resumes."""

from dataclasses import dataclass, replace
from typing import Any

from lightning_ga.compat import dataloaders, intervals, loops, ranks
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.accumulation import AccumulationPlan, cut_further
from lightning_ga.plan.checkpoint import Position, RunState
from lightning_ga.plan.config import Request
from lightning_ga.plan.lengths import plan_of_batches
from lightning_ga.plan.schedule import Growth
from lightning_ga.plan.windows import Chunk, GrowingEpoch


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """How the full windows of one epoch are cut."""

    fed: AccumulationPlan  # by the loader
    plan: AccumulationPlan  # in the end: further than that if batches are cut in the step


def plan_epoch(
    source: TrainingSource, request: Request, place: Position, *, micro_batch: int | None, windows_done: int
) -> PlannedEpoch:
    """Cut an epoch; in whole windows while the limit is unknown, so that optimizer steps are counted rightly.

    While the limit is unknown, ``micro_batch`` is ``None`` and the loader yields nothing. ``place`` is in the epoch, of
    which an earlier run has trained on ``windows_done``.
    """
    epoch = place.epoch
    effective = effective_batch(source, request, epoch, micro_batch=micro_batch)
    before = place.steps_before, place.samples_before, windows_done
    growth = _growth(source, request, epoch, micro_batch=micro_batch, before=before)
    if source.cut_in_step and not source.reads_windows:
        largest = source.recipe.largest_batch(epoch)
    elif micro_batch is not None and not source.cut_in_step:
        largest = micro_batch
    elif request.factor(epoch) is None:
        largest = effective or source.recipe.effective(epoch)
    else:
        largest = recipe_micro_batch(source, request, epoch)
    done = place.samples_done // source.sharded_ranks
    fed = source.arrange(epoch, growth or effective, largest, samples_done=done, enabled=micro_batch is not None)
    return _planned(source, fed, micro_batch)


def plan_window(source: TrainingSource, window: int, *, micro_batch: int | None) -> PlannedEpoch:
    """Return how a window of an epoch in which they grow is cut, and full ones of its size."""
    plan = source.epoch_plan
    assert isinstance(plan, GrowingEpoch)
    chunks = [tuple(chunk.count for chunk in plan.chunks(window, rank)) for rank in range(plan.world_size)]
    chunks *= source.sharded_ranks
    fed = AccumulationPlan(sum(map(sum, chunks)), len(chunks), max(map(max, chunks)), len(chunks[0]), tuple(chunks))
    return _planned(source, fed, micro_batch)


def _planned(source: TrainingSource, fed: AccumulationPlan, micro_batch: int | None) -> PlannedEpoch:
    if micro_batch is None or not source.cut_in_step:
        return PlannedEpoch(fed, fed)
    cut = cut_further(fed, micro_batch=micro_batch)
    if source.size_limits is not None:
        of, limits = source.size_limits
        cut = plan_of_batches(cut, limits.lowered(micro_batch, of=of), batches=fed.factor)
    return PlannedEpoch(fed, cut)


def _growth(
    source: TrainingSource, request: Request, epoch: int, *, micro_batch: int | None, before: tuple[int, int, int]
) -> Growth | None:
    """Return the effective batches of an epoch where a schedule by window gives them."""
    return request.growth(_factor_counts(source, request, epoch, micro_batch), source.world_size, *before)


def effective_batch(source: TrainingSource, request: Request, epoch: int, *, micro_batch: int | None) -> int | None:
    """Return the effective batch size of an epoch, its largest; ``None`` keeps the recipe's windows."""
    if (largest := source.largest_window(epoch)) is not None:
        return largest
    asked = request.effective(epoch)
    if asked is not None:
        source.check_effective(asked)
    micro_batch = _factor_counts(source, request, epoch, micro_batch)
    effective = request.effective_batch(epoch, micro_batch, source.world_size)
    return None if effective is None else source.recipe.within(effective, epoch)


def check_growth(source: TrainingSource, request: Request, epoch: int) -> None:
    """Refuse an effective batch of a schedule by window that cannot be shared out, before any work is lost."""
    schedule = request.by_window
    if schedule is not None and schedule.unit == "samples":
        source.check_counted(repr(schedule))
    if schedule is None or schedule is request.factor:
        return
    for effective in sorted(set(schedule.counts)):
        source.check_effective(effective)
        source.recipe.windows(epoch, effective)


def _factor_counts(source: TrainingSource, request: Request, epoch: int, micro_batch: int | None) -> int:
    """Return the samples that a factor counts on one rank."""
    if source.cut_in_step:
        micro_batch = source.recipe.largest_batch(epoch)
    elif micro_batch is None:
        micro_batch = recipe_micro_batch(source, request, epoch)
    return min(micro_batch, source.recipe.largest_batch(epoch)) if source.keeps_groups else micro_batch


def recipe_micro_batch(source: TrainingSource, request: Request, epoch: int) -> int:
    """Return the recipe's own micro-batch, or what the user fixed."""
    return request.capped(source.recipe.largest_batch(epoch))


def optimizer_steps(
    source: TrainingSource, request: Request, epochs: range, *, micro_batch: int | None, max_steps: int
) -> int | None:
    """Count the optimizer steps of a training; ``None`` if the data have no known end.

    A ``max_steps`` of -1 is no limit, as in ``Trainer(max_steps=…)``.
    """
    total = samples = 0
    for epoch in epochs:
        effective = effective_batch(source, request, epoch, micro_batch=micro_batch)
        growth = _growth(source, request, epoch, micro_batch=micro_batch, before=(total, samples, 0))
        found = source.steps_of(epoch, growth or effective)
        if found is None:
            return None
        total, samples = total + found[0], samples + found[1]
    return total if max_steps == -1 else min(total, max_steps)


class Progress:
    """The place of a fit in its data, in samples of all ranks and in batches of the recipe."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        seed, shuffles = ranks.shared_seed(trainer), dataloaders.shares_shuffled(trainer)
        steps, samples = trainer.global_step, loops.samples_before(trainer)
        self.position = Position(seed, loops.training_epoch(trainer), 0, 0, shuffles, steps, samples)
        self.restored: RunState | None = None  # what was read from a checkpoint
        self._short = 0  # samples by which this rank's micro-batches of the window held less than planned
        self._passed = 0, 0  # batches of the recipe after the last micro-batch: of its epoch, and before that
        self.within_batch = False  # whether the last micro-batch ended within a batch of the recipe
        self._validates = True  # whether the loop validates at all

    def restore(self, state: RunState) -> None:
        """Go on where a checkpoint was written."""
        self.restored, self.position = state, state.position

    def place(self, epoch: int) -> Position:
        """Return the place in an epoch: at its start, if it is another than the position's."""
        position = self.position
        if epoch == position.epoch:
            return position
        return replace(
            position,
            epoch=epoch,
            samples_done=0,
            steps_before=self._trainer.global_step,
            samples_before=self.samples_seen,
            samples_short=0,
        )

    def windows_done(self, epoch: int) -> int:
        """Return the optimizer steps of an epoch that an earlier run has made."""
        steps: int = self._trainer.global_step
        return max(0, steps - self.place(epoch).steps_before)

    @property
    def samples_seen(self) -> int:
        """The samples that training has seen from its start on, over all ranks."""
        return self.position.samples_before + self.position.samples_done - self.position.samples_short

    def take_over(self, source: TrainingSource, recipe_factor: int) -> bool:
        """Take the place over from a restored loop; return whether it is within the epoch that goes on.

        A checkpoint of stock Lightning holds no other place than the loop's, in batches of the recipe.
        """
        trainer, epoch = self._trainer, loops.training_epoch(self._trainer)
        if loops.restarts_in_epoch(trainer):
            loops.reopen_epoch(trainer)
            epoch = loops.training_epoch(trainer)
            if self.restored is None:
                done, before = loops.batches_done(trainer)
                samples = source.samples_of(done - done % recipe_factor) * source.sharded_ranks
                each = source.recipe.total(epoch)
                seen = source.samples_of(before) if each is None else each * epoch
                self.position = replace(
                    self.position,
                    epoch=epoch,
                    samples_done=samples,
                    batches_before=before,
                    steps_before=max(0, trainer.global_step - done // recipe_factor),
                    samples_before=seen * source.sharded_ranks,
                )
        within = self.restored is not None or self.position.samples_done > 0
        return within and self.position.epoch == epoch

    def enter(self, source: TrainingSource, epoch: int) -> None:
        """Begin an epoch with a whole batch; if it is another one, count the recipe's batches of those before it."""
        self.within_batch, self._validates = False, bool(self._trainer.enable_validation)
        if epoch == self.position.epoch:
            return
        passed = source.epoch_batches
        if passed is None:  # a stream: as many as it turned out to hold
            passed = source.recipe_batches(self.position.samples_done // source.sharded_ranks)
        before = self.position.batches_before + passed * (epoch - self.position.epoch)
        if source.streams and source.sharded_ranks > 1:  # each rank knows of its own
            short = ranks.sum_over_ranks(self._trainer, self.position.samples_short / source.sharded_ranks)
            self.position = replace(self.position, samples_short=round(short))
        self.position = replace(self.place(epoch), batches_before=before)

    def resume(self, source: TrainingSource, *, same_epoch: bool) -> None:
        """Let a restored loop go on at its sample, in this run's micro-batches."""
        trainer, done = self._trainer, source.epoch_plan.done
        if not loops.restarts_in_epoch(trainer):
            return
        if not same_epoch:
            loops.begin_next_epoch(trainer)
        if source.keeps_place or not same_epoch or done == source.length:
            loops.expect_positions_to_be_kept()
        loops.move_to_micro_batch(trainer, done, same_epoch=same_epoch)
        if done:
            before, after = source.batches_after(done - 2), source.batches_after(done - 1)
            self._passed = after, self.position.batches_before
            self._schedule_validation(source, before, after)
        loops.align_logger_steps(trainer)

    def advance(self, source: TrainingSource, chunk: Chunk, *, window_is_over: bool) -> None:
        """Keep the place after a micro-batch, and let validation run when the recipe says."""
        if window_is_over:
            done, short = chunk.window_end * source.sharded_ranks, self.position.samples_short
            if source.streams:  # whose end is not known in advance
                self._short += chunk.window_end - chunk.done
                short, self._short = short + self._short * source.sharded_ranks, 0
            self.position = replace(self.position, samples_done=done, samples_short=short)
        is_first = loops.micro_batch_index(self._trainer) == 0
        before, after = 0 if is_first else self._passed[0], source.recipe_batches(chunk.done)
        self._passed = after, self.position.batches_before
        self.within_batch = after == before
        if self._validates:
            self._schedule_validation(source, before, after)

    def note(self, planned: int, samples: int) -> None:
        """Note how many samples a micro-batch of a stream holds."""
        self._short += planned - samples

    def recipe_counts(self) -> tuple[int, int]:
        """Return the batches of the recipe that were trained on: in the loop's epoch, and before it."""
        started = loops.batches_processed(self._trainer) > 0  # the loop counts a new epoch only with its first batch
        return self._passed if started else (0, self.position.batches_before)

    def _schedule_validation(self, source: TrainingSource, before: int, after: int) -> None:
        offset = self.position.batches_before if self._trainer.check_val_every_n_epoch is None else 0
        intervals.validate_when_due(self._trainer, offset + before, offset + after, source.epoch_batches)
