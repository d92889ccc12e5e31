"""What a user reads: reports of out-of-memory errors, and refusals of Trainers and modules that cannot work.

Tested in tests/fit/test_checks.py.
"""

import warnings
from dataclasses import dataclass
from typing import Any

from lightning_ga.compat import closures, ranks
from lightning_ga.errors import RankError, UserError
from lightning_ga.memory.device import describe_memory
from lightning_ga.plan.accumulation import require_count
from lightning_ga.plan.config import Options, Request
from lightning_ga.plan.exactness import Exactness, after_error
from lightning_ga.plan.units import counted

BY_HAND = """\
leave AutoAccumulate out of the callbacks and cut each batch in training_step with lightning_ga.plan_accumulation:

    optimizer = self.optimizers()
    optimizer.zero_grad()
    (sizes,) = plan_accumulation(len(batch), micro_batch=…).chunks
    for part in batch.split(sizes):
        self.manual_backward(self.loss(part) * len(part) / len(batch))
    optimizer.step()
"""
_RIVALS = ("GradientAccumulationScheduler", "BatchSizeFinder")


@dataclass(frozen=True, slots=True)
class OomEvent:
    """An out-of-memory error that cost a window, not the run."""

    stage: str  # ``"training"``, ``"validation"``, ``"test"`` or ``"prediction"``
    step: int  # optimizer steps taken before it
    samples: int  # most samples of a pass before
    fits: int  # most samples of a pass from here on
    memory: str  # state of the device's memory, as text
    unit: str = "micro-batches"  # or ``"chunks"``, in which submodules run over whole batches

    def sentence(self, result: str) -> str:
        """Say what happened, and what was measured of the result."""
        what = "The window" if self.stage == "training" else "The batch"
        how = f"in {self.unit} of at most {self.fits} samples, and so are later ones"
        if self.fits == self.samples:
            how = "with submodules computed again in the backward pass, or without that sample"
        return (
            f"Memory ran out in {self.stage} with {self.samples} samples after {counted(self.step, 'optimizer step')} "
            f"({self.memory}). {what} is run again {how}. {result}"
        )


class OomReporter:
    """Counts the errors that were survived, and reports each: a warning, and a value in the loggers."""

    def __init__(self, trainer: Any, events: int = 0) -> None:
        self._trainer = trainer
        self.pending: list[OomEvent] = []  # errors of training that are not reported yet
        self.events = events  # including those before a resume

    def report(self, event: OomEvent, result: str) -> None:
        """Report an error that was survived on this rank."""
        self.events += 1
        text = event.sentence(result)
        if self._trainer.world_size > 1:
            text = f"Rank {self._trainer.global_rank}: {text}"
        warnings.warn(text, stacklevel=2)
        for logger in self._trainer.loggers:
            logger.log_metrics({"oom_events": self.events}, step=self._trainer.global_step)

    def report_pending(self, verdict: Exactness | None) -> None:
        """Report the errors of training that were not reported yet."""
        pending = self.pending
        self.pending = []
        for event in pending:
            self.report(event, after_error(verdict))


ONE_SAMPLE = (
    'with one sample alone ({memory}), so there is nothing left to split: give checkpoint="auto", train in '
    "a lower precision (precision='bf16-mixed'), or raise memory_budget and free the device of other "
    "processes. A batch of one row may hold several samples: make it a lightning_ga.split.FlattenedBatch if "
    "position_ids begin anew with each, or a type that lightning_ga.split.register_splitter knows; or define "
    "split_batch(self, batch, sizes) on the LightningModule, and give the loader's batches a first tensor with an "
    "entry for each sample."
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


def out_of_memory(trainer: Any, stage: str, sentence: str, what: object = "") -> UserError:
    """Return the error that ends a run when memory has run out: one of the sentences above."""
    memory = describe_memory(trainer.strategy.root_device)
    text = f"Memory ran out in {stage} {sentence.format(what=what, memory=memory)}"
    return RankError(text) if trainer.world_size > 1 else UserError(text)


def check_shares(trainer: Any, options: Options) -> None:
    """Refuse unequal shares of a window if there are no ranks that could have them."""
    if options.shares == "equal":
        return
    why = "this training has one rank" if ranks.data_ranks(trainer)[0] == 1 else ""
    if ranks.is_sharded(trainer):
        why = "the model is sharded, so that its ranks run in step"
    _refuse_shares(options, why)


def check_unequal_passes(trainer: Any, options: Options) -> None:
    """Refuse unequal shares of a window if ranks wait for each other within it; asked once strategies are set up."""
    why = ranks.obstacle(trainer)
    if options.shares == "speed" and why is None and not ranks.gradients_are_ours(trainer):
        why = "a communication hook of DDP sends the gradients"
    if options.shares != "equal":
        _refuse_shares(options, why)


def _refuse_shares(options: Options, why: str | None) -> None:
    if why:
        raise UserError(
            f"shares={options.shares!r} divides a window among ranks by their {options.shares}, and {why}: leave it "
            "out."
        )


def check_trainer(trainer: Any, module: Any, request: Request) -> None:
    """Refuse a Trainer or module under which accumulation would go wrong."""
    require_count("accumulate_grad_batches", trainer.accumulate_grad_batches)
    check_automatic(module)
    if trainer.strategy.handles_gradient_accumulation:
        raise UserError(
            f"{type(trainer.strategy).__name__} accumulates gradients on its own, with a factor fixed at its start: "
            "use another strategy, such as ddp, or set the factor there and leave AutoAccumulate out."
        )
    if closures.takes_an_iterator(module):
        raise UserError(
            "training_step accepts a dataloader_iter and so fetches batches on its own, which hides the micro-batches "
            "from AutoAccumulate: let it accept (batch, batch_idx)."
        )
    ours = [type(each).__name__ for each in trainer.callbacks if _is_named(each, ("AutoAccumulate",))]
    if len(ours) > 1:
        raise UserError(f"The callbacks contain AutoAccumulate more than once ({', '.join(ours)}): leave one of them.")
    for other in trainer.callbacks:
        if _is_named(other, _RIVALS):
            tuner = " (Tuner.scale_batch_size adds one)" if _is_named(other, ("BatchSizeFinder",)) else ""
            raise UserError(
                f"The callbacks contain AutoAccumulate and {type(other).__name__}, which set the same things: "
                f"remove {type(other).__name__}{tuner}."
            )
    if request.factor(0) is not None and trainer.accumulate_grad_batches != 1:
        raise UserError(
            f"accumulate={request.factor(0)} and Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) "
            "both set the factor: remove one of them."
        )


def check_automatic(module: Any) -> None:
    """Refuse manual optimization, also if it is set after the start of training."""
    if not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} sets automatic_optimization=False, and AutoAccumulate steers the automatic one: "
            f"{BY_HAND}"
        )


def _is_named(callback: Any, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(callback).__mro__)
