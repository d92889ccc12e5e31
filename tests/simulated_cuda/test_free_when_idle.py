"""What training under ``AutoAccumulate`` asks of a CUDA device beside stock Lightning, when memory suffices.

PyTorch's own kernels are launched on the simulated device, and counted; they compute nothing.
"""

from collections import Counter
from typing import Any, NamedTuple

import device_counters as counters
import lightning.pytorch as pl
import pytest
import torch
from device_counters import Counts
from reference import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate

pytestmark = [
    pytest.mark.skipif(not counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"),
    pytest.mark.usefixtures("no_values"),
]
WIDTH, BLOCKS, MICRO_BATCH, FACTOR = 32, 36, 4, 4  # ResNet-34 has 36 BatchNorms
WARM_UP, WINDOWS = 2, 3  # windows that are not counted, and that are


class Seen(NamedTuple):
    """What some windows of a training asked of the device."""

    counts: Counts
    launches: Counter[str]


class Counting(pl.Callback):
    """Reads the counters at the end of two windows."""

    def __init__(self) -> None:
        self.begun = False
        self.seen: Seen | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == WARM_UP and not self.begun:
            self.begun = True
            counters.reset()
        elif trainer.global_step == WARM_UP + WINDOWS and self.seen is None:
            self.seen = Seen(counters.read(), counters.launches())


class Deep(pl.LightningModule):
    """Layers whose steps cost nothing but their launches."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.ReLU(), nn.Dropout(0.1)) for _ in range(BLOCKS)
        ]
        self.net = nn.Sequential(*blocks, nn.Linear(WIDTH, 5))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train(norm: type[nn.Module], precision: Any, *ours: AutoAccumulate) -> Seen:
    """Stock Lightning, or the same micro-batches under the callback."""
    size = MICRO_BATCH * FACTOR * (WARM_UP + WINDOWS)
    data = TensorDataset(torch.randn(size, WIDTH), torch.randint(5, (size,)))
    counting = Counting()
    trainer = quiet_trainer(
        *ours,
        counting,
        accelerator="gpu",
        devices=1,
        precision=precision,
        max_epochs=1,
        accumulate_grad_batches=1 if ours else FACTOR,
    )
    trainer.fit(Deep(norm), DataLoader(data, batch_size=MICRO_BATCH * (FACTOR if ours else 1)))
    assert counting.seen is not None
    return counting.seen


def accumulate(micro_batching: Any) -> AutoAccumulate:
    return AutoAccumulate(
        micro_batch_size=MICRO_BATCH, micro_batching=micro_batching, verify=False, batch_norm="ignore"
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("mode", ["loader", "step"])
def test_a_window_asks_no_more_of_the_device(mode: str, norm: type[nn.Module], precision: str) -> None:
    """No wait, no copy to the host and no question about memory more than stock Lightning, and 1 % of launches."""
    stock, ours = train(norm, precision), train(norm, precision, accumulate(mode))
    for name in ("waits", "copies_to_host", "copies_from_host", "copies_on_device", "mallocs", "memory_queries"):
        assert getattr(ours.counts, name) <= getattr(stock.counts, name), name
    more = ours.launches - stock.launches
    assert ours.counts.launches <= 1.01 * stock.counts.launches, more.most_common()
    assert ours.counts.products == stock.counts.products > 0
