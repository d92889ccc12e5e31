"""Learning rates as a function of training progress, stepped once per optimizer step."""

import math

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
    rising = round(warmup * total_steps)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        progress = min(1.0, (step - rising) / max(1, total_steps - rising))
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)
