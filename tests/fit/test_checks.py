"""What cannot work is refused by name, with the remedy; what works passes."""

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from reference import Regression, Samples, quiet_trainer
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.errors import UserError
from lightning_ga.fit.checks import check_trainer
from lightning_ga.plan.config import read_arguments


def check(trainer: Any, module: Any = None, **arguments: Any) -> None:
    request, _ = read_arguments({**AutoAccumulate()._given, **arguments})
    check_trainer(trainer, Regression() if module is None else module, request)


class Mine(AutoAccumulate):
    """Would cut what the first has cut."""


class Fetching(Regression):
    def training_step(self, dataloader_iter: Any) -> Any:
        """Fetch batches by itself."""


@pytest.mark.parametrize(
    ("callbacks", "module", "settings", "arguments", "message"),
    [
        ([BatchSizeFinder()], None, {}, {}, r"remove BatchSizeFinder \(Tuner.scale_batch_size adds one\)\.$"),
        ([GradientAccumulationScheduler({0: 1})], None, {}, {}, r"remove GradientAccumulationScheduler\.$"),
        ([Mine()], None, {}, {}, r"AutoAccumulate more than once \(AutoAccumulate, Mine\): leave one of them"),
        ([], Fetching(), {}, {}, "accepts a dataloader_iter"),
        (
            *([], None, {"accumulate_grad_batches": 2}, {"accumulate": 3}),
            r"accumulate=3 and Trainer\(accumulate_grad_batches=2\) both set the factor",
        ),
        ([], None, {"accumulate_grad_batches": 4}, {}, ""),
        ([], None, {"accumulate_grad_batches": 4}, {"effective_batch_size": 32}, ""),
        ([], None, {}, {"accumulate": 4}, ""),
    ],
)
def test_what_sets_the_same_things_is_refused(
    callbacks: list[Any], module: Any, settings: Any, arguments: Any, message: str
) -> None:
    trainer = quiet_trainer(AutoAccumulate(), *callbacks, **settings)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check(trainer, module, **arguments)


@pytest.mark.parametrize("accumulates", [True, False])
def test_strategies_that_accumulate_on_their_own_are_refused(accumulates: bool) -> None:
    class Accumulating(pl.strategies.SingleDeviceStrategy):
        handles_gradient_accumulation = accumulates

    trainer = quiet_trainer(strategy=Accumulating(device="cpu"))
    refused = pytest.raises(UserError, match="Accumulating accumulates gradients on its own.*ddp")
    with refused if accumulates else nullcontext():
        check(trainer)


class SetsFactor(Regression):
    """Raises the factor by hand, as the second epoch begins or after two steps."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def on_train_epoch_start(self) -> None:
        if self.hook == "epoch" and self.current_epoch == 1:
            self.trainer.accumulate_grad_batches = 4

    def on_train_batch_end(self, *_: Any) -> None:
        if self.hook == "batch" and self.global_step == 2:
            self.trainer.accumulate_grad_batches = 4


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("hook", ["epoch", "batch"])
def test_a_factor_that_a_hook_sets_is_refused(hook: str, mode: Any) -> None:
    """Windows are planned with ours: another would be ignored, or count micro-batches."""
    trainer = quiet_trainer(AutoAccumulate(micro_batch_size=4, micro_batching=mode, verify=False))
    with pytest.raises(UserError, match="accumulate_grad_batches was set to 4 during training, where"):
        trainer.fit(SetsFactor(hook), DataLoader(Samples(32), 8))
