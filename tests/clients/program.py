"""What a client's program is to the trials: a function that trains, and what may truly be said of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

EPOCHS = 2


@dataclass(frozen=True, slots=True)
class Program:
    """One training of one client, on data of its own making."""

    client: str
    name: str
    fit: Callable[[int, Sequence[Any]], torch.nn.Module]
    batch: int
    causes: tuple[str, ...] = ("exact",)
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Client and name."""
        return f"{self.client}: {self.name}"


def train(
    module: Callable[[], LightningModule], data: Callable[[], Any], callbacks: Sequence[Any], **settings: Any
) -> LightningModule:
    """Fit a fresh module to fresh data."""
    seed_everything(0, verbose=False)
    trained, loader = module(), data()
    trainer = Trainer(**trainer_settings(callbacks) | settings)
    trainer.fit(trained, loader)
    return trained


def trainer_settings(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Arguments of a Trainer that trains and does nothing else, in the precision of the program."""
    return {
        "accelerator": "cpu",
        "precision": "64-true" if torch.get_default_dtype() == torch.float64 else "32-true",
        "max_epochs": EPOCHS,
        "callbacks": list(callbacks),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
