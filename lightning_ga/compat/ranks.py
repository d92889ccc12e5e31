"""Decide whether a rank may run a batch again, from how ranks depend on each other, and share buffers by hand.

A rank that runs a batch again must not wait for others, nor they for it. Beside it: numbers that all ranks agree on, a
count of their collectives, in which the user's own communication shows, and the ranks that a Trainer has elsewhere.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_ga.compat import patching
from lightning_ga.compat.gradient_dtype import half_parameters
from lightning_ga.errors import UserError

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


@contextmanager
def together() -> Iterator[None]:
    """Return a context, within :func:`alone`, in which all ranks are one world again; all of them enter it."""
    world: Any = dist.distributed_c10d._world
    own = world.default_pg
    world.default_pg = next((group for group, alone in _OWN.items() if alone is own), own)
    try:
        yield
    finally:
        world.default_pg = own


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


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What an out-of-memory error leads to."""

    retries: bool  # whether what failed is run again
    refusal: str | None = None  # why it cannot be, though that was asked for
    by_hand: bool = False  # whether gradients are averaged over ranks here: one may run more passes than others
    lockstep: bool = False  # whether ranks wait for each other within a training step, if that is known beforehand
    undecided: bool = False  # whether the first training batch has to show that


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the ranks of a Trainer depend on each other.

    Examples:
        >>> Ranks(distributed=True).in_training(wanted=True, cut_in_step=False, must_average=False)
        RetryPolicy(retries=True, refusal=None, by_hand=True, lockstep=False, undecided=False)
    """

    distributed: bool = False  # whether there are several, or one whose gradients are reduced all the same
    obstacle: str | None = None  # why a rank cannot run a training batch again by itself
    wait_in_step: bool = False  # whether ranks wait for each other in forward passes
    sharded: bool = False  # whether each holds a part of the model, so that none can evaluate by itself either

    @classmethod
    def of(cls, trainer: Any) -> "Ranks":
        """Read off a Trainer how its ranks depend on each other."""
        distributed, strategy = is_distributed(trainer) or reduces(trainer), type(trainer.strategy).__name__
        if is_sharded(trainer):
            return cls(distributed, f"{strategy} shards the model over ranks", wait_in_step=True, sharded=True)
        why = waits_in_forward(trainer)
        if distributed and distributed_module(trainer) is None:
            own = f"{strategy} exchanges gradients in a way of its own"
            return cls(distributed, own, wait_in_step=why is not None)
        return cls(distributed, why, wait_in_step=why is not None)

    def in_evaluation(self, *, wanted: bool) -> RetryPolicy:
        """Decide for evaluation, and for training before it begins, if the user ``wanted`` retries."""
        return RetryPolicy(wanted and not self.sharded, self.obstacle if wanted and self.sharded else None)

    def in_training(self, *, wanted: bool, cut_in_step: bool, must_average: bool) -> RetryPolicy:
        """Decide for training; batches may be cut in the step, or averaged by hand, even if nothing fails."""
        runs_pieces = wanted or cut_in_step or must_average
        by_hand = runs_pieces and self.distributed and self.obstacle is None
        return RetryPolicy(
            retries=wanted and self.obstacle is None,
            refusal=self.obstacle if wanted else None,
            by_hand=by_hand,
            lockstep=runs_pieces and self.distributed and not by_hand and self.wait_in_step,
            undecided=runs_pieces and cut_in_step and self.distributed,
        )


def reduces(trainer: Any) -> bool:
    """Return whether a ``DistributedDataParallel`` reduces gradients: on one rank too, and after each failed pass."""
    return isinstance(trainer.strategy.model, DistributedDataParallel)


def distributed_module(trainer: Any) -> Any:
    """Return the module's ``DistributedDataParallel``; ``None`` without one or if its averaging is customized."""
    module = trainer.strategy.model
    if not isinstance(module, DistributedDataParallel):
        return None
    ways_of_its_own = (
        bool(getattr(module, "_comm_hooks", ())),
        bool(getattr(module, "_delay_all_reduce_params", ())),
        getattr(module, "mixed_precision", None) is not None,
        hasattr(module, "buffer_hook"),
    )
    return None if any(ways_of_its_own) else module


