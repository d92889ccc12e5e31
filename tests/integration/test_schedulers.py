"""Every scheduler of PyTorch goes on as without the callback: the check and the probe leave nothing in it."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import Regression, Samples, quiet_trainer
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

Make = Callable[[torch.optim.Optimizer], Any]
MAKERS: dict[str, Make] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2, 0.5),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 2, 3], 0.5),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, 0.5, 2),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, 0.5, 1.0, 3),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.5),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, 4),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 4),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 2),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, 2),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, 20),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.5**step),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda step: 0.5),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer, 0.5, 1.0, 2), schedulers.MultiStepLR(optimizer, [1, 2], 0.5)], [2]
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.MultiStepLR(optimizer, [2], 0.5), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
}


class Scheduled(Regression):
    def __init__(self, make: Make, interval: str) -> None:
        super().__init__()
        self.make, self.interval, self.rates = make, interval, list[float]()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": self.make(optimizer), "interval": self.interval}]


def rates(make: Make, interval: str, *callbacks: pl.Callback, accumulate: int = 1) -> list[float]:
    """The learning rate of each step."""
    module = Scheduled(make, interval)
    quiet_trainer(*callbacks, max_epochs=4, accumulate_grad_batches=accumulate).fit(module, DataLoader(Samples(16), 4))
    return module.rates


@pytest.mark.filterwarnings("ignore:.*(scheduler is using|ends after).*")
@pytest.mark.parametrize("name", MAKERS)
def test_schedulers_go_on_as_without_the_callback(name: str) -> None:
    """By epoch in batches that are cut; by step after a probe, and in windows of two batches."""
    stock = rates(MAKERS[name], "epoch")
    assert len(set(stock)) > 1
    assert rates(MAKERS[name], "epoch", AutoAccumulate(micro_batch_size=2)) == stock
    probed = AutoAccumulate(memory_budget="1GiB", cache=False)
    assert rates(MAKERS[name], "step", probed, accumulate=2) == rates(MAKERS[name], "step", accumulate=2)


def test_all_schedulers_are_among_them() -> None:
    """But for one that takes a metric, and what is no scheduler by itself."""
    known = {name for name in schedulers.__all__ if isinstance(getattr(schedulers, name), type)}
    assert known - {"LRScheduler", "ReduceLROnPlateau"} == set(MAKERS)
