"""Cut epochs as the user's schedule and the limit say."""

from dataclasses import dataclass

from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.accumulation import AccumulationPlan, cut_further
from lightning_ga.plan.checkpoint import Position
from lightning_ga.plan.config import Request
from lightning_ga.plan.lengths import plan_of_batches
from lightning_ga.plan.schedule import Growth
from lightning_ga.plan.windows import GrowingEpoch


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
