"""How many optimizer steps there will be, and schedules that count them."""

from typing import Any

import pytest
import torch
from reference import Regression, Samples, StreamOf, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning, optimizer_steps


class Scheduled(Regression):
    """Asks for the number of steps where schedules are made, and notes every learning rate."""

    def __init__(self, make: Any = None, frequency: int = 1, fits: int = 8) -> None:
        super().__init__()
        self.make, self.frequency, self.fits = make, frequency, fits  # samples that fit after the first step
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 1 and len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.steps = optimizer_steps(self.trainer)
        self.estimate = self.trainer.estimated_stepping_batches
        if self.make is None:
            return optimizer
        schedule = self.make(optimizer, self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": self.frequency}]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.rates.append(optimizer.param_groups[0]["lr"])


def loader() -> Any:
    return DataLoader(Samples(30), batch_size=4)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({"effective_batch_size": {0: 4, 1: 10, 2: 20}, "micro_batch_size": 3}, {"max_steps": 9}),
        ({"micro_batch_size": 3}, {"accumulate_grad_batches": 3}),
    ],
    ids=str,
)
def test_steps_are_counted_in_advance(arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    module, trainer = fit(loader(), AutoAccumulate(**arguments), module=Scheduled(), max_epochs=3, **settings)
    assert module.steps == trainer.global_step
    if not isinstance(arguments.get("effective_batch_size", arguments.get("accumulate")), dict):
        assert module.estimate == module.steps


def test_a_stream_has_no_count() -> None:
    """The answer is then Lightning's own, with the callback or without it."""
    for callbacks in ([], [AutoAccumulate(micro_batch_size=2)]):
        stream = DataLoader(StreamOf(Samples(30)), batch_size=4)
        module, _ = fit(stream, *callbacks, module=Scheduled(), max_steps=5)
        assert module.steps == 5
    module, trainer = fit(loader(), module=Scheduled(), accumulate_grad_batches=3)
    assert module.steps == trainer.global_step == 6


def cosine(optimizer: Any, steps: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def four_times(optimizer: Any, steps: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4 * steps)


def test_a_horizon_that_is_right_says_nothing() -> None:
    module, trainer = fit(loader(), AutoAccumulate({0: 4, 1: 10}, micro_batch_size=3), module=Scheduled(cosine))
    assert module.steps == trainer.global_step == 11
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0)


def test_a_horizon_that_is_wrong_warns_with_both_numbers() -> None:
    """But where stock Lightning takes as many steps, it is the user's own."""
    with pytest.warns(ExactnessWarning, match="OneCycleLR ends after 32 steps and training takes 8"):
        fit(loader(), AutoAccumulate(8, micro_batch_size=3), module=Scheduled(four_times))
    fit(loader(), AutoAccumulate(micro_batch_size=3), module=Scheduled(four_times))


@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize(("micro_batch", "fits"), [(2, 8), (3, 8), (8, 8), (8, 4)])
@pytest.mark.filterwarnings("ignore:Memory ran out")
def test_frequency_counts_optimizer_steps(frequency: int, micro_batch: int, fits: int) -> None:
    """As without accumulation, whatever the factor is, after an error too; Lightning tests it against micro-batches."""

    def halving(optimizer: Any, _: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    whole = DataLoader(Samples(30), batch_size=8)
    stock, _ = fit(whole, module=Scheduled(halving, frequency))
    scheduled = Scheduled(halving, frequency, fits)
    ours, trainer = fit(whole, AutoAccumulate(micro_batch_size=micro_batch), module=scheduled)
    assert ours.rates == stock.rates
    assert trainer.lr_scheduler_configs[0].frequency == frequency
