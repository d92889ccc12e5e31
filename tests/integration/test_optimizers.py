"""Every optimizer of PyTorch and timm, and every scheduler, does what it does in stock Lightning, whole and cut."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from reference import Regression, Samples, quiet_trainer
from timm import optim as of_timm
from torch import optim
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

Make = Callable[[list[torch.nn.Parameter]], optim.Optimizer]
BY_RATE = "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD"
MAKERS: dict[str, Make] = {name: partial(getattr(optim, name), lr=0.01) for name in BY_RATE.split()} | {
    "LBFGS": partial(optim.LBFGS, lr=0.1, max_iter=3),
    "Muon": lambda weights: optim.Muon([weight for weight in weights if weight.dim() == 2], lr=0.01),
    "SparseAdam": partial(optim.SparseAdam, lr=0.01),
}


def names_of_timm() -> Iterator[str]:
    """One name for each of its classes: not those of CUDA's libraries, of which none is there to be made."""
    seen = set()
    for name in of_timm.list_optimizers(exclude_filters=["fused*", "bnb*"]):
        kind = of_timm.get_optimizer_class(name, bind_defaults=False)
        if kind not in seen and kind.__module__.startswith("timm."):
            yield name
        seen.add(kind)


class Stepped(Regression):
    """The optimizer may need sparse gradients, or second derivatives."""

    def __init__(self, make: Make, *, sparse: bool = False, second_order: bool = False) -> None:
        super().__init__()
        self.make, self.sparse, self.second_order = make, sparse, second_order
        if sparse:
            self.net = torch.nn.EmbeddingBag(16, 1, sparse=True, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.sparse:
            return (self.net(batch[2][:, None]) - batch[1]).square().mean()
        return super().training_step(batch, batch_idx)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward(create_graph=self.second_order)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def configure_optimizers(self) -> optim.Optimizer:
        return self.make([*self.net.parameters()])


def weights(make: Make, callback: AutoAccumulate | None = None, **kind: bool) -> torch.Tensor:
    """The weights after eight batches."""
    torch.manual_seed(0)
    module = Stepped(make, **kind)
    trainer = quiet_trainer(*([callback] if callback else []), max_epochs=2)
    trainer.fit(module, DataLoader(Samples(16), 4))
    assert trainer.global_step
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def as_in_stock(make: Make, *, is_probed: bool = True, **kind: bool) -> None:
    whole = AutoAccumulate(memory_budget="1GiB", cache=False) if is_probed else AutoAccumulate(micro_batch_size=4)
    stock = weights(make, **kind)
    assert torch.equal(stock, weights(make, whole, **kind))
    cut = weights(make, AutoAccumulate(micro_batch_size=2, verify=False), **kind)
    torch.testing.assert_close(cut, stock, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_optimizers_of_torch_step_as_without_the_callback(name: str) -> None:
    """LBFGS is refused by the probe, as its history grows over many steps."""
    as_in_stock(MAKERS[name], is_probed=name != "LBFGS", sparse=name == "SparseAdam")


def test_all_of_torch_are_among_them() -> None:
    kinds = {name for name in optim.__all__ if isinstance(getattr(optim, name), type)}
    assert {name for name in kinds if issubclass(getattr(optim, name), optim.Optimizer)} - {"Optimizer"} == set(MAKERS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(Using backward.. with create_graph=True|It is highly recommended):UserWarning")
@pytest.mark.parametrize("name", [*names_of_timm()])
def test_optimizers_of_timm_step_as_without_the_callback(name: str) -> None:
    """Kron compiles what it computes, which PyTorch refuses while the probe's tracing looks on."""
    make = partial(of_timm.create_optimizer_v2, opt=name, lr=0.01)
    as_in_stock(make, is_probed=name != "kron", second_order=of_timm.get_optimizer_info(name).second_order)


# --- schedulers ---------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
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
    def __init__(self, make: Any, interval: str) -> None:
        super().__init__()
        self.make, self.interval, self.rates = make, interval, list[float]()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": self.make(optimizer), "interval": self.interval}]


def rates(make: Any, interval: str, *callbacks: AutoAccumulate, accumulate: int = 1) -> list[float]:
    """The learning rate of each step."""
    module = Scheduled(make, interval)
    quiet_trainer(*callbacks, max_epochs=4, accumulate_grad_batches=accumulate).fit(module, DataLoader(Samples(16), 4))
    return module.rates


@pytest.mark.filterwarnings("ignore:.*(scheduler is using|ends after).*")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_as_without_the_callback(name: str) -> None:
    """By epoch in batches that are cut; by step after a probe, and in windows of two batches."""
    stock = rates(SCHEDULERS[name], "epoch")
    assert len(set(stock)) > 1
    assert rates(SCHEDULERS[name], "epoch", AutoAccumulate(micro_batch_size=2, verify=False)) == stock
    probed = AutoAccumulate(memory_budget="1GiB", cache=False)
    assert rates(SCHEDULERS[name], "step", probed, accumulate=2) == rates(SCHEDULERS[name], "step", accumulate=2)


def test_all_schedulers_are_among_them() -> None:
    """But for one that takes a metric, and what is no scheduler by itself."""
    known = {name for name in schedulers.__all__ if isinstance(getattr(schedulers, name), type)}
    assert known - {"LRScheduler", "ReduceLROnPlateau"} == set(SCHEDULERS)
