"""What a user reads after an out-of-memory error, or an error in a piece of a batch.

Tested in tests/fit/test_evaluation.py and tests/integration/test_survive.py.
"""

import warnings
from typing import Any, NoReturn

from lightning_ga.errors import RankError, UserError
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import is_ambiguous_out_of_memory
from lightning_ga.plan.exactness_verdicts import Exactness, after_error
from lightning_ga.plan.units import counted

ONE_SAMPLE = (
    'with one sample alone ({memory}), so there is nothing left to split: give checkpoint="auto", train in '
    "a lower precision (precision='bf16-mixed'), or raise memory_budget and free the device of other "
    "processes. Where the step cuts, a batch is moved to the device as a whole: if that ran out of memory, let the "
    "loader yield smaller batches. A batch of one row may hold several samples: make it a "
    "lightning_ga.split.FlattenedBatch if position_ids begin anew with each, or a type that "
    "lightning_ga.split.register_splitter knows; or define split_batch(self, batch, sizes) on the LightningModule, "
    "and give the loader's batches a first tensor with an entry for each sample."
)
ONE_CHUNK = (
    "with chunks of one sample ({memory}), so the rest of the step needs too much: the outputs for a whole "
    "window, and the loss on them. Give a smaller batch_size, name larger submodules in whole=, or train in "
    "a lower precision."
)
CHANGED = (
    "({memory}) after the step had changed {what}, so it cannot run again with the same result: let the step change a "
    "copy, or make the change in a later hook; or give a lower max_micro_batch_size or memory_budget (in evaluation: a "
    "smaller batch_size of its loader)."
)
OTHERS_WAIT = (
    "({memory}), and this rank cannot run these samples again alone, because {what}. Resume from the last "
    "checkpoint with a lower max_micro_batch_size or memory_budget (in evaluation: a smaller batch_size of its loader)."
)
EXCHANGES = "its step exchanges values with the other ranks (all_gather, all_reduce, a metric over all ranks)"
IN_THE_UPDATE = (
    "Memory ran out after the window's last backward pass ({memory}): in gradient clipping, in a hook, or inside the "
    "optimizer's step, which is not run again because it may have changed some parameters. Resume "
    "from the last checkpoint, and leave the step more memory: a lower memory_budget or max_micro_batch_size, or "
    "foreach=False in the optimizer."
)
IN_A_PIECE = (
    "This pass had a piece of a batch: {samples} samples were cut into pieces of {sizes}, so that they fit in memory. "
    "A piece keeps the padding of its batch. If the step takes lengths from the samples that it gets "
    "(pad_packed_sequence), let it take them from the shape of its input (total_length=), let split_batch of the "
    "LightningModule trim each piece, or let the loader cut a map-style dataset."
)
IN_THE_LOADER = (
    "Memory ran out while the loader made a batch ({memory}), which it cannot be asked for again: let the dataset and "
    "the collate function take less memory. With map-style data that are cut in the loader such an error is survived."
)


class OomReporter:
    """Counts the errors that were survived, and reports each: a warning, and a value in the loggers."""

    def __init__(self, trainer: Any, events: int = 0) -> None:
        self._trainer = trainer
        self._pending: list[str] = []  # sentences on errors of training that are not reported yet
        self.events = events  # including those before a resume

    @property
    def has_pending(self) -> bool:
        """Whether there are errors of training that are not reported yet."""
        return bool(self._pending)

    def survived(self, stage: str, samples: int, fits: int, unit: str = "micro-batches") -> str:
        """Say what has happened now in ``"training"``, ``"validation"``, ``"test"`` or ``"prediction"``.

        A pass had so many ``samples``, and passes have at most as many as ``fits`` from here on; they are cut in
        ``"micro-batches"``, or in ``"chunks"``, in which submodules run over whole batches.
        """
        steps = counted(int(self._trainer.global_step), "optimizer step")
        memory = describe_memory(self._trainer.strategy.root_device)
        what = "The window" if stage == "training" else "The batch"
        how = f"in {unit} of at most {fits} samples, and so are later ones if these fit"
        is_last_remedy = fits == samples  # it has left the limit as it was (``Remedies``)
        if is_last_remedy:
            how = "with submodules computed again in the backward pass, or without that sample"
        return f"Memory ran out in {stage} with {samples} samples after {steps} ({memory}). {what} is run again {how}."

    def add(self, sentence: str) -> None:
        """Keep what was said of an error of training until what is known of its gradient can be reported with it."""
        self._pending.append(sentence)

    def report(self, sentence: str, result: str) -> None:
        """Report an error that was survived on this rank, and what was measured of the result."""
        self.events += 1
        text = f"{sentence} {result}"
        if self._trainer.world_size > 1:
            text = f"Rank {self._trainer.global_rank}: {text}"
        warnings.warn(text, stacklevel=2)
        for logger in self._trainer.loggers:
            logger.log_metrics({"oom_events": self.events}, step=self._trainer.global_step)

    def report_pending(self, verdict: Exactness | None) -> None:
        """Report the errors of training that were not reported yet, with what is known of gradients."""
        while self._pending:
            self.report(self._pending.pop(0), after_error(verdict))


def out_of_memory(trainer: Any, stage: str, sentence: str, what: object = "") -> UserError:
    """Return the error that ends a run when memory has run out: one of the sentences above."""
    memory = describe_memory(trainer.strategy.root_device)
    text = f"Memory ran out in {stage} {sentence.format(what=what, memory=memory)}"
    return RankError(text) if trainer.world_size > 1 else UserError(text)


def give_up(trainer: Any, stage: str, failure: Exception, unit: str = "micro-batches") -> NoReturn:
    """End the run, because one sample alone does not fit."""
    if is_ambiguous_out_of_memory(failure):  # it may mean something else
        raise failure
    sentence = ONE_CHUNK if unit == "chunks" else ONE_SAMPLE
    raise out_of_memory(trainer, stage, sentence) from failure


def end_run_if(obstacle: str | None, trainer: Any, stage: str, sentence: str, failure: Exception) -> None:
    """End the run if there is an ``obstacle`` to running samples again, which the ``sentence`` is about."""
    if obstacle is not None:
        raise out_of_memory(trainer, stage, sentence, obstacle) from failure
