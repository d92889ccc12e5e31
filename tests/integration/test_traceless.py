"""Training after a probe and a check is bit for bit the training with the same micro-batch and neither."""

import random
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from reference import Regression, Samples, StreamOf, fit, fp16_on_the_cpu, quiet_trainer, worst_error
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.snapshot.trial_isolation import TensorValues

# Spectral normalization changes its vectors in every pass.
pytestmark = pytest.mark.filterwarnings("ignore:Accumulation is not exact", "ignore:.*does not have many workers")


class Everything(pl.LightningModule):
    """Whatever a step may change: buffers, metrics, random numbers, counters, state made on the way."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Conv2d(1, 4, 3))
        self.features = torch.nn.Sequential(layer, torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Dropout(0.3))
        self.head = torch.nn.Linear(4 * 100, 10)
        self.accuracy, self.kept = torchmetrics.Accuracy("multiclass", num_classes=10), torchmetrics.CatMetric()
        self.generator = torch.Generator().manual_seed(3)
        self.calls, self.seen, self.told = 0, list[int](), list[Any]()
        self.average: torch.Tensor | None = None
        self.register_buffer("scale", torch.ones(()))

    def on_train_epoch_start(self) -> None:
        self.log("started", 1.0)
        self.told.append(dict(self.trainer.callback_metrics))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        graded = sum(parameter.grad is not None for parameter in self.parameters())
        self.told.append((graded, self.kept.update_count, self.kept._computed))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        self.calls += 1
        self.seen.append(len(labels))
        hidden = self.features(images + 0.01 * torch.randn(images.shape, generator=self.generator))
        logits = self.scale * self.head(hidden.flatten(1)) * (1 + 0.01 * random.random() + 0.01 * np.random.rand())
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
        """In a trial alone: change settings, freeze, replace, hook, stop."""
        if self.calls == 1 and batch_idx == 1:
            self.trainer.should_stop = True
            self.optimizers().optimizer.param_groups[0]["weight_decay"] = 0.5
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
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Watcher(pl.Callback):
    """Notes all that a callback is told and sees."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        steps = (trainer.global_step, loop.batch_idx, loop.total_batch_idx, trainer.should_stop)
        self.told.append((sorted(vars(trainer)), list(map(type, trainer.callbacks)), type(trainer.logger), steps))

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        metrics = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
        self.told.append([dict(each) for each in metrics])

    def on_before_backward(self, *_: Any) -> None:
        self.told.append("backward")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.told.append("zero_grad")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.told.append("step")


def run(folder: Path, callback: AutoAccumulate, **settings: Any) -> Any:
    """Everything that is left of a run on a shuffled loader, tensors as numbers."""
    pl.seed_everything(5, verbose=False)
    module, watcher, smooth = Everything(), Watcher(), pl.callbacks.EMAWeightAveraging(decay=0.8)
    dataset = TensorDataset(torch.randn(45, 1, 12, 12), torch.randint(0, 10, (45,)))
    settings = {"logger": CSVLogger(folder), "log_every_n_steps": 1, **settings}
    trainer = quiet_trainer(callback, watcher, smooth, **settings)
    trainer.fit(module, DataLoader(dataset, batch_size=16, shuffle=True, num_workers=1))
    left = {
        "weights": module.state_dict(),
        "frozen": [parameter.requires_grad for parameter in module.parameters()],
        "modes": [(each.training, len(each._forward_hooks)) for each in module.modules()],
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "random": (torch.rand(3), torch.rand(3, generator=module.generator), random.random(), np.random.rand()),
        "counters": (module.calls, module.seen, module.average, module.told),
        "metrics": (trainer.callback_metrics, trainer.logged_metrics),
        "loops": trainer.fit_loop.state_dict(),
        "steps": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "scaler": getattr(trainer.precision_plugin, "state_dict", dict)(),
        "csv": (Path(trainer.logger.log_dir) / "metrics.csv").read_text(),
        "callbacks": (watcher.told, smooth.state_dict()),
    }
    return tree_map_only(torch.Tensor, torch.Tensor.tolist, left)


