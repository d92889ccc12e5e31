"""Sentences and records of out-of-memory errors."""

from dataclasses import dataclass

from lightning_ga.errors import RankError, UserError
from lightning_ga.fit.pieces import Piece
from lightning_ga.plan.exactness import SAME_RESULT

SAME_BUT_RANDOM = "Its parts draw random numbers of their own (dropout, say); apart from these the result is the same."
SKIPPED = "training_step returned None for some of its parts, which count as nothing; it saw each part by itself."
HOOKS_APART = "The hooks of its transfer saw the parts one by one; whether its result is the same was not measured."

MOST_NAMES = 8  # of attributes, in a sentence


@dataclass(frozen=True, slots=True)
class OomEvent:
    """An out-of-memory error that cost a retry, not the run."""

    stage: str  # ``"training"``, ``"validation"``, ``"test"``, ``"prediction"`` or ``"the optimizer's step"``
    step: int  # optimizer steps taken before it
    samples: int  # samples of the smallest attempt that ran out of memory; 0 where it had none
    fits: int  # samples of the largest attempt that succeeded instead; 0 where it had none
    memory: str  # state of the device's memory, as text
    result: str = ""  # ``SAME_RESULT``, or a sentence on how the result in parts differs from that of the whole batch
    left: tuple[str, ...] = ()  # attributes that the step had changed and that were not put back

    def __str__(self) -> str:
        if not self.samples:
            return f"Memory ran out in {self.stage} ({self.memory}), before it had changed anything: it was run again."
        same = ", with the same result" if self.result == SAME_RESULT else ""
        return (
            f"Memory ran out in {self.stage} with {self.samples} samples after {self.step} optimizer steps "
            f"({self.memory}). What failed was run again in parts of at most {self.fits} samples{same}; from now on "
            f"none is larger. {'' if same else self.result}"
        ).rstrip() + self._left()

    def _left(self) -> str:
        if not self.left:
            return ""
        more = ", …" if len(self.left) > MOST_NAMES else ""
        return (
            f" What the step had changed in attributes ({', '.join(self.left[:MOST_NAMES])}{more}) is as the failed "
            "attempt left it: only what small tensors hold comes back."
        )


def of_rank(error: UserError, world_size: int) -> UserError:
    """Return the error as one rank of several reports it: the other ranks only see that this one is gone."""
    return RankError(str(error)) if world_size > 1 else error


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An out-of-memory error that ends the run, as each of these sentences tells it."""

    stage: str  # as in ``OomEvent``
    memory: str  # state of the device's memory, as text

    def one_sample_too_large(self, sample: object) -> UserError:
        """Return the error for a single sample, described so, that does not fit."""
        return UserError(
            f"Memory ran out in {self.stage} with one sample alone ({sample}; {self.memory}), so there is nothing left "
            "to split: train in a lower precision (precision='bf16-mixed'), use activation checkpointing, or raise "
            "memory_budget and free the device of other processes."
        )

    def cannot_be_cut(self, why: str) -> UserError:
        """Return the error for a batch that is too large and cannot be cut into samples."""
        return UserError(
            f"Memory ran out in {self.stage} ({self.memory}), and the batch cannot be run again in parts. {why} Or use "
            "a smaller batch_size in its loader."
        )

    def changed_by_the_step(self, what: str) -> UserError:
        """Return the error for a failed step that has changed state of which no copy was made."""
        return UserError(
            f"Memory ran out in {self.stage} ({self.memory}) after the step had changed {what}, so it cannot be run "
            "again with the same result: let it change a copy, or change weights in a hook such as "
            "on_train_batch_end; or give a lower max_micro_batch_size or memory_budget."
        )

    def cannot_run_again(self, why: str) -> UserError:
        """Return the error for a failed rank whose retry would leave the other ranks waiting."""
        return UserError(
            f"Memory ran out in {self.stage} ({self.memory}), and this rank cannot run the batch again alone, as "
            f"others would wait: {why}. Go on from the last checkpoint with a lower max_micro_batch_size or "
            "memory_budget (in evaluation: a smaller batch_size of its loader)."
        )


def a_piece_failed(stage: str, piece: Piece, memory: str | None, error: Exception) -> UserError:
    """Return the error for a failure in a part of a batch that was cut in the step.

    Args:
        stage: The stage, as in ``OomEvent``.
        piece: The part.
        memory: State of the memory if it had run out; ``None`` if the batch was cut for the limit.
        error: The failure.
    """
    why = f"after memory had run out ({memory})" if memory else "as batches of that size are more than the limit"
    return UserError(
        f"In {stage} a part of {piece.samples} samples of a batch of {piece.of} failed, which was cut {why}: "
        f"{type(error).__name__}: {error}. If the whole batch does not fail, its parts need something of the whole "
        "(padding to the longest, say): define split_batch(self, batch, sizes) on the LightningModule, or use "
        'micro_batching="loader" with a lower max_micro_batch_size.'
    )


def optimizer_step_failed(memory: str, *, again: bool = False) -> UserError:
    """Return the error for an optimizer's step that changed parameters before it failed, or has failed ``again``."""
    why = (
        "and again when all that can be freed was free"
        if again
        else "after it had changed some parameters or states, so the step can neither be undone nor run again"
    )
    return UserError(
        f"Memory ran out inside the optimizer's step ({memory}) {why}: resume from the last checkpoint, and leave the "
        "step more memory (a lower memory_budget or max_micro_batch_size, or foreach=False in the optimizer)."
    )


def fewer_samples_than_ranks(pieces: int, samples: int) -> UserError:
    """Return the error for a rank with too few samples to run the pieces in which the others wait for it."""
    return UserError(
        f"A rank with {samples} samples cannot run {pieces} pieces as others do, and they would wait for it: use "
        'micro_batching="loader", or an effective batch size that the number of ranks divides and drop_last=True.'
    )
