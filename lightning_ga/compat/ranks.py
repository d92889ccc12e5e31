"""Values that all ranks agree on, whether a rank can retry alone, and a process group for a rank that runs alone.

Tested in tests/compat/test_rank_policy.py and tests/integration/test_ranks.py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_ga.compat import patching

T = TypeVar("T")
_SINGLE_GROUPS: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()  # by the default process group: one of one rank
_begun_here = [0]  # collectives that this package has begun
_OTHER_EXCHANGES = ("mixed_precision", "buffer_hook", "skip_all_reduce_unused_params", "_use_python_reducer")


def obstacle(trainer: Any) -> str | None:
    """Return why a rank cannot run a window again by itself; ``None`` if it can."""
    module = trainer.strategy.model
    name = type(trainer.strategy).__name__
    if is_sharded(trainer):
        return f"{name} shards the model over ranks"
    if trainer.world_size > 1:
        if any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
            return "SyncBatchNorm layers let ranks wait for each other in forward passes"
        if any(map(_measures_time, trainer.callbacks)):
            return "max_time= or train_time_interval= lets ranks wait for each other after every batch"
    if isinstance(module, DistributedDataParallel):
        is_unknown = _has_unknown_exchange(module)
    else:
        is_unknown = trainer.world_size > 1
    return f"{name} exchanges gradients in a way of its own" if is_unknown else None


def _has_unknown_exchange(module: DistributedDataParallel) -> bool:
    """Return whether gradients are exchanged otherwise than ``reduction.py`` can do again."""
    if any(getattr(module, option, False) for option in _OTHER_EXCHANGES):
        return True
    return module.static_graph and bool(module._comm_hooks)


def _measures_time(callback: Any) -> bool:
    return type(callback).__name__ == "Timer" or bool(getattr(callback, "_train_time_interval", 0))


def gradients_are_private(trainer: Any) -> bool:
    """Return whether nothing but this package and the optimizers reads gradients: no reduction of a strategy's own."""
    module = trainer.strategy.model
    if isinstance(module, DistributedDataParallel):
        # As ``Exchange.by_hand``: with an obstacle or a hook, DDP's own reducer reads them.
        return obstacle(trainer) is None and not module._comm_hooks
    return isinstance(trainer.strategy, patching.sibling(trainer, "strategies").SingleDeviceStrategy)


def is_sharded(trainer: Any) -> bool:
    """Return whether each rank holds only a part of the model, so that no rank can run a step, or fail, alone."""
    return any(base.__name__ in ("FSDPStrategy", "ModelParallelStrategy") for base in type(trainer.strategy).__mro__)


def checkpoints_itself(trainer: Any) -> bool:
    """Return whether the strategy has an ``activation_checkpointing_policy`` (``strategies/fsdp.py`` of 2.6.6)."""
    return bool(getattr(trainer.strategy, "_activation_checkpointing_kwargs", None))


def share_buffers_before_forward(module: Any) -> None:
    """Share buffers now if the next forward pass would share them: a rank may have to repeat that pass alone."""
    if isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        with uncounted_collectives():
            module._sync_buffers()  # type: ignore[no-untyped-call]
        module.require_forward_param_sync = False


def shared_seed(trainer: Any) -> int:
    """Return rank 0's seed on every rank: that of ``seed_everything``, or else torch's."""
    return of_first_rank(trainer, int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())))


def of_first_rank(trainer: Any, value: T) -> T:
    """Return rank 0's value on every rank."""
    return cast(T, trainer.strategy.broadcast(value))


def data_ranks(trainer: Any) -> tuple[int, int]:
    """Return how many ranks share the data, and the place of this one among them.

    Ranks that hold one model together read the same samples (``ModelParallelStrategy``), and count as one.
    """
    shares = getattr(trainer, "distributed_sampler_kwargs", None)
    if shares is None:
        return int(trainer.world_size), int(trainer.global_rank)
    return int(shares["num_replicas"]), int(shares["rank"])


def smallest_over_ranks(trainer: Any, value: int) -> int:
    """Return the smallest of one number over all ranks."""
    return int(min(of_all_ranks(trainer, value)))


def sum_over_ranks(trainer: Any, value: float) -> float:
    """Return one number summed over the ranks that share the data; ranks that hold one model together have the same."""
    if trainer.world_size == 1:
        return float(value)
    total = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
    with uncounted_collectives():
        summed = float(trainer.strategy.reduce(total, reduce_op="sum"))
    ranks_of_model = int(trainer.world_size) / data_ranks(trainer)[0]
    return summed / ranks_of_model


def of_all_ranks(trainer: Any, value: Any) -> list[Any]:
    """Return the values of all ranks."""
    found = [value] * int(trainer.world_size)
    if trainer.world_size > 1:
        with uncounted_collectives():
            dist.all_gather_object(found, value)
    return found


@contextmanager
def in_single_group() -> Iterator[None]:
    """Return a context in which this rank alone is the default group, which collectives use (torch 2.15)."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    world: Any = dist.distributed_c10d._world
    group = world.default_pg
    if group not in _SINGLE_GROUPS:
        _SINGLE_GROUPS[group] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with patching.replaced(world, default_pg=_SINGLE_GROUPS[group]):
        yield


def collectives_run() -> int:
    """Return how many collectives the user's code has begun; process groups number theirs (``c10d/Backend.hpp``)."""
    if not dist.is_available() or not dist.is_initialized():
        return 0
    groups: Any = dist.distributed_c10d._world.pg_map
    begun = -_begun_here[0]
    for group in {*groups} - {*_SINGLE_GROUPS.values()}:
        with suppress(RuntimeError):  # of a backend that does not
            begun += int(group._get_sequence_number_for_group())
    return begun


@contextmanager
def uncounted_collectives() -> Iterator[None]:
    """Return a context whose collectives are not counted as the user's."""
    before = collectives_run()
    try:
        yield
    finally:
        _begun_here[0] += collectives_run() - before