@pytest.mark.parametrize(
    ("settings", "budget"),
    [({"gradient_clip_val": 0.1}, "190KB"), ({"plugins": fp16_on_the_cpu}, "150KB")],
    ids=["clipped", "fp16"],
)
def test_a_probe_leaves_no_trace(settings: dict[str, Any], budget: str, tmp_path: Path) -> None:
    """Weights, optimizer, scaler, schedule, random numbers, metrics, log files, callbacks, counters and loops."""

    def after(folder: str, callback: AutoAccumulate) -> Any:
        made = {key: value() if callable(value) else value for key, value in settings.items()}
        return run(tmp_path / folder, callback, **made)

    probed = AutoAccumulate(memory_budget=budget, batch_norm="ignore", cache=False)
    after_probe = after("probed", probed)
    assert probed.probe is not None
    assert probed.plan.factor > 1
    fixed = AutoAccumulate(micro_batch_size=probed.probe.limit, batch_norm="ignore")
    assert after_probe == after("fixed", fixed)


def test_the_check_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where memory runs out as it is undone."""
    without = run(tmp_path / "without", AutoAccumulate(micro_batch_size=5, verify=False))
    assert run(tmp_path / "with", AutoAccumulate(micro_batch_size=5)) == without
    restore, attempts = TensorValues.restore, count()

    def fails_at_first(values: TensorValues) -> None:
        if (number := next(attempts)) > 3 and number % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        restore(values)

    monkeypatch.setattr(TensorValues, "restore", fails_at_first)
    assert run(tmp_path / "failing", AutoAccumulate(micro_batch_size=5)) == without
    assert next(attempts) > 8


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["coo", "csr", "conjugate"])
def test_buffers_that_are_not_dense_are_kept(kind: str) -> None:
    """The adjacency of a graph, say: with a probe, the check of exactness and a guard against errors of memory."""
    module, eye = Regression(), torch.eye(3)
    made = {"coo": eye.to_sparse, "csr": eye.to_sparse_csr, "conjugate": lambda: eye.to(torch.complex64).conj()}
    module.register_buffer("adjacency", made[kind]())
    callback = AutoAccumulate(8, max_micro_batch_size=4, cache=False)
    fit(DataLoader(Samples(32), batch_size=8), callback, module=module, max_epochs=1)
    assert callback.plan.factor == 2
    assert torch.equal(module.adjacency.to_dense().real, eye)


class Adaptive(Regression):
    """Without a schedule, through which its optimizer would be found as well."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_an_optimizer_without_a_schedule_begins_anew() -> None:
    weights = []
    for found in ("auto", 4):
        module, callback = Adaptive(), AutoAccumulate(8, micro_batch_size=found, max_micro_batch_size=4, cache=False)
        fit(DataLoader(Samples(32), batch_size=8), callback, module=module, max_epochs=1)
        weights.append(list(module.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*weights))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_collate_function_draws_on_a_device_comes_back() -> None:
    """Where samples are looked at, apart from training; the seed alone decides what it draws, as on the host."""
    loader = DataLoader(Samples(4), collate_fn=lambda samples: torch.rand(len(samples), device="cuda"))
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    first, again, other = (KnownSamples(loader).collate([0, 1], 2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Scales:
    """Counts and draws in a hook of the transfer, and scales what passes by both."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {"batches": 0}
        self.calls = 0
        self.noise = np.random.default_rng(3)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen["batches"] += 1
        self.calls += 1
        scale = 1 + 0.1 * self.calls + 0.01 * self.seen["batches"] + float(self.noise.random())
        return [batch[0] * scale, *batch[1:]]


class ScalingModule(Scales, Regression):
    """Has the hook itself."""


class ScalingData(Scales, pl.LightningDataModule):
    """Has the hook, and the data: one stream, or one dataset."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


@pytest.mark.parametrize("kind", [Samples, StreamOf])
@pytest.mark.parametrize("owner", ["module", "data"])
@pytest.mark.parametrize("mode", ["loader", "step"])
def test_hooks_of_the_transfer_keep_their_state(kind: Any, owner: str, mode: Any) -> None:
    """They run for trials, too: on batches of few samples, and on the first of training before it is trained on."""

    def run(*callbacks: Any, **settings: Any) -> Regression:
        data: Any = DataLoader(Samples(48) if kind is Samples else StreamOf(Samples(48)), 8)
        module = ScalingModule() if owner == "module" else Regression()
        trained, _ = fit(data if owner == "module" else ScalingData(data), *callbacks, module=module, **settings)
        assert isinstance(trained, Regression)
        return trained

    ours = run(AutoAccumulate(micro_batching=mode, cache=False))
    assert worst_error(ours.gradients, run().gradients) == 0.0
