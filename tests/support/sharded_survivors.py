"""The same as ``survivors.py`` with a model that is sharded over the ranks (FSDP 2)."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import survivors
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from reference import Samples
from sharded import Sharded
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate


class Failing(Sharded):
    """Runs out of memory in one of its steps."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """One fit on this rank."""
    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
        devices=2,
        callbacks=[AutoAccumulate(**scenario["accumulate"])],
        strategy=ModelParallelStrategy(2, 1, process_group_backend="gloo", save_distributed_checkpoint=False),
    )
    loader = DataLoader(Samples(scenario["size"]), scenario["batch_size"], shuffle=True)
    trainer.fit(Failing(scenario["fails"].get(os.environ["RANK"], -1)), loader)
    return {}


def main(scenarios: dict[str, Any], folder: Path, ranks: int) -> int:
    """All scenarios on as many ranks."""
    return survivors.main(scenarios, folder, ranks, run)
