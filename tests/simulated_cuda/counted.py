"""Trainings that count what they ask of the device: stock Lightning, and the same micro-batches under the callback."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import device_counters as counters
import device_values
import lightning.pytorch as pl
import torch
from device_counters import Counts
from lightning.pytorch.strategies import DDPStrategy
from reference import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError

from lightning_ga import AutoAccumulate

WIDTH, BLOCKS, MICRO_BATCH, FACTOR = 32, 36, 4, 4  # ResNet-34 has 36 BatchNorms
WARM_UP, WINDOWS = 2, 3  # windows that are not counted, and that are
OURS: dict[str, Any] = {"micro_batch_size": MICRO_BATCH, "verify": False, "batch_norm": "ignore"}


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


class Scheduled(Deep):
    """Steps a schedule of several groups of weights after every window."""

    def configure_optimizers(self) -> Any:
        weights = [*self.parameters()]
        optimizer = torch.optim.AdamW([{"params": weights[::2]}, {"params": weights[1::2], "lr": 0.1}])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Toggled(Deep):
    """Trains parts of the model by turns, as a GAN does."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[:-1].requires_grad_(self.global_step % 2 == 0)


class Metered(Deep):
    """Counts in metrics that do not wait for the device by themselves."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__(norm)
        self.mean = MeanMetric(nan_strategy="disable")
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores = self.net(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1])
        self.mean.update(loss.detach())
        self.error.update(scores.detach()[:, 0], batch[0][:, 0])
        return loss


def train(
    norm: type[nn.Module],
    precision: Any,
    mode: Any,
    ranks: int = 1,
    *callbacks: pl.Callback,
    kind: type[Deep] = Deep,
    **settings: Any,
) -> Seen:
    """Train under the callback, or with ``mode=None`` under stock Lightning."""
    ours = [] if mode is None else [AutoAccumulate(**OURS, micro_batching=mode)]
    size = MICRO_BATCH * FACTOR * (WARM_UP + WINDOWS) * ranks
    data = TensorDataset(torch.randn(size, WIDTH), torch.randint(5, (size,)))
    counting = Counting()
    trainer = quiet_trainer(
        *ours,
        counting,
        *callbacks,
        accelerator="gpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto",
        precision=precision,
        max_epochs=1,
        accumulate_grad_batches=1 if ours else FACTOR,
        **settings,
    )
    trainer.fit(kind(norm), DataLoader(data, batch_size=MICRO_BATCH * (FACTOR if ours else 1)))
    assert counting.seen is not None
    return counting.seen


def train_as_rank(ranks: int, mode: Any, folder: Path) -> None:
    """One of the ranks, which leaves what it saw."""
    device_values.only_what_is_read()
    torch.save(train(nn.LayerNorm, "32-true", mode, ranks), folder / f"{mode}-{torch.distributed.get_rank()}.pt")
