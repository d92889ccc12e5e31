"""Share buffers by hand under ``DistributedDataParallel``: a rank that runs a batch again must not wait for others."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_ga.compat import agreement, patching
from lightning_ga.compat.gradient_dtype import half_parameters


def distributed_module(trainer: Any) -> Any:
    """Return the module's ``DistributedDataParallel``; ``None`` without one or if its averaging is customized."""
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


def gradients_are_ours(trainer: Any) -> bool:
    """Return whether nothing but this package and the optimizers reads gradients: no reduction of a strategy's own."""
    if agreement.is_distributed(trainer):
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
    synced = [part for part in trainer.lightning_module.modules() if isinstance(part, torch.nn.SyncBatchNorm)]
    return "SyncBatchNorm layers let ranks wait for each other in forward passes" if synced else None
