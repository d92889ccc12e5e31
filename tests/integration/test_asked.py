"""What is asked for and cannot be, or is more than there is: told before training, in a sentence that is true."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ga import AutoAccumulate, ExactnessWarning, UserError, optimizer_steps

SAMPLES = 64


class Linear(pl.LightningModule):
    """Notes how many steps are to come, and how many batches it has trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self.trained = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.trained += 1

    def configure_optimizers(self) -> Any:
        self.steps = optimizer_steps(self.trainer)
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.randn(32, 1, 8))


def fit(module: pl.LightningModule, *callbacks: pl.Callback, data: Any = None, **settings: Any) -> None:
    data = TensorDataset(torch.randn(SAMPLES, 8)) if data is None else data
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    made = pl.Trainer(
        accelerator="cpu", callbacks=[*callbacks], enable_model_summary=False, **{"max_epochs": 2, **quiet, **settings}
    )
    made.fit(module, DataLoader(data, batch_size=16))


@pytest.mark.parametrize(("asked", "micro_batch"), [(256, "auto"), (65, 20), ({0: 16, 1: 1000}, 20)])
def test_an_effective_batch_above_the_data_is_told(asked: Any, micro_batch: Any) -> None:
    callback, module = AutoAccumulate(asked, micro_batch_size=micro_batch), Linear()
    with pytest.warns(ExactnessWarning, match=r"effective batch of [\d,]+ samples is above the 64 of an epoch"):
        fit(module, callback)
    assert callback.plan is not None
    assert callback.plan.effective_batch_size == sum(callback.plan.chunks[0]) == SAMPLES
    assert module.steps == (2 if not isinstance(asked, dict) else 5)


@pytest.mark.parametrize("asked", [10**30, {0: 32, 1: 10**9}])
def test_a_batch_that_nobody_means_is_refused_before_training(asked: Any) -> None:
    module = Linear()
    with pytest.raises(UserError, match="would take .* for one optimizer step, and at most 10,000,000 are planned"):
        fit(module, AutoAccumulate(asked))
    assert module.trained == 0


def test_a_budget_above_the_device_is_told() -> None:
    with pytest.warns(ExactnessWarning, match=r"memory_budget='900TiB' is above the .+ of the device"):
        fit(Linear(), AutoAccumulate(memory_budget="900TiB"))


def test_a_budget_may_be_of_numpy() -> None:
    for budget in (np.float32(0.25), np.int64(10**8)):
        callback = AutoAccumulate(memory_budget=budget)
        fit(Linear(), callback)
        assert callback.probe is not None


class TurnsManual(Linear):
    """Turns to manual optimization when training starts."""

    def on_train_start(self) -> None:
        self.automatic_optimization = False


class Two(Linear):
    """Has two optimizers."""

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers()] * 2


def test_manual_optimization_is_refused_whenever_it_is_set() -> None:
    module = TurnsManual()
    with pytest.raises(UserError, match="TurnsManual sets automatic_optimization=False.*leave AutoAccumulate out"):
        fit(module, AutoAccumulate(32, micro_batch_size=16))
    assert module.trained == 0


def test_several_optimizers_are_not_sent_in_a_circle() -> None:
    with pytest.raises(RuntimeError, match="multiple optimizers") as caught:
        fit(Two(), AutoAccumulate())
    (note,) = caught.value.__notes__
    assert "leave AutoAccumulate out of the callbacks and cut each batch in training_step" in note


@pytest.mark.parametrize("callbacks", [(), (AutoAccumulate(16),)])
def test_steps_of_data_without_a_length_are_not_counted(callbacks: Any) -> None:
    module = Linear()
    fit(module, *callbacks, data=Endless(), max_epochs=1)
    assert module.steps == float("inf")


@pytest.mark.parametrize("trainer", [None, pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")])
def test_steps_are_those_of_a_fit(trainer: Any) -> None:
    with pytest.raises(UserError, match=r"call it in configure_optimizers"):
        optimizer_steps(trainer)
