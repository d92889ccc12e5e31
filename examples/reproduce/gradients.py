"""What the optimizer's step is given in each window of a real fit."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


class GradientWatch(Callback):
    """Keeps the gradient of each step, as one vector; a step that is skipped is not among them.

    Attributes:
        gradients: By optimizer step.
    """

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def keep(*_: Any) -> None:
            self.gradients.append(flat_gradient(pl_module))

        trainer.optimizers[0].register_step_post_hook(keep)


def flat_gradient(module: torch.nn.Module) -> Tensor:
    """Put the gradients of all parameters into one vector of 64 bits; zeros where there is none."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in module.parameters()]
    return torch.cat([part.flatten().double() for part in parts])


def relative_error(found: Tensor, right: Tensor) -> float:
    """Measure how far a gradient is from the right one, as a share of its length."""
    return float((found - right).norm() / right.norm())
