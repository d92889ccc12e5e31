"""Refuse Trainers and modules that cannot work.

Tested in tests/fit/test_checks.py.
"""

from typing import Any

from lightning_ga.compat import closures
from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import require_count
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
_RIVALS = {"GradientAccumulationScheduler": "", "BatchSizeFinder": " (Tuner.scale_batch_size adds one)"}
"""Classes of callbacks that set the same things as ``AutoAccumulate``, and where else they come from."""


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
    _check_callbacks(trainer)
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


def _check_callbacks(trainer: Any) -> None:
    """Refuse a second ``AutoAccumulate``, and callbacks that set the same things."""
    ours = []
    for callback in trainer.callbacks:
        kinds = [kind.__name__ for kind in type(callback).__mro__]
        name = kinds[0]
        for rival, source in _RIVALS.items():
            if rival in kinds:
                raise UserError(
                    f"The callbacks contain AutoAccumulate and {name}, which set the same things: "
                    f"remove {name}{source}."
                )
        if "AutoAccumulate" in kinds:
            ours.append(name)
    if len(ours) > 1:
        raise UserError(f"The callbacks contain AutoAccumulate more than once ({', '.join(ours)}): leave one of them.")
