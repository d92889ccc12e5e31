"""Numbers that all ranks agree on.

Read in lightning 2.6.6 and 2.5.0; ``tests/compat`` fails when a name or an order that is relied on here changes.
"""

import os
from typing import Any

import torch


def shared_seed(trainer: Any) -> int:
    """Rank 0's seed, on every rank: that of ``seed_everything``, which spawned ranks begin with, or torch's."""
    return int(trainer.strategy.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))))


def largest_over_ranks(trainer: Any, value: int) -> int:
    """The largest of one number over all ranks."""
    if not is_distributed(trainer):
        return value
    largest = torch.tensor(value, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(largest, reduce_op="max"))


def smallest_over_ranks(trainer: Any, value: int) -> int:
    """The smallest of one number over all ranks."""
    return -largest_over_ranks(trainer, -value)


def is_distributed(trainer: Any) -> bool:
    """Whether gradients are averaged over several ranks."""
    return int(trainer.world_size) > 1


def is_sharded(trainer: Any) -> bool:
    """Whether ranks hold parts of the model, so that no rank can run a step alone, or fail alone without a hang."""
    return any(base.__name__ in ("FSDPStrategy", "ModelParallelStrategy") for base in type(trainer.strategy).__mro__)


def sum_over_ranks(trainer: Any, value: float) -> float:
    """One number summed over all ranks."""
    if not is_distributed(trainer):
        return value
    total = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(total, reduce_op="sum"))
