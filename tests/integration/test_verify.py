"""The exactness check on real models: what it measures, names and says, and that it leaves no trace."""

from pathlib import Path
from typing import Any

import pytest
import torch
from everything import difference, run
from reference import FEATURES, Regression, Samples, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning


class Model(Regression):
    """A network and a loss of one's own."""

    def __init__(self, net: torch.nn.Module, loss: Any) -> None:
        super().__init__()
        self.net, self.loss = net.double(), loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self.net(batch[0]), batch[1])


def normalized() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )


def plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))


def verify(net: torch.nn.Module, loss: Any, **arguments: Any) -> AutoAccumulate:
    """The callback after a fit."""
    callback = AutoAccumulate(micro_batch_size=4, **arguments)
    fit(DataLoader(Samples(24), batch_size=12), callback, module=Model(net, loss), max_epochs=1)
    return callback


def test_independent_samples_are_found_exact() -> None:
    exactness = verify(plain(), torch.nn.functional.mse_loss).exactness
    assert exactness.cause == "exact"
    assert exactness.micro_steps in (17, 19)  # where the loader cuts, two more places of the epoch are tried
    assert exactness.relative_error <= 1e-12


def test_batch_norm_may_be_known_about() -> None:
    assert verify(normalized(), torch.nn.functional.mse_loss, batch_norm="ignore").exactness.cause == "batch_norm"


def test_verification_can_be_turned_off() -> None:
    assert verify(normalized(), torch.nn.functional.mse_loss, verify=False).exactness is None


def test_a_micro_batch_of_one_is_measured_on_more() -> None:
    callback = AutoAccumulate(micro_batch_size=1)
    fit(DataLoader(Samples(8), batch_size=2), callback, max_epochs=1)
    assert callback.exactness.cause == "exact"


def test_what_fails_in_the_check_does_not_fail_the_run() -> None:
    """A loss that refuses the check's small batch is said, and training goes on."""

    def particular(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(target) not in (3, 6):
            raise ValueError("only threes")
        return torch.nn.functional.mse_loss(prediction, target)

    callback = AutoAccumulate(micro_batch_size=3)
    with pytest.warns(ExactnessWarning, match="is not known: not measured: in the check, a step on part"):
        fit(DataLoader(Samples(24), batch_size=6), callback, module=Model(plain(), particular), max_epochs=1)
    assert (
        str(callback.exactness)
        == "not measured: in the check, a step on part of 5 samples ended in ValueError: only threes"
    )


def test_an_epoch_of_one_window_is_measured_without_a_step() -> None:
    callback = AutoAccumulate(64, micro_batch_size=8)
    module = Model(plain(), torch.nn.functional.mse_loss)
    fit(DataLoader(Samples(64), batch_size=64), callback, module=module, gradient_clip_val=0.01, max_epochs=1)
    assert callback.exactness.relative_error <= 1e-12


@pytest.mark.filterwarnings("ignore::lightning_ga.ExactnessWarning")
def test_the_check_leaves_no_trace(tmp_path: Path) -> None:
    with_check = run(tmp_path / "with", AutoAccumulate(micro_batch_size=5))
    without = run(tmp_path / "without", AutoAccumulate(micro_batch_size=5, verify=False))
    assert difference(with_check, without) is None
