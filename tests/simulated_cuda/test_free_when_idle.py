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
from torchmetrics import MeanMetric, MeanSquaredError

from lightning_ga import AutoAccumulate

pytestmark = pytest.mark.skipif(not counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda")
WIDTH, BLOCKS, MICRO_BATCH, FACTOR = 32, 36, 4, 4  # ResNet-34 has 36 BatchNorms
WARM_UP, WINDOWS = 2, 3  # windows that are not counted, and that are
MODES = (None, "loader", "step")
OURS: dict[str, Any] = {"micro_batch_size": MICRO_BATCH, "verify": False, "batch_norm": "ignore"}


class Seen(NamedTuple):
    """What some windows of a training asked of the device."""

    counts: Counts
    launches: Counter[str]


class Counting(pl.Callback):
    """Reads the counters at the end of two windows."""

    begun, seen = False, Seen(Counts(*[0] * len(Counts._fields)), Counter())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == WARM_UP and not self.begun:
            self.begun = True
            counters.reset()
        elif trainer.global_step == WARM_UP + WINDOWS:
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

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Metered(Deep):
    """Counts in metrics that do not wait for the device by themselves."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__(norm)
        self.mean, self.error = MeanMetric(nan_strategy="disable"), MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.error.update(batch[0][:, 1], batch[0][:, 0])
        return loss


def train_deep(mode: Any, module: Deep, **settings: Any) -> Seen:
    """Train under the callback, or with ``mode=None`` under stock Lightning."""
    ours = [] if mode is None else [AutoAccumulate(**OURS, micro_batching=mode)]
    size = MICRO_BATCH * FACTOR * (WARM_UP + WINDOWS)
    data = TensorDataset(torch.randn(size, WIDTH), torch.randint(5, (size,)))
    counting = Counting()
    settings |= {"accelerator": "gpu", "accumulate_grad_batches": 1 if ours else FACTOR}
    trainer = quiet_trainer(*ours, counting, max_epochs=1, **settings)
    trainer.fit(module, DataLoader(data, batch_size=MICRO_BATCH * (FACTOR if ours else 1)))
    return counting.seen


def asks_no_more(ours: Seen, stock: Seen, *, pieces_of_metrics: bool = False) -> None:
    """No wait, no copy and no question about memory more than stock Lightning, and 1 % of launches.

    Pieces of metrics are put together by more launches and copies, without a wait.
    """
    names = ["waits", "copies_to_host", "memory_queries"]
    names += [] if pieces_of_metrics else ["copies_from_host", "copies_on_device", "mallocs"]
    for name in names:
        assert getattr(ours.counts, name) <= getattr(stock.counts, name), name
    assert ours.counts.products == stock.counts.products > 0
    assert pieces_of_metrics or ours.counts.launches <= 1.01 * stock.counts.launches, (
        ours.launches - stock.launches
    ).most_common()


PROGRAMS: dict[str, tuple[type[Deep], type[nn.Module], dict[str, Any]]] = {
    "32-true": (Deep, nn.LayerNorm, {}),
    "bf16-mixed, BatchNorm": (Deep, nn.BatchNorm1d, {"precision": "bf16-mixed"}),
    "16-mixed, clipped": (Deep, nn.LayerNorm, {"precision": "16-mixed", "gradient_clip_val": 0.1}),
    "metrics": (Metered, nn.LayerNorm, {}),
}


@pytest.mark.usefixtures("no_values")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_window_asks_no_more_of_the_device(name: str) -> None:
    kind, norm, settings = PROGRAMS[name]
    stock, *ours = (train_deep(mode, kind(norm), **settings) for mode in MODES)
    for each in ours:
        asks_no_more(each, stock, pieces_of_metrics=kind is Metered)
