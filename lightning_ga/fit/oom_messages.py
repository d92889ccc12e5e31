"""Records of out-of-memory errors, their sentences, and who tells them."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_ga.errors import RankError, UserError
from lightning_ga.fit.parts import Piece
from lightning_ga.plan.exactness import SAME_RESULT

SAME_BUT_RANDOM = "Its parts draw random numbers of their own (dropout, say); apart from these the result is the same."
SKIPPED = "training_step returned None for some of its parts; whether it would have in one pass is not known."
HOOKS_APART = "The hooks of its transfer saw the parts one by one; whether its result is the same was not measured."

MOST_NAMES = 8  # of attributes, in a sentence


@dataclass(frozen=True, slots=True)
class OomEvent:
    """An out-of-memory error that cost a retry, not the run."""

    stage: str  # ``"training"``, ``"validation"``, ``"test"`` or ``"prediction"``
    step: int  # optimizer steps taken before it
    samples: int  # of the smallest pass that ran out of memory
    fits: int  # samples of the largest pass that went through instead
    memory: str  # state of the device's memory, as text
    result: str = ""  # ``SAME_RESULT``, or a sentence on how the result in parts differs from that of the whole batch
    left: tuple[str, ...] = ()  # attributes that the step changes and that are not put back
    later: str = ""  # what it changes in later epochs, as a sentence
    unit: str = "parts"  # or ``"chunks"``, in which submodules run over whole batches
    by_size: bool = False  # whether the limit counts samples × longest

    def __str__(self) -> str:
        same = ", with the same result" if self.result == SAME_RESULT and not self.left else ""
        larger = "has more samples × longest" if self.by_size else "is larger"
        result = "" if self.result == SAME_RESULT else f" {self.result}"
        of = "chunks of " if self.unit == "chunks" else ""
        return (
            f"Memory ran out in {self.stage} with {of}{self.samples} samples after {self.step} optimizer steps "
            f"({self.memory}). What failed was run again in {self.unit} of at most {self.fits} samples{same}; from now "
            f"on none {larger}.{result}{self._left()}{self.later}"
        )

    def _left(self) -> str:
        if not self.left:
            return ""
        more = ", …" if len(self.left) > MOST_NAMES else ""
        beside = " The result is the same as far as it does not depend on it." if self.result == SAME_RESULT else ""
        return (
            f" What the step had changed in attributes ({', '.join(self.left[:MOST_NAMES])}{more}) is as the failed "
            f"attempt left it.{beside}"
        )


class OomReporter:
    """Counts the errors that were survived, and reports each: a warning, and a value in the loggers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.untold: list[Callable[[], OomEvent]] = []  # records are made later, as what they say is measured first
        self.events = 0  # those before a resume too

    def tell(self) -> None:
        """Report the errors that the user does not know of yet."""
        while self.untold:
            self.report(self.untold.pop(0)())

    def report(self, event: OomEvent) -> None:
        """Report an error that was survived on this rank."""
        self.events += 1
        rank = f"Rank {self._trainer.global_rank}: " if self._trainer.world_size > 1 else ""
        warnings.warn(f"{rank}{event}", stacklevel=2)
        for logger in self._trainer.loggers:
            logger.log_metrics({"oom_events": self.events}, step=self._trainer.global_step)


def of_rank(error: UserError, world_size: int) -> UserError:
    """Return the error as one rank of several reports it: the other ranks only see that this one is gone."""
    return RankError(str(error)) if world_size > 1 else error


# What ends a run when memory has run out in a stage; ``Engine.error`` fills them in.
ONE_SAMPLE = (
    "with one sample alone ({what}; {memory}), so there is nothing left to split: train in a lower precision "
    "(precision='bf16-mixed'), use activation checkpointing, or raise memory_budget and free the device of other "
    "processes."
)
ONE_CHUNK = (
    "with chunks of one sample ({what}; {memory}), so the rest of the step takes too much: the outputs for a whole "
    "window, and the loss on them. Give a smaller effective_batch_size, name larger submodules in whole=, or train in "
    "a lower precision."
)
NOT_CUT = "({memory}), and the batch cannot be run again in parts. {what} Or use a smaller batch_size in its loader."
CHANGED = (
    "({memory}) after the step had changed {what}, so it cannot be run again with the same result: let it change a "
    "copy, or change weights in a hook such as on_train_batch_end; or give a lower max_micro_batch_size or "
    "memory_budget."
)
OTHERS_WAIT = (
    "({memory}), and this rank cannot run the batch again alone, as others would wait: {what}. Go on from the last "
    "checkpoint with a lower max_micro_batch_size or memory_budget (in evaluation: a smaller batch_size of its loader)."
)
EXCHANGES = "its step exchanges values with the other ranks (all_gather, all_reduce, the compute of a metric)"


def part_of_a_batch(stage: str, piece: Piece, *, out_of_memory: bool) -> str:
    """Return the note for an error of the user's code in a part of a batch."""
    why = "memory had run out with more" if out_of_memory else "more are above the limit"
    return (
        f"AutoAccumulate ran a part of a batch of {stage} here, samples {piece.start} to {piece.stop - 1} of "
        f"{piece.of}, because {why}. If the whole batch does not fail so, the step needs something of the whole (a "
        "fixed batch size, padding to the longest): fix micro_batch_size=…, which the loader then yields, or define "
        "split_batch(self, batch, sizes) on the LightningModule."
    )


def in_the_update(memory: str) -> str:
    """Return the note for memory that ran out after the last backward pass of a window."""
    return (
        f"Memory ran out after the window's last backward pass ({memory}): in gradient clipping, in a hook before the "
        "optimizer's step, or inside the step, which is not run again, as it may have changed some parameters. Resume "
        "from the last checkpoint, and leave the step more memory: a lower memory_budget or max_micro_batch_size, or "
        "foreach=False in the optimizer."
    )


def in_a_hook(memory: str) -> str:
    """Return the note for memory that ran out outside of the passes that a retry undoes."""
    return (
        f"Memory ran out outside of the forward and backward passes ({memory}), in a hook such as on_train_batch_start "
        "or on_train_batch_end, which is not run again, as it may have done a part of its work. Resume from the last "
        "checkpoint, and leave the hook more memory: a lower memory_budget or max_micro_batch_size."
    )


def fewer_samples_than_ranks(pieces: int, samples: int) -> RankError:
    """Return the error for a rank with too few samples to run the pieces in which the others wait for it."""
    return RankError(
        f"A rank with {samples} samples cannot run {pieces} pieces as others do, and they would wait for it: use "
        'micro_batching="loader", or an effective batch size that the number of ranks divides and drop_last=True.'
    )