def gradients_are_ours(trainer: Any) -> bool:
    """Return whether nothing but this package and the optimizers reads gradients: no reduction of a strategy's own."""
    if is_distributed(trainer) or reduces(trainer):
        return distributed_module(trainer) is not None
    return isinstance(trainer.strategy, patching.sibling(trainer, "strategies").SingleDeviceStrategy)


def needs_averaging_by_hand(trainer: Any) -> bool:
    """Return whether accumulation fails under the module's own reduction.

    Its buckets take gradients of the types of their parameters only; ``static_graph`` refuses passes without reduction.
    """
    module = distributed_module(trainer)
    return module is not None and (bool(module.static_graph) or bool(half_parameters(module)))


def take_over(trainer: Any) -> None:
    """Stop the module from waiting for other ranks in any pass: gradients and buffers are shared by hand.

    With ``static_graph`` the first backward pass would reduce in spite of ``no_sync``, unless this flag says that
    it has (``torch/nn/parallel/distributed.py``, ``_DDPSink``).
    """
    module = distributed_module(trainer)
    module._static_graph_delay_allreduce_enqueued = True
    share_buffers(module)


def share_buffers(module: DistributedDataParallel) -> None:
    """Copy rank 0's buffers to all ranks, as the module does in the first forward pass after each reduction.

    The module itself must not: a rank that repeats that pass would wait for the others (``distributed.py:2404``).
    """
    if module.broadcast_buffers and len(module.modules_buffers) > 0:
        module._sync_buffers()  # type: ignore[no-untyped-call]
    module.require_forward_param_sync = False


def share_buffers_before_forward(trainer: Any) -> None:
    """Share buffers now if the next forward pass would: a sanity check comes before training."""
    module = trainer.strategy.model
    if isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        share_buffers(module)


def waits_in_forward(trainer: Any) -> str | None:
    """Return why ranks wait for each other in forward passes; ``None`` if they do not."""
    if not is_distributed(trainer):
        return None
    synced = [part for part in trainer.lightning_module.modules() if isinstance(part, torch.nn.SyncBatchNorm)]
    return "SyncBatchNorm layers let ranks wait for each other in forward passes" if synced else None


_DATA_PARALLEL = ("auto", "ddp", "single_device")


def settings_on_this_host(
    settings: Mapping[str, Any], *, root: str = "lightning.pytorch"
) -> tuple[dict[str, Any], int]:
    """Return the Trainer arguments that have to be others here, and how many ranks the run on that machine has.

    ``root`` is the namespace of the Trainer. A strategy that shards the model is refused.
    """
    strategy = settings.get("strategy") or "auto"
    if not isinstance(strategy, str) or not strategy.startswith(_DATA_PARALLEL):
        raise UserError(
            f"strategy={strategy} cannot be planned for, only data parallelism, in which every rank has the whole "
            "model: leave the strategy out."
        )
    changed: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}
    if settings.get("precision") in ("16-mixed", "16", 16):  # on a CPU, Lightning would make it bfloat16
        plugin = import_module(f"{root}.plugins").MixedPrecision
        changed |= {"precision": None, "plugins": [plugin("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    return changed, _count(settings.get("devices")) * _count(settings.get("num_nodes"))


def _count(devices: Any) -> int:
    """Count the devices that an argument of the Trainer names; one where that depends on the machine.

    Examples:
        >>> _count(4), _count("0,1"), _count([2, 3]), _count("auto"), _count(-1)
        (4, 2, 2, 1, 1)
    """
    if isinstance(devices, str):
        named = [one for one in devices.split(",") if one]
        devices = named if "," in devices else int(devices) if devices.isdigit() else 1
    count = len(devices) if isinstance(devices, (list, tuple)) else devices
    return count if isinstance(count, int) and count > 0 else 1
