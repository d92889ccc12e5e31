"""Every optimizer of PyTorch, and some of timm, do what they do in stock Lightning, whole and cut."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference import Regression, Samples, quiet_trainer
from timm import optim as of_timm
from torch import optim
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

Make = Callable[[list[torch.nn.Parameter]], optim.Optimizer]
BY_RATE = "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD"
MAKERS: dict[str, Make] = {name: partial(getattr(optim, name), lr=0.01) for name in BY_RATE.split()} | {
    "LBFGS": partial(optim.LBFGS, lr=0.1, max_iter=3),
    "Muon": lambda weights: optim.Muon([weight for weight in weights if weight.dim() == 2], lr=0.01),
    "SparseAdam": partial(optim.SparseAdam, lr=0.01),
}


OF_TIMM = ("adahessian", "lookahead_adamw", "adopt", "laprop", "madgrad")
"""Second derivatives, an optimizer around another, and updates that begin late or twice."""


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


@pytest.mark.filterwarnings("ignore:(Using backward.. with create_graph=True|It is highly recommended):UserWarning")
@pytest.mark.parametrize("name", OF_TIMM)
def test_optimizers_of_timm_step_as_without_the_callback(name: str) -> None:
    as_in_stock(partial(of_timm.create_optimizer_v2, opt=name, lr=0.01), second_order=name == "adahessian")
