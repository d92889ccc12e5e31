"""The micro-batches of an epoch by their place in it, where the package goes window by window."""

from lightning_ga.plan.windows import Chunk, EpochPlan


def chunk_of(plan: EpochPlan, index: int, rank: int = 0) -> Chunk:
    """The ``index``-th micro-batch of the epoch on one rank."""
    return plan.chunks(index // plan.factor, rank)[index % plan.factor]


def samples_after(plan: EpochPlan, index: int) -> int:
    """The samples that are done once each rank has done the ``index``-th micro-batch of the epoch."""
    return chunk_of(plan, index, rank=0).done
