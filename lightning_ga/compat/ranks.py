"""What ranks do together: every touch of private parts of ``DistributedDataParallel`` and of process groups.

A rank that runs a batch again, in halves, must do so alone: nothing in it may wait for other ranks.
So the buffers that ``DistributedDataParallel`` shares in a forward pass are shared here instead, and
what the user's own code exchanges with other ranks is told from the number of collectives that
process groups have run.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_ga.compat import agreement
from lightning_ga.compat.reduction import average_gradients


def distributed_module(trainer: Any) -> Any:
    """The ``DistributedDataParallel`` around the module, if gradients are averaged as that does by itself."""
    module = trainer.strategy.model
    if not isinstance(module, DistributedDataParallel):
        return None
    ways_of_its_own = (
        getattr(trainer.strategy, "_ddp_comm_hook", None) is not None,
        bool(getattr(module, "_comm_hooks", ())),
        bool(getattr(module, "_delay_all_reduce_params", ())),
        getattr(module, "mixed_precision", None) is not None,
        hasattr(module, "buffer_hook"),
    )
    return None if any(ways_of_its_own) else module


def needs_averaging_by_hand(trainer: Any) -> bool:
    """Whether the module fails under accumulation: with ``static_graph`` a first pass without reduction is refused."""
    module = distributed_module(trainer)
    return module is not None and bool(module.static_graph)


def take_over(trainer: Any) -> None:
    """Let no pass of the module wait for other ranks: from here on gradients and buffers are shared by hand.

    With ``static_graph`` the first backward pass would reduce, ``no_sync`` or not, unless it looks as if it had
    (``torch/nn/parallel/distributed.py``, ``_DDPSink``).
    """
    module = distributed_module(trainer)
    module._static_graph_delay_allreduce_enqueued = True
    share_buffers(module)


def average_over_ranks(trainer: Any) -> None:
    """What ``DistributedDataParallel`` does around a synchronised backward pass."""
    module = distributed_module(trainer)
    average_gradients(parameters_of(module), module.process_group)
    share_buffers(module)


def parameters_of(module: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that a ``DistributedDataParallel`` averages (``torch/nn/parallel/distributed.py:906``)."""
    named = module.module.named_parameters()
    return [parameter for name, parameter in named if name not in module.parameters_to_ignore]


def share_buffers(module: DistributedDataParallel) -> None:
    """Give all ranks the buffers of rank 0, as the module does in the first forward pass after each reduction.

    There it must not: a rank that runs that pass again would wait for the others (``distributed.py:2404``).
    """
    if module.broadcast_buffers and len(module.modules_buffers) > 0:
        module._sync_buffers()  # type: ignore[no-untyped-call]
    module.require_forward_param_sync = False


def share_buffers_before_forward(trainer: Any) -> None:
    """Share buffers now if the next forward pass would: a sanity check of validation comes before training."""
    module = trainer.strategy.model
    if isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        share_buffers(module)


def waits_in_forward(trainer: Any) -> str | None:
    """Why ranks wait for each other in forward passes; ``None`` if no layer lets them."""
    synced = [part for part in trainer.lightning_module.modules() if isinstance(part, torch.nn.SyncBatchNorm)]
    return "SyncBatchNorm layers let ranks wait for each other in forward passes" if synced else None


def collectives(trainer: Any) -> int:
    """How many collectives this rank has run so far, in all process groups: a step that adds to it needs the others.

    Process groups number them, in Python as in C++ (``c10d/Backend.hpp``, ``getSequenceNumberForGroup``).
    """
    if not agreement.is_distributed(trainer) or not dist.is_available() or not dist.is_initialized():
        return 0
    return sum(_sequence_number(group) for group in dist.distributed_c10d._world.pg_map)


def _sequence_number(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that keeps none
        return 0
