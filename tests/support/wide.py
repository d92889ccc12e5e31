"""A model large enough that a small budget cuts its window."""

from typing import Any

import torch
from reference import FEATURES, Regression, loss

BUDGET = 60_000


class Wide(Regression):
    """Large enough that a budget of 60 kB cuts a window of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 48), torch.nn.Tanh(), torch.nn.Linear(48, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss(self.net, batch[0], batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)
