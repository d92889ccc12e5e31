"""The micro-batches of an epoch by their place in it, where the package goes window by window."""

from lightning_ga.plan.windows import Chunk, EpochPlan


def chunk_of(plan: EpochPlan, index: int, rank: int = 0) -> Chunk:
    """The ``index``-th micro-batch of the epoch on one rank."""
    return plan.window(index // plan.factor).chunk(index % plan.factor, rank)


def samples_after(plan: EpochPlan, index: int) -> int:
    """The samples that are done once each rank has done the ``index``-th micro-batch of the epoch."""
    return plan.window(index // plan.factor).samples_after(index % plan.factor)
