"""LBFGS evaluates its closure many times a step: each time on the whole batch, which is cut in the step."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ddp, on_ranks
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader, default_collate

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.counters import Samples as CountSamples

DATA = Samples(21)


class Newton(Regression):
    """The reference task under LBFGS."""

    def __init__(self, line_search: str | None = None) -> None:
        super().__init__()
        self.line_search = line_search

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=4, line_search_fn=self.line_search)


BATCHES = [[*range(0, 9)], [9], [*range(10, 16)], [16, 17]]
ROWS: dict[str, tuple[Any, str | None, dict[str, Any]]] = {
    "collated": (lambda: DataLoader(DATA, 8), "strong_wolfe", {"normalize": CountSamples()}),
    "own batches, the first in full": (lambda: DataLoader(DATA, batch_sampler=BATCHES), None, {}),
    "one ready-made batch": (
        *(lambda: DataLoader([default_collate([*map(DATA.__getitem__, range(21))])], batch_size=None), "strong_wolfe"),
        {"micro_batch_size": "auto", "max_micro_batch_size": 4, "cache": False},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_weights_are_those_of_the_whole_batch(name: str) -> None:
    """With and without a line search, which needs the loss of the whole batch; smaller batches too."""
    make, line_search, settings = ROWS[name]
    callback = AutoAccumulate(**{"micro_batch_size": 3, **settings})
    module, trainer = fit(make(), callback, module=Newton(line_search))
    stock, _ = fit(make(), module=Newton(line_search))
    for ours, theirs in zip(module.net.parameters(), stock.net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert trainer.global_step == 2 * len(make())
    assert callback.plan.factor > 1
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


class Planned(Newton):
    """Asks for the number of steps before its optimizer is there, which reads the data."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches == 6
        return super().configure_optimizers()


@pytest.mark.parametrize("seed", [None, 3])
def test_data_that_are_asked_for_before_the_optimizer_are_cut_in_the_step_too(seed: int | None) -> None:
    """In the order of the stock Trainer, whose generator has moved as often."""
    trained = []
    for callbacks in ([], [AutoAccumulate(micro_batch_size=3)]):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        module, _ = fit(DataLoader(DATA, 8, shuffle=True, generator=generator), *callbacks, module=Planned())
        trained.append(module)
    stock, ours = trained
    for one, other in zip(ours.net.parameters(), stock.net.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def newton_on_ranks() -> list[torch.Tensor]:
    """Every rank has its own samples, in batches that are cut."""
    shares = torch.utils.data.Subset(DATA, range(int(os.environ["RANK"]), 20, 2))
    settings = {"use_distributed_sampler": False, **ddp()}
    module, _ = fit(DataLoader(shares, 5), AutoAccumulate(micro_batch_size=3), module=Newton(), **settings)
    return [*module.net.state_dict().values()]


@pytest.mark.distributed
def test_each_evaluation_is_of_the_batches_of_all_ranks(tmp_path: Path) -> None:
    stock, _ = fit(DataLoader(torch.utils.data.Subset(DATA, range(20)), 10), module=Newton())
    for ours in on_ranks(newton_on_ranks, tmp_path):
        torch.testing.assert_close(ours, [*stock.net.state_dict().values()], rtol=1e-9, atol=1e-9)


@pytest.mark.loader_only(reason="in the step each evaluation is of the whole batch")
def test_an_optimizer_that_evaluates_again_by_surprise_is_refused() -> None:
    """Its second evaluation would be of the window's last micro-batch alone."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                closure()
                value = closure()
            super().step()
            return value

    class Surprising(Regression):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Twice(self.net.parameters(), lr=0.1)

    with pytest.raises(UserError, match="Twice evaluated its closure again"):
        fit(DataLoader(DATA, batch_size=8), AutoAccumulate(micro_batch_size=3), module=Surprising())
