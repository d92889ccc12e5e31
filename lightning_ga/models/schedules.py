"""Learning rates as a function of training progress, stepped once per optimizer step."""

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, total_steps: int, *, warmup: float = 0.0, final: float = 0.0) -> LambdaLR:
    """Return a schedule that rises linearly over the first steps, then falls along half a cosine.

    Args:
        optimizer: Its learning rates are the highest ones.
        total_steps: Optimizer steps of the whole run.
        warmup: Share of the steps that rise, 0 to 1.
        final: Share of the rate that is left at the end, 0 to 1.
    """
    return LambdaLR(optimizer, partial(_cosine_factor, total_steps=total_steps, warmup=warmup, final=final))


def _cosine_factor(step: int, *, total_steps: int, warmup: float, final: float) -> float:
    """Return the factor of the learning rate after so many steps; past the end it stays at ``final``.

    Examples:
        >>> [round(_cosine_factor(step, total_steps=4, warmup=0.0, final=0.0), 2) for step in range(6)]
        [1.0, 0.85, 0.5, 0.15, 0.0, 0.0]
    """
    rising = round(warmup * total_steps)
    if step < rising:
        return (step + 1) / rising
    progress = min(1.0, (step - rising) / max(1, total_steps - rising))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
