"""Refuse configurations that cannot work before any work is lost: one sentence each, with the way out."""

from typing import Any

from torch.utils.data import DataLoader

from lightning_ga.compat import closures, dataloaders, loops
from lightning_ga.errors import UserError
from lightning_ga.loading.prebatched import PrebatchedSource
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.accumulation import require_count, require_effective_batch, require_few_chunks
from lightning_ga.plan.config import Request

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
            "training_step takes a dataloader_iter and so fetches batches on its own, which hides the micro-batches "
            "from AutoAccumulate: let it take (batch, batch_idx)."
        )
    ours = [type(each).__name__ for each in trainer.callbacks if _is_named(each, ("AutoAccumulate",))]
    if len(ours) > 1:
        raise UserError(f"The callbacks hold AutoAccumulate more than once ({', '.join(ours)}): leave one of them.")
    for other in trainer.callbacks:
        if _is_named(other, _RIVALS):
            raise UserError(
                f"The callbacks hold AutoAccumulate and {type(other).__name__}, which set the same things: "
                f"remove {type(other).__name__}."
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


def check_schedule(request: Request, epochs: range, world_size: int, *, micro_batch: int | None = None) -> int:
    """Refuse a schedule that would fail in a later epoch; return the largest effective batch, 0 if none is asked for.

    An effective batch holds a sample for each rank and, once the micro-batch is known, not too many of them.
    """
    asked = [effective for epoch in epochs if (effective := request.effective(epoch)) is not None]
    for effective in asked:
        require_effective_batch(effective, world_size)
        if micro_batch is not None:
            require_few_chunks(effective, micro_batch, world_size)
    return max(asked, default=0)


def check_end_of_epoch(trainer: Any, source: TrainingSource) -> None:
    """Refuse a loader whose own ``__iter__`` has ended the epoch early: its windows are not those planned."""
    done, planned = loops.batches_processed(trainer), source.length
    if planned is None or done >= planned or not dataloaders.ran_out(trainer):
        return
    if isinstance(source, PrebatchedSource):  # its own batches, fewer than it said
        return
    loader = type(source.user_loader)
    if loader.__iter__ is not DataLoader.__iter__:
        raise UserError(
            f"The training loader {loader.__name__} has an __iter__ of its own, which ended after {done} of {planned} "
            'micro-batches: it seems to count the recipe\'s batches. Use micro_batching="step", or let its sampler say '
            "where an epoch ends."
        )
