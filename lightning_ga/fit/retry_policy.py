"""Decide whether a rank may run a batch again after an out-of-memory error, from how ranks depend on each other."""

from dataclasses import dataclass
from typing import Any

from lightning_ga.compat import agreement, ranks


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
        why = ranks.waits_in_forward(trainer)
        if distributed and ranks.distributed_module(trainer) is None:
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
