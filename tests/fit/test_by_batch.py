"""What acts batch by batch is told of where the loader cuts: there it meets micro-batches."""

import copy
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from lightning.pytorch.utilities import rank_zero_only
from reference import Regression, Samples, fit
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning

MODES = ("loader", "step")


def told(mode: str, *callbacks: Any, module: Any = None, batch: int = 8, **settings: Any) -> list[str]:
    """The warnings of two epochs of four windows; each is one micro-batch of eight, or two of four."""
    callback = AutoAccumulate(micro_batch_size=4, micro_batching=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        loader = DataLoader(Samples(32), batch_size=batch)
        fit(loader, callback, *callbacks, module=module or Regression(), max_epochs=2, **settings)
    texts = [str(each.message) for each in caught if each.category in (UserWarning, ExactnessWarning)]
    return [text for text in texts if "micro-batch" in text]


class Average(pl.Callback):
    """An average of the weights, in a dictionary, as many scripts keep it."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.kept = {name: value.detach().clone() for name, value in module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, value in module.state_dict().items():
            self.kept[name].lerp_(value, 0.1)


class AverageOfModule(Average):
    """The same, as a copy of the module."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.copy = copy.deepcopy(module.net)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for old, new in zip(self.copy.parameters(), module.net.parameters(), strict=True):
                old.lerp_(new, 0.1)


class Every(pl.Callback):
    """Acts in every second batch: the last micro-batch of a window, if there are two."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self.act(trainer, module)


class EveryStep(Every):
    """Acts after each optimizer step, as it should."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.act(trainer, module)


def decay(_: Any, module: Any) -> None:
    with torch.no_grad():
        module.net[0].weight.mul_(0.9)


def freeze(trainer: Any, module: Any) -> None:
    if trainer.current_epoch and trainer.is_last_batch:
        module.net[0].bias.requires_grad_(False)


def slow_down(trainer: Any, _: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


def stop(trainer: Any, _: Any) -> None:
    trainer.should_stop = True


class OnOneRank(Every):
    """The same, by a hook that is wrapped."""

    on_train_batch_end = rank_zero_only(Every.on_train_batch_end)


def decay_seldom(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    if batch_idx % 2:
        decay(trainer, module)


ACTING: dict[str, tuple[Any, str]] = {
    "averages": (Average, "its copy of the weights"),
    "averages a copy": (AverageOfModule, "its copy of the weights"),
    "decays": (lambda: Every(decay), "changes weights"),
    "decays on one rank": (lambda: OnOneRank(decay), "changes weights"),
    "decays by a function": (lambda: LambdaCallback(on_train_batch_end=decay_seldom), "changes weights"),
    "decays by a partial": (lambda: LambdaCallback(on_train_batch_end=partial(decay_seldom)), "changes weights"),
    "freezes": (lambda: Every(freeze), "which weights are trained"),
    "slows down": (lambda: Every(slow_down), "learning rates"),
    "stops": (lambda: Every(stop), "trainer.should_stop"),
}


class Shadow:
    """An average of weights as libraries keep it: an object with a list of tensors."""

    def __init__(self, module: Any) -> None:
        self.shadow = [weight.detach().clone() for weight in module.parameters()]

    def follow(self, module: Any) -> None:
        for old, new in zip(self.shadow, module.parameters(), strict=True):
            old.lerp_(new.detach(), 0.5)


class Averages(Regression):
    """Keeps an average of its weights that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.average = Shadow(self.net)


class AveragesBatches(Averages):
    def on_train_batch_end(self, *_: Any) -> None:
        self.average.follow(self.net)


class AveragesInTheStep(Averages):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.average.follow(self.net)
        return super().training_step(batch, batch_idx)


class ReplacesItsAverage(Regression):
    """The same, by new tensors in a dictionary that there is none of before training."""

    def on_train_batch_end(self, *_: Any) -> None:
        new = {name: weight.detach() for name, weight in self.net.named_parameters()}
        self.kept = {name: 0.5 * old + 0.5 * new[name] for name, old in getattr(self, "kept", new).items()}


class EndsEpochs(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx >= 3 else None


class Stops(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == 3


ACTING_MODULES: dict[str, tuple[Any, str]] = {
    "averages": (AveragesBatches, "changes average.shadow"),
    "averages by new tensors": (ReplacesItsAverage, "changes kept."),
    "ends epochs": (EndsEpochs, "where the epoch ends"),
    "stops": (Stops, "trainer.should_stop"),
}


@pytest.mark.parametrize("name", ACTING_MODULES)
@pytest.mark.parametrize("mode", MODES)
def test_a_module_that_acts_by_micro_batches_is_told_once(name: str, mode: str) -> None:
    module, words = ACTING_MODULES[name]
    found = told(mode, module=module())
    assert [words in text for text in found] == [True] * (mode == "loader")


@pytest.mark.parametrize("mode", MODES)
def test_an_average_that_the_step_follows_is_told_in_both_modes(mode: str) -> None:
    """It follows each pass, though no gradient shows that."""
    (text,) = told(mode, module=AveragesInTheStep())
    assert "changes average.shadow.0, average.shadow.1" in text


class AveragesSteps(Averages):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.follow(self.net)


class AveragesNewSteps(Averages):
    seen = 0

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step > self.seen:
            self.seen = self.trainer.global_step
            self.average.follow(self.net)


class Copies(Regression):
    """Keeps its weights as they are, in a network that is no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = [copy.deepcopy(self.net)]

    def on_train_batch_end(self, *_: Any) -> None:
        self.copies[0].load_state_dict(self.net.state_dict())


class KeepsGradients(Regression):
    """Of the last pass: they have the shapes of the weights, too."""

    def on_after_backward(self) -> None:
        self.last = [weight.grad.clone() for weight in self.net.parameters()]


class KeepsAnything(Regression):
    """Tensors of the shapes of the weights that are no copies, and some that have no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.keep()

    def keep(self) -> None:
        weights = [weight.detach() for weight in self.net.parameters()]
        self.masks = [weight > 0 for weight in weights]
        self.waves = [weight * 1j for weight in weights]
        self.sparse = [weight.to_sparse() for weight in weights]
        self.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> Any:
        self.keep()
        return batch[0] if batch_idx < 99 else None


class EndsEpochsBySteps(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.global_step % 4 == 3 else None


class FreezesByBatch(Regression):
    """What is trained changes within the check, too."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].weight.requires_grad_(batch_idx % 8 >= 4)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Read no gradients: there may be none."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "module", [AveragesSteps, AveragesNewSteps, Copies, KeepsGradients, KeepsAnything, EndsEpochsBySteps]
)
def test_a_module_that_acts_by_steps_is_not_told(module: Any, mode: str) -> None:
    assert told(mode, module=module()) == []


def test_what_is_trained_may_change_from_batch_to_batch() -> None:
    (text,) = told("loader", module=FreezesByBatch())
    assert "the step depends on the number of its batch" in text
    assert told("step", module=FreezesByBatch()) == []


@pytest.mark.parametrize("name", ACTING)
@pytest.mark.parametrize("mode", MODES)
def test_a_callback_that_acts_by_micro_batches_is_told_once(name: str, mode: str) -> None:
    callback, words = ACTING[name]
    found = told(mode, callback())
    assert [words in text for text in found] == [True] * (mode == "loader")


@pytest.mark.parametrize("name", ACTING)
def test_a_callback_that_acts_by_batches_of_the_recipe_is_not_told(name: str) -> None:
    """Nothing is cut: the recipe accumulates by itself."""
    assert told("loader", ACTING[name][0](), batch=4, accumulate_grad_batches=2) == []


class Keeps(pl.Callback):
    """Sums of losses, and what validation has made in inference mode."""

    def __init__(self) -> None:
        with torch.inference_mode():
            self.outputs = [torch.ones(3)]
        self.total = torch.zeros(())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.total += outputs["loss"]


@pytest.mark.parametrize(
    "callback",
    [Keeps, lambda: EMAWeightAveraging(decay=0.9), lambda: EveryStep(decay), lambda: Every(lambda *_: None)],
    ids=["sums", "Lightning's", "acts by steps", "reads"],
)
def test_what_acts_by_no_micro_batches_is_not_told(callback: Any) -> None:
    assert told("loader", callback()) == []


class Follows(Regression):
    """Lowers its learning rate by a value that it logs."""

    on_epoch = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("followed", loss, on_step=not self.on_epoch, on_epoch=self.on_epoch)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "followed"}}


class FollowsTheEpoch(Follows):
    on_epoch = True


@pytest.mark.parametrize("module", [Follows, FollowsTheEpoch])
@pytest.mark.parametrize("mode", MODES)
def test_a_schedule_that_follows_the_last_micro_batch_is_told_once(module: Any, mode: str) -> None:
    found = told(mode, module=module())
    assert len(found) == (mode == "loader" and module is Follows)
    assert all("ReduceLROnPlateau follows 'followed'" in text for text in found)


class Compares(Regression):
    """A loss with the variance over the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.net(batch[0]).var()


@pytest.mark.parametrize("size", ["auto", 8])
def test_batches_of_the_recipe_that_are_joined_are_told_of(size: Any) -> None:
    """If the loss compares samples: it has more of them in one pass."""
    callback, loader = AutoAccumulate(micro_batch_size=size), DataLoader(Samples(32), batch_size=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExactnessWarning)
        fit(loader, callback, module=Compares(), max_epochs=1, accumulate_grad_batches=2)
    (text,) = [str(each.message) for each in caught if each.category is ExactnessWarning]
    joined = "Up to 16 samples are in one pass here, and 8 in one of the recipe's"
    assert joined in text if size == "auto" else "Accumulation is not exact for this model" in text
