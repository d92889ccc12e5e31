"""A training in which whatever a step may change matters, and all that is left of it."""

import random
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from reference import quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate, ExactnessWarning

SAMPLES, BATCH = 45, 16
STEPS = 3  # of an epoch


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
        self.graded: list[int] = []
        self.counted: list[Any] = []
        self.read: list[dict[str, Any]] = []
        self.tap = Tap(self.head)
        self.register_buffer("scale", torch.ones(()))

    def on_fit_start(self) -> None:
        self.tracker = Tracker()  # after the callback that averages weights has copied the module

    def on_train_epoch_start(self) -> None:
        self.log("started", 1.0)
        self.read.append(dict(self.trainer.callback_metrics))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.graded.append(sum(parameter.grad is not None for parameter in self.parameters()))
        self.counted.append((self.kept.update_count, self.kept._computed))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        self.calls += 1
        self.seen.append(len(labels))
        self.tracker.count(len(labels))
        hidden = self.features(images + 0.01 * torch.randn(images.shape, generator=self.generator))
        hidden, _ = self.recurrent(hidden.flatten(2).permute(2, 0, 1).reshape(6, len(labels), -1))
        logits = self.scale * self.head(hidden[-1]) * (1 + 0.01 * random.random() + 0.01 * np.random.rand())
        loss = torch.nn.functional.cross_entropy(logits, labels)
        self.average = loss.detach() if self.average is None else 0.9 * self.average + 0.1 * loss.detach()
        self.accuracy(logits, labels)
        self.kept(loss.detach())
        self.kept.compute()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        if self.calls == 1 and batch_idx == 1:
            self.log("once", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.calls == 1 and batch_idx == 1:
            self.act_once()

    def act_once(self) -> None:
        """What a user's step may do at some moment: change settings, freeze, replace, hook, stop."""
        trainer, optimizer = self.trainer, self.optimizers().optimizer
        trainer.should_stop, trainer.mine = True, 1
        trainer.datamodule.asked += 1
        optimizer.param_groups[0]["weight_decay"] = 0.5
        optimizer.mine = 1
        self.lr_schedulers().step()
        self.features[3].eval()
        self.head.bias.requires_grad_(False)
        self.scale = torch.full((), 2.0)
        self.head.register_forward_hook(lambda *_: self.seen.append(-1))

    def on_train_epoch_end(self) -> None:
        self.log("kept", self.kept.compute().mean())
        self.kept.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS * self.trainer.max_epochs)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Tap:
    """An object of the user's that a hook writes to."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.outputs = 0
        layer.register_forward_hook(self.hook)

    def hook(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.outputs += 1


class Tracker:
    """An object of the user's that cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.total, self.history = threading.Lock(), 0, [0]

    def count(self, samples: int) -> None:
        with self.lock:
            self.total += samples
            self.history.append(samples)


class Quiet(SimpleProfiler):
    """Counts what runs, and prints nothing."""

    def describe(self) -> None:
        """Say nothing."""


class Average(pl.Callback):
    """An EMA of the weights, as users write it, with notes of all that a callback is told and sees."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.told: list[str] = []
        self.at_start: dict[str, Any] = {}
        self.before: list[Any] = []
        self.forwards: list[int] = []

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        forwards = self.forwards
        module.features.register_forward_hook(lambda *_: forwards.append(1))

    def on_train_start(self, trainer: Any, module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        self.at_start = {
            "attributes": sorted(vars(trainer)),
            "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
            "steps": (trainer.global_step, loop.batch_idx, loop.total_batch_idx, trainer.should_stop),
            "logger": type(trainer.logger).__name__,
            "profiler": type(trainer.profiler).__name__,
            "metrics": (dict(trainer.callback_metrics), dict(trainer.logged_metrics)),
        }

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        metrics = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
        self.before.append([dict(each) for each in metrics])

    def on_before_backward(self, *_: Any) -> None:
        self.told.append("backward")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.told.append("zero_grad")

    def on_before_optimizer_step(self, trainer: Any, module: Any, *args: Any) -> None:
        self.told.append("step")
        new = [parameter.detach().clone() for parameter in module.parameters()]
        self.weights = [0.9 * old + 0.1 * now for old, now in zip(self.weights, new)] if self.weights else new


class Data(pl.LightningDataModule):
    """A shuffled loader with workers."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers, self.asked = workers, 0

    def train_dataloader(self) -> Any:
        images, labels = torch.randn(SAMPLES, 1, 8, 8), torch.randint(0, 10, (SAMPLES,))
        return DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True, num_workers=self.workers)


def run(folder: Path, callback: AutoAccumulate, *, workers: int = 0, **settings: Any) -> dict[str, Any]:
    """Everything that is left of a run."""
    pl.seed_everything(5, verbose=False)
    module, average, data = Everything(), Average(), Data(workers)
    smooth = pl.callbacks.EMAWeightAveraging(decay=0.8)
    profiler = Quiet()
    settings = {"logger": CSVLogger(folder), "log_every_n_steps": 1, "profiler": profiler, **settings}
    trainer = quiet_trainer(callback, average, smooth, **settings)
    with warnings.catch_warnings():  # spectral normalization changes its vectors in every pass, which is told
        warnings.filterwarnings("ignore", "Accumulation is not exact", ExactnessWarning)
        trainer.fit(module, datamodule=data)
    draw = (torch.rand(3), torch.rand(3, generator=module.generator), random.random(), np.random.rand())
    optimizer = trainer.optimizers[0]
    return {
        "weights": module.state_dict(),
        "frozen": [parameter.requires_grad for parameter in module.parameters()],
        "modes": [each.training for each in module.modules()],
        "hooks": [len(each._forward_hooks) for each in module.modules()],
        "optimizer": optimizer.state_dict(),
        "optimizer's own": sorted(vars(optimizer)),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "random": draw,
        "counters": (module.calls, module.seen, module.average, module.graded, module.read, module.tap.outputs),
        "metric": module.counted,
        "tracker": (module.tracker.total, module.tracker.history),
        "datamodule": data.asked,
        "metrics": (trainer.callback_metrics, trainer.logged_metrics),
        "loops": trainer.fit_loop.state_dict(),
        "steps": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "csv": (Path(trainer.logger.log_dir) / "metrics.csv").read_text(),
        "scaler": getattr(trainer.precision_plugin, "state_dict", dict)(),
        "callback": (average.told, average.weights, average.at_start, average.before, average.forwards),
        "smooth": smooth.state_dict(),
        "profiler": {
            name: len(times) for name, times in profiler.recorded_durations.items() if "[Callback]" not in name
        },
    }


def difference(ours: Any, theirs: Any, where: str = "") -> str | None:
    """The first place where two records are not bit for bit the same."""
    if isinstance(theirs, torch.Tensor):
        return None if isinstance(ours, torch.Tensor) and torch.equal(ours, theirs) else where
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or list(map(str, ours)) != list(map(str, theirs)):
            return f"{where}: {ours!s:.300} instead of {theirs!s:.300}"
        pairs = [(ours[key], theirs[key], f"{where}.{key}") for key in theirs]
    elif isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{where}: {ours!s:.300} instead of {theirs!s:.300}"
        pairs = [(a, b, f"{where}[{n}]") for n, (a, b) in enumerate(zip(ours, theirs))]
    else:
        return None if ours == theirs else f"{where}: {ours!s:.300} instead of {theirs!s:.300}"
    return next((found for pair in pairs if (found := difference(*pair)) is not None), None)


def fp16_on_the_cpu() -> Any:
    """Lightning turns 16-mixed into bf16 on the CPU; a plugin with a scaler of its own does fp16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    return pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
