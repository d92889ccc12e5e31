"""On a caching allocator: a step that no dispatch mode can record has a limit all the same, from its peaks."""

from typing import Any

import device_counters
import lightning.pytorch as pl
import pytest
import torch
from reference import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate

pytestmark = pytest.mark.skipif(
    not device_counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"
)
MIB = 2**20


class Labelled(torch.Tensor):
    """Made in a way that PyTorch refuses within a dispatch mode."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        return super().__new__(cls, values)


class Network(pl.LightningModule):
    def __init__(self, labels: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 256))
        self.labels = labels

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0]
        if self.labels:
            inputs = Labelled(inputs.detach()).as_subclass(torch.Tensor)
        return self.net(inputs).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def limit(labels: bool) -> int:
    callback = AutoAccumulate(cache=False, verify=False, memory_budget=60 * MIB)
    loader = DataLoader(TensorDataset(torch.randn(4096, 256)), batch_size=2048)
    quiet_trainer(callback, max_steps=1).fit(Network(labels), loader)
    return callback.probe.limit


def test_a_step_that_refuses_a_recording_is_tried_without_one() -> None:
    recorded = limit(labels=False)
    assert 8 < recorded < 2048
    assert abs(limit(labels=True) - recorded) <= 0.02 * recorded
