"""Cut epochs as the user's schedule and the limit say."""

from dataclasses import dataclass

from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.accumulation import AccumulationPlan, cut_further
from lightning_ga.plan.config import Request


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """How the full windows of one epoch are cut."""

    fed: AccumulationPlan  # by the loader
    plan: AccumulationPlan  # in the end: further than that if batches are cut in the step


def plan_epoch(
    source: TrainingSource, request: Request, epoch: int, *, micro_batch: int | None, samples_done: int
) -> PlannedEpoch:
    """Cut an epoch; in whole windows while the limit is unknown, so that optimizer steps are counted rightly.

    While the limit is unknown, ``micro_batch`` is ``None`` and the loader yields nothing. ``samples_done`` are those of
    the epoch that an earlier run has trained on, over all ranks.
    """
    effective = effective_batch(source, request, epoch, micro_batch=micro_batch)
    if source.cut_in_step:
        largest = source.recipe.largest_batch(epoch)
    elif micro_batch is not None:
        largest = micro_batch
    elif request.factor(epoch) is None:
        largest = effective or source.recipe.effective(epoch)
    else:
        largest = recipe_micro_batch(source, request, epoch)
    done = samples_done // source.sharded_ranks
    fed = source.arrange(epoch, effective, largest, samples_done=done, enabled=micro_batch is not None)
    if micro_batch is None or not source.cut_in_step:
        return PlannedEpoch(fed, fed)
    return PlannedEpoch(fed, cut_further(fed, micro_batch=micro_batch))


def effective_batch(source: TrainingSource, request: Request, epoch: int, *, micro_batch: int | None) -> int | None:
    """Return the effective batch size of an epoch; ``None`` keeps the recipe's windows."""
    asked = request.effective(epoch)
    if asked is not None:
        source.check_effective(asked)
    if source.cut_in_step:
        micro_batch = source.recipe.largest_batch(epoch)
    elif micro_batch is None:
        micro_batch = recipe_micro_batch(source, request, epoch)
    if source.keeps_groups:
        micro_batch = min(micro_batch, source.recipe.largest_batch(epoch))
    effective = request.effective_batch(epoch, micro_batch, source.world_size)
    return None if effective is None else source.recipe.within(effective, epoch)


def recipe_micro_batch(source: TrainingSource, request: Request, epoch: int) -> int:
    """Return the recipe's own micro-batch, or what the user fixed."""
    return request.capped(source.recipe.largest_batch(epoch))


def optimizer_steps(
    source: TrainingSource, request: Request, epochs: range, *, micro_batch: int | None, max_steps: int
) -> int | None:
    """Count the optimizer steps of a training; ``None`` if the data have no known end.

    A ``max_steps`` of -1 is no limit, as in ``Trainer(max_steps=…)``.
    """
    total = 0
    for epoch in epochs:
        effective = effective_batch(source, request, epoch, micro_batch=micro_batch)
        steps = source.recipe.windows(epoch, effective).count
        if steps is None:
            return None
        total += steps
    return total if max_steps == -1 else min(total, max_steps)
