"""Memory runs out for real, at places that chance picks: the same gradients and samples as in an undisturbed training.

Other processes take the device's memory, so that PyTorch's own allocator fails where it next asks for more: in a
forward or backward pass, in the transfer of a batch. ``integration/test_survive_update.py`` is about updates.
"""

import random
from functools import partial
from typing import Any

import device_counters
import lightning.pytorch as pl
import pytest
import torch
from reference import quiet_trainer, worst_error
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate

pytestmark = [
    pytest.mark.skipif(not device_counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"),
    pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning"),
    # Memory that is taken away for a while makes the allocator free its cache, and the limit falls before an error.
    pytest.mark.filterwarnings("ignore:The allocator had to free its cache in two windows:UserWarning"),
]
MIB = 2**20
LENGTH, WIDTH, HIDDEN = 16, 64, 2048  # a sample's activations take 256 KiB a layer in 64 bits; a weight 1 MiB
MICRO_BATCH, WINDOW, WINDOWS = 16, 40, 3  # in 64 bits; four times as many samples in 16
SEEDS = 5
LEFT = {  # MiB
    "64-true": (6, 8, 10, 12, 16, 24),
    "16-mixed": (3, 4, 6, 8),
    "bf16-mixed": (3, 4, 6, 8),
}


class Wide(pl.LightningModule):
    """Keeps the gradient of every step, and the samples behind it."""

    def __init__(self, optimizer: Any, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(width, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, width), nn.LayerNorm(width))
        self.net.to(dtype)
        self.optimizer = optimizer
        self.gradients: list[torch.Tensor] = []
        self.windows: list[set[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, indices = batch
        self.windows += [set()] * (self.global_step + 1 - len(self.windows))
        self.windows[-1] = self.windows[-1] | set(indices.tolist())
        loss = (self.net(inputs) - inputs).square().mean()
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(torch.cat([parameter.grad.cpu().flatten() for parameter in self.parameters()]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class Thief(pl.Callback):
    """Leaves little memory from somewhere in a window until its gradients are complete."""

    def __init__(self, seed: int | None) -> None:
        self.choices = None if seed is None else random.Random(seed)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steal(trainer)

    def on_before_optimizer_step(self, *_: Any) -> None:
        give_back()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        give_back()
        self.steal(trainer)  # memory for the transfer of the next batch

    def on_train_end(self, *_: Any) -> None:
        give_back()

    on_exception = on_train_end

    def steal(self, trainer: pl.Trainer) -> None:
        if self.choices is None or self.choices.random() < 0.3:
            return
        give_back()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        device_counters.take(max(0, free - self.choices.choice(LEFT[trainer.precision]) * MIB))


def give_back() -> None:
    device_counters.take(0)


def train_beside_thief(thief: Thief, mode: Any, optimizer: Any, precision: Any = "64-true") -> tuple[Wide, int]:
    """The module, and how often memory ran out."""
    dtype, times = (torch.float64, 1) if precision == "64-true" else (torch.float32, 4)
    width = WIDTH if precision == "64-true" else WIDTH // 8  # a CPU multiplies matrices in 16 bits slowly
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(times * WINDOW * WINDOWS - 7, LENGTH, width, generator=generator, dtype=dtype)
    loader = DataLoader(TensorDataset(data, torch.arange(len(data))), batch_size=times * WINDOW, shuffle=True)
    callback = AutoAccumulate(micro_batch_size=times * MICRO_BATCH, micro_batching=mode, verify=False)
    module = Wide(optimizer, width, dtype)
    trainer = quiet_trainer(callback, thief, accelerator="gpu", precision=precision, max_epochs=1)
    trainer.fit(module, loader)
    return module, callback.oom_events


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
fused = partial(torch.optim.AdamW, lr=1e-3, fused=True)
by_lists = partial(torch.optim.AdamW, lr=1e-3, foreach=True)


@pytest.mark.parametrize(
    ("mode", "optimizer", "precision", "error"),
    [
        ("loader", sgd, "64-true", 1e-12),
        ("step", fused, "64-true", 1e-12),
        ("loader", by_lists, "16-mixed", 5e-2),
        ("step", sgd, "bf16-mixed", 5e-2),
    ],
    ids=["loader, SGD", "step, fused", "loader, fp16", "step, bf16"],
)
def test_gradients_and_samples_are_those_of_an_undisturbed_training(mode, optimizer, precision, error):
    whole, _ = train_beside_thief(Thief(None), mode, optimizer, precision)
    events = []
    for seed in range(SEEDS):
        stolen, ooms = train_beside_thief(Thief(seed), mode, optimizer, precision)
        events.append(ooms)
        assert stolen.windows == whole.windows
        assert worst_error(stolen.gradients, whole.gradients) <= error
    assert sum(map(bool, events)) >= 2, events
