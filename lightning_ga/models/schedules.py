"""Learning rates as a function of training progress, stepped once per optimizer step.

Tested in tests/models/test_classifier.py.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_ga.errors import UserError


def warmup_cosine(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = 0.0,
    warmup_epochs: float = 0,
    epoch_steps: float = math.inf,
    final: float = 0.0,
) -> LambdaLR:
    """Return a schedule that rises linearly over the first steps, then falls along half a cosine.

    Args:
        optimizer: Its learning rates are the highest ones.
        total_steps: Optimizer steps of the whole run.
        warmup: Share of the steps that rise, 0 to 1.
        warmup_epochs: Epochs that rise, in place of ``warmup``; all epochs are taken to have the same number of steps.
        epoch_steps: Optimizer steps of an epoch, for ``warmup_epochs``.
        final: Share of the rate that is left at the end, 0 to 1.

    Raises:
        UserError: If a share is none, warm-up epochs are more than all, or both kinds of warm-up are given.
    """
    for name, share in (("warmup", warmup), ("final", final)):
        if not 0 <= share <= 1:
            raise UserError(
                f"lr_scheduler.{name}={share} must be a share from 0 to 1; lr_scheduler.warmup_epochs=… counts epochs."
            )
    if warmup_epochs:
        epochs = total_steps / max(1, epoch_steps)
        if warmup or not 0 < warmup_epochs <= epochs:
            raise UserError(
                f"lr_scheduler.{warmup_epochs=} must be at most the {epochs:g} epochs of the run (trainer.max_epochs, "
                f"trainer.max_steps), and replaces lr_scheduler.{warmup=}: give one of the two."
            )
        warmup = warmup_epochs / epochs
    rising = round(warmup * total_steps)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        progress = min(1.0, (step - rising) / max(1, total_steps - rising))
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)
