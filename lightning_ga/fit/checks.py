"""Refuse configurations that cannot work before any work is lost: one sentence each, with the way out."""

from typing import Any

from lightning_ga.compat import closures, loops
from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import require_count, require_effective_batch
from lightning_ga.plan.config import Request

_BY_HAND = """\
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
    if not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} sets automatic_optimization=False, and AutoAccumulate steers the automatic one: "
            f"cut each batch by hand with lightning_ga.plan_accumulation, in training_step:\n\n{_BY_HAND}"
        )
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
    for other in trainer.callbacks:
        if any(kind.__name__ in _RIVALS for kind in type(other).__mro__):
            raise UserError(
                f"The callbacks hold AutoAccumulate and {type(other).__name__}, which set the same things: "
                f"remove {type(other).__name__}."
            )
    if request.factor(0) is not None and trainer.accumulate_grad_batches != 1:
        raise UserError(
            f"accumulate={request.factor(0)} and Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) "
            "both set the factor: remove one of them."
        )


def check_factor(trainer: Any, planned: int) -> None:
    """Refuse a factor that a hook has set in the middle of training: windows are weighted for the planned one."""
    found = trainer.accumulate_grad_batches
    if found != planned and not loops.skips_backward(trainer):
        raise UserError(
            f"A callback or hook set trainer.accumulate_grad_batches={found} during training, and AutoAccumulate had "
            f"set {planned}: let AutoAccumulate set it, by effective_batch_size= or accumulate=, which take a mapping "
            "such as {0: 64, 5: 256} from the epoch on."
        )


def check_schedule(request: Request, epochs: range, world_size: int) -> None:
    """Refuse a schedule that would fail in a later epoch: an effective batch holds a sample for each rank."""
    for epoch in epochs:
        effective = request.effective(epoch)
        if effective is not None:
            require_effective_batch(effective, world_size)
