"""Decide from plain facts whether a rank may run a batch again after an out-of-memory error. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What an out-of-memory error leads to."""

    retries: bool  # whether what failed is run again
    refusal: str | None = None  # why it cannot be, though that was asked for
    by_hand: bool = False  # whether gradients are averaged over ranks here: one may run more passes than others
    lockstep: bool = False  # whether ranks wait for each other within a training step, if that is known beforehand
    undecided: bool = False  # whether the first training batch has to show that


@dataclass(frozen=True, slots=True)
class RankFacts:
    """How the ranks of a training depend on each other."""

    strategy: str
    distributed: bool = False  # whether there are several ranks
    sharded: bool = False  # whether ranks hold parts of the model
    reduces_itself: bool = False  # whether gradients are exchanged otherwise than by ``DistributedDataParallel``
    waits_in_forward: str | None = None  # why ranks wait for each other in forward passes; ``None`` if they do not

    def why_no_retries(self) -> str | None:
        """Say why a rank cannot run a training batch again by itself; ``None`` if it can."""
        if self.sharded:
            return f"{self.strategy} shards the model over ranks"
        if self.distributed and self.reduces_itself:
            return f"{self.strategy} exchanges gradients in a way of its own"
        return self.waits_in_forward


def evaluation_policy(facts: RankFacts, *, wanted: bool) -> RetryPolicy:
    """Decide for evaluation, and for training before it begins."""
    sharded = facts.why_no_retries() if facts.sharded else None
    return RetryPolicy(wanted and not facts.sharded, sharded if wanted else None)


def training_policy(facts: RankFacts, *, wanted: bool, cut_in_step: bool, must_average: bool) -> RetryPolicy:
    """Decide for training.

    Args:
        facts: How the ranks depend on each other.
        wanted: Whether the user asked for retries.
        cut_in_step: Whether batches are cut in the step even if nothing fails.
        must_average: Whether gradients have to be averaged by hand even if nothing is retried or cut.

    Examples:
        >>> ranks = RankFacts("DDPStrategy", distributed=True)
        >>> training_policy(ranks, wanted=True, cut_in_step=False, must_average=False)
        RetryPolicy(retries=True, refusal=None, by_hand=True, lockstep=False, undecided=False)
    """
    why = facts.why_no_retries()
    runs_pieces = wanted or cut_in_step or must_average
    by_hand = runs_pieces and facts.distributed and why is None
    waits = facts.sharded or facts.waits_in_forward is not None
    return RetryPolicy(
        retries=wanted and why is None,
        refusal=why if wanted else None,
        by_hand=by_hand,
        lockstep=runs_pieces and facts.distributed and not by_hand and waits,
        undecided=runs_pieces and cut_in_step and facts.distributed,
    )
