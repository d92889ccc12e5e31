"""Trainers of ``pytorch_lightning`` take the callback as those of ``lightning.pytorch`` do."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytorch_lightning
import torch
from forks import forked
from reference import Regression, Samples, cut, fit, network, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate


class LegacyRegression(pytorch_lightning.LightningModule):
    """The reference task in the other namespace."""

    training_step, configure_optimizers = Regression.training_step, Regression.configure_optimizers
    on_before_optimizer_step = Regression.on_before_optimizer_step

    def __init__(self) -> None:
        super().__init__()
        self.net, self.lr = network(), 0.1
        self.micro_batches, self.gradients = list[Any](), list[torch.Tensor]()


def test_the_other_namespace_trains_the_same() -> None:
    """Probe included; nothing is left of it for a fit of this namespace in the same process."""
    callback = AutoAccumulate(16, memory_budget=3000)
    module = LegacyRegression()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pytorch_lightning.Trainer(max_epochs=1, callbacks=[callback], accelerator="cpu", **quiet)
    trainer.fit(module, DataLoader(Samples(40), batch_size=8))
    assert callback.plan.factor > 1
    after, _ = fit(DataLoader(Samples(40), batch_size=16), AutoAccumulate(micro_batch_size=3), max_epochs=1)
    for gradients in (module.gradients, after.gradients):
        assert worst_error(gradients, plain_loop(Samples(40), cut(range(40), 16))) <= 1e-12


ROOMS = ("callback", "train", "report", "testing", "weights", "models", "data")


def import_all() -> None:
    """Import all that is public anew, where ``pytorch_lightning`` cannot be."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pytorch_lightning", "lightning_ga")]:
        del sys.modules[name]
    sys.modules["pytorch_lightning"] = None  # type: ignore[assignment]
    package = import_module("lightning_ga")
    assert all(hasattr(package, name) for name in package.__all__)
    assert all(import_module(f"lightning_ga.{name}") for name in ROOMS)
    assert isinstance(package.AutoAccumulate(), pl.Callback)


def test_the_older_namespace_need_not_be_installed(tmp_path: Path) -> None:
    done = forked(import_all, folder=tmp_path)
    assert done.code == 0, done.output
