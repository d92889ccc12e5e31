"""Effective batch and factor by epoch, also after a resume in the middle of one and in a second fit."""

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from reference import Regression, Samples, StreamOf, Validated, cut, fit, plain_loop, quiet_trainer, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, ExactnessWarning


class Factors(pl.Callback):
    """Notes the factor of every epoch, and the plan's."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, idx: int) -> None:
        pair = (trainer.current_epoch, trainer.accumulate_grad_batches)
        if pair not in self.seen:
            self.seen.append(pair)


@pytest.mark.parametrize(
    "schedule", [{0: 4, 1: 10, 3: 20}, lambda epoch: (4, 10, 10, 20)[epoch]], ids=["mapping", "callable"]
)
def test_the_effective_batch_follows_the_epoch(schedule: object, micro_batching: str) -> None:
    """Every epoch's gradients are those of its own whole batch; the factor counts what the loader yields."""
    dataset = Samples(30)
    factors = Factors()
    module, _ = fit(
        DataLoader(dataset, batch_size=4), AutoAccumulate(schedule, micro_batch_size=5), factors, max_epochs=4
    )
    windows = [window for size in (4, 10, 10, 20) for window in cut(range(30), size)]
    assert worst_error(module.gradients, plain_loop(dataset, windows)) <= 1e-12
    yielded = 5 if micro_batching == "loader" else 4  # micro-batches, or the recipe's batches
    assert factors.seen == [(epoch, -(-size // yielded)) for epoch, size in enumerate((4, 10, 10, 20))]


@pytest.mark.parametrize("schedule", [3, {0: 1, 1: 3}, {1: 3}, lambda epoch: 3 if epoch else 1])
def test_the_factor_follows_the_epoch(schedule: object) -> None:
    """``accumulate`` fixes the factor; before a mapping's first epoch it is one."""
    dataset = Samples(30)
    factors = Factors()
    module, _ = fit(DataLoader(dataset, batch_size=4), AutoAccumulate(accumulate=schedule, micro_batch_size=4), factors)
    first = 3 if schedule == 3 else 1
    assert factors.seen == [(0, first), (1, 3)]
    windows = cut(range(30), 4 * first) + cut(range(30), 12)
    assert worst_error(module.gradients, plain_loop(dataset, windows)) <= 1e-12


def test_a_second_fit_of_the_same_trainer_goes_on_with_the_schedule(micro_batching: str) -> None:
    """The factor that the first fit left in the trainer is not taken for the recipe's."""
    dataset = Samples(24)
    factors = Factors()
    callback = AutoAccumulate({0: 4, 2: 12}, micro_batch_size=2)
    module, trainer = fit(DataLoader(dataset, batch_size=4), callback, factors, max_epochs=2)
    yielded = 2 if micro_batching == "loader" else 4
    assert trainer.accumulate_grad_batches == 4 // yielded
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, DataLoader(dataset, batch_size=4))
    assert factors.seen == [(0, 4 // yielded), (1, 4 // yielded), (2, 12 // yielded)]


def test_the_schedule_holds_after_a_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Lightning's own scheduler trains on at factor 1 there."""
    dataset = Samples(30)
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    same_key = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=0)
    schedule = {0: 10, 1: 15}
    whole, _ = fit(
        DataLoader(dataset, batch_size=5),
        AutoAccumulate(schedule, micro_batch_size=5),
        checkpoint,
        enable_checkpointing=True,
    )
    factors = Factors()
    resumed, _ = fit(
        DataLoader(dataset, batch_size=5),
        AutoAccumulate(schedule, micro_batch_size=5),
        factors,
        same_key,
        enable_checkpointing=True,
        ckpt_path=tmp_path / "step=4.ckpt",
    )
    assert factors.seen == [(1, 3)]
    assert worst_error(resumed.gradients, whole.gradients[4:]) <= 1e-12


@pytest.mark.parametrize("schedule", [None, 8, {0: 8, 2: 4}])
def test_the_callback_can_be_pickled(schedule: object) -> None:
    callback = AutoAccumulate(schedule, micro_batch_size=4)
    fit(DataLoader(Samples(16), batch_size=8), callback, max_epochs=1)
    copied = pickle.loads(pickle.dumps(callback))
    assert copied.plan is None
    fit(DataLoader(Samples(16), batch_size=8), copied, max_epochs=1)
    assert copied.plan == callback.plan


def test_a_failed_fit_leaves_the_trainer_as_it_was() -> None:
    """The factor and the loops are the recipe's again."""

    class Failing(Regression):
        def training_step(self, batch: object, batch_idx: int) -> None:
            raise RuntimeError("on purpose")

    trainer = quiet_trainer(AutoAccumulate(micro_batch_size=1), accumulate_grad_batches=2)
    with pytest.warns(ExactnessWarning, match="on purpose"), pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Failing(), DataLoader(Samples(8), batch_size=4))
    assert trainer.accumulate_grad_batches == 2
    assert "setup_data" not in vars(trainer.fit_loop)
    assert "dataloader" not in vars(trainer.fit_loop._data_source)


class ByEpoch(Validated):
    """Notes the learning rate of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("micro_batch", [4, 3])
@pytest.mark.parametrize("factor", [1, 2])
def test_a_stream_shorter_than_the_limit_ends_its_epoch_as_any(
    factor: int, micro_batch: int, micro_batching: str
) -> None:
    """As stock Lightning where the limit is what the stream has; beyond, that leaves out what ends an epoch."""

    def end(limit: int, *callbacks: pl.Callback) -> tuple[list[int], list[float]]:
        stream, settings = DataLoader(StreamOf(Samples(20)), batch_size=4), {"accumulate_grad_batches": factor}
        module, _ = fit(stream, *callbacks, module=ByEpoch(), limit_train_batches=limit, **settings)
        return module.steps_at_validation, module.rates

    assert end(8, AutoAccumulate(micro_batch_size=micro_batch)) == end(5)
    assert end(8) != end(5)
