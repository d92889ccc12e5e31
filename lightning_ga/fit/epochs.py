"""Cut epochs as the user's schedule and the limit say."""

from dataclasses import dataclass

from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.accumulation import AccumulationPlan, cut_further
from lightning_ga.plan.config import Request


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """How one epoch is cut."""

    fed: AccumulationPlan  # how the loader cuts its full windows
    plan: AccumulationPlan  # how full windows are cut in the end: further than that where batches are cut in the step


def plan_epoch(
    source: TrainingSource, request: Request, epoch: int, *, micro_batch: int | None, samples_done: int
) -> PlannedEpoch:
    """Cut an epoch; in whole windows while the limit is unknown, so that optimizer steps are counted rightly.

    Args:
        source: The training data; it is arranged for the epoch.
        request: What the user asked for.
        epoch: The epoch.
        micro_batch: Most samples of a micro-batch; ``None`` while that is unknown: the loader yields nothing then.
        samples_done: Samples of the epoch that an earlier run has trained on, over all ranks.
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
    cut = source.cut_in_step and micro_batch is not None
    return PlannedEpoch(fed, cut_further(fed, micro_batch=micro_batch) if cut and micro_batch else fed)


def effective_batch(source: TrainingSource, request: Request, epoch: int, *, micro_batch: int | None) -> int | None:
    """Return the effective batch size of an epoch; ``None`` keeps the recipe's windows.

    Args:
        source: The training data.
        request: What the user asked for.
        epoch: The epoch.
        micro_batch: Most samples of a micro-batch; ``None`` while that is unknown.
    """
    asked = request.effective(epoch)
    if asked is not None:
        source.check_effective(asked)
    if source.cut_in_step:
        micro_batch = source.recipe.largest_batch(epoch)
    elif micro_batch is None:
        micro_batch = recipe_micro_batch(source, request, epoch)
    if source.keeps_groups:
        micro_batch = min(micro_batch, source.recipe.largest_batch(epoch))
    return request.effective_batch(epoch, micro_batch, source.world_size)


def recipe_micro_batch(source: TrainingSource, request: Request, epoch: int) -> int:
    """Return the recipe's own micro-batch, or what the user fixed."""
    return request.capped(source.recipe.largest_batch(epoch))


def optimizer_steps(
    source: TrainingSource, request: Request, epochs: range, *, micro_batch: int | None, max_steps: int
) -> int | None:
    """Count the optimizer steps of a training; ``None`` where the data have no known end.

    Args:
        source: The training data.
        request: What the user asked for.
        epochs: All epochs.
        micro_batch: Most samples of a micro-batch; ``None`` while that is unknown.
        max_steps: ``Trainer(max_steps=…)``; -1 for no limit.
    """
    total = 0
    for epoch in epochs:
        effective = effective_batch(source, request, epoch, micro_batch=micro_batch)
        steps = source.recipe.windows(epoch, effective).count
        if steps is None:
            return None
        total += steps
    return total if max_steps == -1 else min(total, max_steps)
