"""On a caching allocator: where one sample does not fit, submodules are computed again; retries lower the limit."""

import warnings
from typing import Any

import device_counters
import lightning.pytorch as pl
import pytest
import torch
from reference import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate
from lightning_ga.models.gpt import Decoder

pytestmark = pytest.mark.skipif(
    not device_counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"
)
MIB = 2**20


class Model(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def perceptron() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)))


def convolutions() -> nn.Module:
    blocks = (nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GELU(), nn.GroupNorm(4, 32)) for _ in range(8))
    return nn.Sequential(nn.Conv2d(3, 32, 1), *blocks)


MODELS = {  # the net, one batch of samples, and a budget that one of them exceeds
    "perceptron": (perceptron, torch.randn(8, 1024, 256), 120 * MIB),
    "convolutions": (convolutions, torch.randn(8, 3, 192, 192), 90 * MIB),
    "GPT": (lambda: Decoder(64, 256, 256, 6, 8), torch.randint(64, (8, 256)), 118 * MIB),
}


def train_net(net: nn.Module, samples: Tensor, **given: Any) -> tuple[AutoAccumulate, int]:
    """One epoch of two windows; also the most bytes that the allocator has handed out in training."""
    callback = AutoAccumulate(verify=False, cache=False, **given)
    data = DataLoader(TensorDataset(samples.repeat(2, *[1] * (samples.dim() - 1))), batch_size=len(samples))
    trainer = quiet_trainer(callback, Peak(), max_epochs=1, accelerator="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Model(net), data)
    return callback, torch.cuda.max_memory_reserved()


class Peak(pl.Callback):
    def on_train_start(self, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()


@pytest.mark.parametrize("name", MODELS)
def test_one_sample_that_does_not_fit_trains_without_an_error(name: str) -> None:
    make, samples, budget = MODELS[name]
    callback, reserved = train_net(make(), samples, checkpoint="auto", memory_budget=budget)
    assert callback.probe.recomputed is not None
    assert callback.oom_events == 0
    assert reserved <= budget
    assert callback.probe.peak_bytes >= 0.75 * budget
