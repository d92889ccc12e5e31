"""Decide whether a rank may run a batch again, from how ranks depend on each other, and share buffers by hand.

A rank that runs a batch again must not wait for others, nor they for it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_ga.compat import agreement, patching
from lightning_ga.compat.gradient_dtype import half_parameters


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

    distributed: bool = False  # whether there are several
    obstacle: str | None = None  # why a rank cannot run a training batch again by itself
    wait_in_step: bool = False  # whether ranks wait for each other in forward passes
    sharded: bool = False  # whether each holds a part of the model, so that none can evaluate by itself either

    @classmethod
    def of(cls, trainer: Any) -> "Ranks":
        """Read off a Trainer how its ranks depend on each other."""
        distributed, strategy = agreement.is_distributed(trainer), type(trainer.strategy).__name__
        if agreement.is_sharded(trainer):
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
