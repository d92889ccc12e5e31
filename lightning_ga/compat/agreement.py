"""Numbers that all ranks agree on, and a count of their collectives: the user's own communication shows in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_OWN: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()  # by the default process group, one of this rank alone


def shared_seed(trainer: Any) -> int:
    """Return rank 0's seed on every rank: that of ``seed_everything``, or else torch's."""
    return int(trainer.strategy.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))))


def largest_over_ranks(trainer: Any, value: int) -> int:
    """Return the largest of one number over all ranks."""
    return int(_reduced(trainer, torch.tensor(value), "max"))


def smallest_over_ranks(trainer: Any, value: int) -> int:
    """Return the smallest of one number over all ranks."""
    return -largest_over_ranks(trainer, -value)


def sum_over_ranks(trainer: Any, value: float) -> float:
    """Return one number summed over all ranks."""
    return float(_reduced(trainer, torch.tensor(value, dtype=torch.float64), "sum"))


def of_all_ranks(trainer: Any, value: Any) -> list[Any]:
    """Return what each rank gives."""
    found = [value] * int(trainer.world_size)
    if is_distributed(trainer):
        dist.all_gather_object(found, value)
    return found


def is_distributed(trainer: Any) -> bool:
    """Return whether gradients are averaged over several ranks."""
    return int(trainer.world_size) > 1


def is_sharded(trainer: Any) -> bool:
    """Return whether each rank holds only a part of the model, so that no rank can run a step, or fail, alone."""
    return any(base.__name__ in ("FSDPStrategy", "ModelParallelStrategy") for base in type(trainer.strategy).__mro__)


@contextmanager
def alone() -> Iterator[None]:
    """Return a context in which this rank is a world of its own, so that what it runs by itself waits for no other.

    Collectives without a group of the user's own take the default one (``distributed_c10d.py`` of torch 2.15).
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    world: Any = dist.distributed_c10d._world
    group = world.default_pg
    if group not in _OWN:
        _OWN[group] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    world.default_pg = _OWN[group]
    try:
        yield
    finally:
        world.default_pg = group


def collectives_run() -> int:
    """Return how many collectives this rank has begun in all process groups.

    Process groups number their collectives, in Python as in C++ (``c10d/Backend.hpp``, ``getSequenceNumberForGroup``).
    """
    return sum(map(sequence_number, dist.distributed_c10d._world.pg_map)) if dist.is_available() else 0


def sequence_number(group: Any) -> int:
    """Return how many collectives this rank has begun in a process group."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that keeps none
        return 0


def _reduced(trainer: Any, value: torch.Tensor, operation: str) -> torch.Tensor:
    if not is_distributed(trainer):
        return value
    reduced: torch.Tensor = trainer.strategy.reduce(value.to(trainer.strategy.root_device), reduce_op=operation)
    return reduced
