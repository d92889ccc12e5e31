"""What is asked for and cannot be, or is more than there is: told before training, in a sentence that is true."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from reference import Regression, Samples, StreamOf, Validated, cut, fit, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning, UserError, optimizer_steps

SAMPLES = 64


class Counting(Regression):
    """Asks how many steps are to come."""

    def configure_optimizers(self) -> Any:
        self.steps = optimizer_steps(self.trainer)
        return super().configure_optimizers()


def loader(samples: int = SAMPLES, batch_size: int = 16) -> "DataLoader[Any]":
    return DataLoader(Samples(samples), batch_size)


@pytest.mark.parametrize(("asked", "micro_batch"), [(256, "auto"), (65, 20), ({0: 16, 1: 1000}, 20)])
def test_an_effective_batch_above_the_data_is_told(asked: Any, micro_batch: Any) -> None:
    callback = AutoAccumulate(asked, micro_batch_size=micro_batch)
    with pytest.warns(ExactnessWarning, match=r"effective batch of [\d,]+ samples is above the 64 of an epoch"):
        module, _ = fit(loader(), callback, module=Counting())
    assert callback.plan.effective_batch_size == sum(callback.plan.chunks[0]) == SAMPLES
    assert module.steps == (2 if not isinstance(asked, dict) else 5)


@pytest.mark.parametrize("asked", [10**30, {0: 32, 1: 10**9}])
def test_a_batch_that_nobody_means_is_refused_before_training(asked: Any) -> None:
    module = Regression()
    with pytest.raises(UserError, match="would take .* for one optimizer step, and at most 10,000,000 are planned"):
        fit(loader(), AutoAccumulate(asked), module=module)
    assert not module.gradients


def test_a_budget_above_the_device_is_told() -> None:
    """One of NumPy is taken."""
    with pytest.warns(ExactnessWarning, match=r"memory_budget='900TiB' is above the .+ of the device"):
        fit(loader(), AutoAccumulate(memory_budget="900TiB"))
    callback = AutoAccumulate(memory_budget=np.int64(10**8))
    fit(loader(), callback)
    assert callback.probe is not None


class TurnsManual(Regression):
    """Turns to manual optimization when training starts."""

    def on_train_start(self) -> None:
        self.automatic_optimization = False


class Two(Regression):
    """Has two optimizers."""

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers()] * 2


def test_manual_optimization_is_refused_whenever_it_is_set() -> None:
    module = TurnsManual()
    with pytest.raises(UserError, match="TurnsManual sets automatic_optimization=False.*leave AutoAccumulate out"):
        fit(loader(), AutoAccumulate(32, micro_batch_size=16), module=module)
    assert not module.gradients


def test_several_optimizers_are_not_sent_in_a_circle() -> None:
    with pytest.raises(RuntimeError, match="multiple optimizers") as caught:
        fit(loader(), AutoAccumulate(), module=Two())
    (note,) = caught.value.__notes__
    assert "leave AutoAccumulate out of the callbacks and cut each batch in training_step" in note


@pytest.mark.parametrize("trainer", [None, pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")])
def test_steps_are_those_of_a_fit(trainer: Any) -> None:
    with pytest.raises(UserError, match=r"call it in configure_optimizers"):
        optimizer_steps(trainer)


class Sets(pl.Callback):
    """Sets the factor in one hook."""

    def __init__(self, hook: str) -> None:
        vars(self)[hook] = lambda trainer, *_: setattr(trainer, "accumulate_grad_batches", 2)


@pytest.mark.parametrize("micro_batching", ["loader", "step"])
@pytest.mark.parametrize("micro_batch_size", [3, 16])
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end"])
def test_a_callback_that_sets_the_factor_in_mid_training_is_refused(
    hook: str, micro_batch_size: int, micro_batching: Any
) -> None:
    """Also where nothing is cut: windows are weighted for the factor that was planned."""
    callback = AutoAccumulate(micro_batch_size=micro_batch_size, micro_batching=micro_batching)
    with pytest.raises(UserError, match=r"trainer\.accumulate_grad_batches=2 during training.*effective_batch_size="):
        fit(loader(), callback, Sets(hook))


def test_a_factor_of_the_trainers_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="accumulate_grad_batches=0 must be at least 1"):
        fit(loader(), AutoAccumulate(micro_batch_size=2), accumulate_grad_batches=0)


@pytest.mark.filterwarnings("ignore:The effective batch of 64 samples is above the 30")
def test_an_interval_above_the_epoch_is_refused_in_batches_of_the_recipe() -> None:
    fit(loader(30, 4), AutoAccumulate(64), module=Validated(), val_check_interval=8, max_epochs=1)
    with pytest.raises(UserError, match=r"val_check_interval=9 is more than the 8"):
        fit(loader(30, 4), AutoAccumulate(micro_batch_size=1), module=Validated(), val_check_interval=9)


@pytest.mark.parametrize(("limit", "samples"), [(3, 12), (100, 30)])
def test_limit_train_batches_cuts_a_stream(limit: int, samples: int) -> None:
    """Also where the stream would end before the limit."""
    data, settings = DataLoader(StreamOf(Samples(30)), batch_size=4), {"accumulate_grad_batches": 2, "max_epochs": 1}
    module, _ = fit(data, AutoAccumulate(micro_batch_size=3), limit_train_batches=limit, **settings)
    assert worst_error(module.gradients, plain_loop(Samples(30), cut(range(samples), 8))) <= 1e-12
