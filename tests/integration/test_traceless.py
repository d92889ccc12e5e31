"""Training after a probe is bit for bit the training with the same micro-batch and no probe."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from reference import quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate


class Everything(pl.LightningModule):
    """Whatever a step may change: buffers, metrics, random numbers, counters, state made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.utils.parametrizations.spectral_norm(torch.nn.Conv2d(1, 4, 3)),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
        )
        self.recurrent = torch.nn.LSTM(4 * 6, 8)
        self.head = torch.nn.Linear(8, 10)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.kept = torchmetrics.CatMetric()
        self.generator = torch.Generator().manual_seed(3)
        self.calls = 0
        self.seen: list[int] = []
        self.average: torch.Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        self.calls += 1
        self.seen.append(len(labels))
        hidden = self.features(images + 0.01 * torch.randn(images.shape, generator=self.generator))
        hidden, _ = self.recurrent(hidden.flatten(2).permute(2, 0, 1).reshape(6, len(labels), -1))
        logits = self.head(hidden[-1]) * (1 + 0.01 * random.random() + 0.01 * np.random.rand())
        loss = torch.nn.functional.cross_entropy(logits, labels)
        self.average = loss.detach() if self.average is None else 0.9 * self.average + 0.1 * loss.detach()
        self.accuracy(logits, labels)
        self.kept(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("kept", self.kept.compute().mean())
        self.kept.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Average(pl.Callback):
    """An EMA of the weights, as users write it."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.calls = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.calls += 1
        new = [parameter.detach().clone() for parameter in module.parameters()]
        self.weights = [0.9 * old + 0.1 * now for old, now in zip(self.weights, new)] if self.weights else new


def run(folder: Path, callback: AutoAccumulate, **settings: Any) -> dict[str, Any]:
    """Everything that is left of a run."""
    pl.seed_everything(5, verbose=False)
    images, labels = torch.randn(45, 1, 8, 8), torch.randint(0, 10, (45,))
    average = Average()
    module = Everything()
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True, num_workers=2)
    settings = {"logger": CSVLogger(folder), "log_every_n_steps": 1, **settings}
    trainer = quiet_trainer(callback, average, **settings)
    trainer.fit(module, loader)
    return {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "random": (torch.rand(3), torch.rand(3, generator=module.generator), random.random(), np.random.rand()),
        "counters": (module.calls, module.seen, module.average, average.calls, average.weights),
        "metrics": (trainer.callback_metrics, trainer.logged_metrics),
        "loops": trainer.fit_loop.state_dict(),
        "csv": (Path(trainer.logger.log_dir) / "metrics.csv").read_text(),
        "scaler": getattr(trainer.precision_plugin, "state_dict", dict)(),
    }


def fp16_on_the_cpu() -> Any:
    """Lightning turns 16-mixed into bf16 on the CPU; a plugin with a scaler of its own does fp16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    return pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)


@pytest.mark.parametrize(
    ("settings", "budget"),
    [({}, "120KB"), ({"gradient_clip_val": 0.1}, "120KB"), ({"plugins": fp16_on_the_cpu}, "60KB")],
    ids=["plain", "clipped", "fp16"],
)
def test_a_probe_leaves_no_trace(settings: dict[str, Any], budget: str, tmp_path: Path) -> None:
    """Weights, optimizer, scaler, schedule, random numbers, metrics, log files, callbacks, counters and loops."""
    make = {key: value() if callable(value) else value for key, value in settings.items()}
    probed = AutoAccumulate(memory_budget=budget, batch_norm="ignore")
    after_probe = run(tmp_path / "probed", probed, **make)
    assert probed.probe is not None
    assert probed.plan.factor > 1
    make = {key: value() if callable(value) else value for key, value in settings.items()}
    without = run(
        tmp_path / "without", AutoAccumulate(micro_batch_size=probed.probe.limit, batch_norm="ignore"), **make
    )
    assert str(after_probe.keys()) == str(without.keys())
    for name in without:
        assert_same(after_probe[name], without[name], name)


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    """Bitwise equality of nested records."""
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, (a, b) in enumerate(zip(ours, theirs)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert ours == theirs, f"{where}: {ours} instead of {theirs}"
