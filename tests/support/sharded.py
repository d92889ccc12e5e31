"""Trains a model sharded over gloo ranks (FSDP 2); each rank writes what it saw."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from forks import in_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from reference import Regression, Samples, fit
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate


class Sharded(Regression):
    """The reference model, its layers sharded over the ranks; memory may run out in a batch of this rank."""

    fails_at: int | None = None

    def configure_model(self) -> None:
        if not self.device_mesh:
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in self.net.parameters()]))


def main(settings: dict[str, Any], folder: Path) -> int:
    """One fit on two ranks."""
    return in_ranks(2, train, settings, folder)


def train(settings: dict[str, Any], folder: Path) -> None:
    """One fit on this rank."""
    warnings.simplefilter("ignore")
    callback = AutoAccumulate(**settings["accumulate"])
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", save_distributed_checkpoint=False
    )
    loader = DataLoader(Samples(settings["size"]), settings["batch_size"], shuffle=True)
    module = Sharded()
    module.fails_at = settings.get("fails", {}).get(os.environ["RANK"])
    _, trainer = fit(loader, callback, module=module, strategy=strategy, devices=2)
    record = {
        "windows": module.windows,
        "gradients": module.gradients,
        "limit": callback.probe.limit if callback.probe else None,
        "method": callback.probe.method if callback.probe else None,
        "trials": [trial.fits for trial in callback.probe.trials] if callback.probe else [],
        "weights": [parameter.full_tensor() for parameter in module.net.parameters()],
    }
    torch.save(record, folder / f"rank{trainer.global_rank}.pt")
