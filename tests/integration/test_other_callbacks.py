"""Callbacks of Lightning's own beside ours keep their meaning, or are refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from reference import Regression, Samples, Validated, cut, fit, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError


def loader() -> "DataLoader[object]":
    return DataLoader(Samples(64), batch_size=8)


def test_the_learning_rate_finder_runs_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes all callbacks out while it runs; training afterwards is cut as asked for."""
    monkeypatch.chdir(tmp_path)

    class Tuned(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.shapes: list[int] = []

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            self.shapes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    finder = LearningRateFinder(num_training_steps=30, early_stop_threshold=None)
    callback = AutoAccumulate(16, micro_batch_size=4)
    module, trainer = fit(loader(), finder, callback, module=Tuned(), enable_checkpointing=True, max_epochs=4)
    assert finder.optimal_lr.suggestion() == module.lr != 0.1
    assert module.shapes[:30] == [8] * 30
    assert module.shapes[30:] == [4] * 64
    assert trainer.global_step == 16


def test_data_that_another_run_of_the_loop_left_are_set_up_anew() -> None:
    """As the learning rate finder of Lightning 2.5 leaves them."""

    class Leaves(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            trainer.fit_loop._combined_loader = object()

    callback = AutoAccumulate(16, micro_batch_size=4)
    _, trainer = fit(loader(), Leaves(), callback, max_epochs=1)
    assert callback.plan.factor == 4
    assert trainer.global_step == 4


def test_weight_averaging_takes_as_many_steps() -> None:
    """``StochasticWeightAveraging`` sets the factor itself in its last pass."""
    averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2)
    module, trainer = fit(loader(), averaging, AutoAccumulate(16, micro_batch_size=5), max_epochs=4)
    assert trainer.global_step == len(module.gradients) == 16


def test_checkpoints_and_early_stopping_count_optimizer_steps(tmp_path: Path) -> None:
    """``every_n_train_steps`` means steps of the optimizer."""

    class Logged(Validated):
        def validation_step(self, batch: object, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("constant", 1.0)

    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    stopping = EarlyStopping("constant", patience=2)
    _, trainer = fit(
        loader(),
        checkpoint,
        stopping,
        AutoAccumulate(16, micro_batch_size=5),
        module=Logged(),
        max_epochs=9,
        enable_checkpointing=True,
    )
    assert trainer.global_step == 12  # three epochs of four steps
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step={step}.ckpt" for step in (12, 3, 6, 9)]


@pytest.mark.parametrize(("kind", "value"), [("norm", 0.01), ("value", 0.01)])
def test_gradients_are_clipped_as_those_of_the_whole_batch(kind: str, value: float) -> None:
    """Once a window, after it is complete."""
    settings = {"gradient_clip_val": value, "gradient_clip_algorithm": kind, "max_epochs": 2}
    whole = DataLoader(Samples(50), batch_size=16)
    stock, _ = fit(whole, **settings)
    ours, _ = fit(whole, AutoAccumulate(micro_batch_size=5), **settings)
    for a, b in zip(ours.parameters(), stock.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_callback_that_reads_gradients_sees_those_of_the_window() -> None:
    """Wherever it stands in the list: ours runs first."""

    class Reader(pl.Callback):
        def __init__(self) -> None:
            self.gradients: list[torch.Tensor] = []

        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Regression, *_: object) -> None:
            self.gradients.append(torch.cat([p.grad.flatten().clone() for p in module.parameters()]))

    reader = Reader()
    fit(DataLoader(Samples(21), batch_size=8), reader, AutoAccumulate(micro_batch_size=3), max_epochs=1)
    assert worst_error(reader.gradients, plain_loop(Samples(21), cut(range(21), 8))) <= 1e-12


@pytest.mark.parametrize("rival", [GradientAccumulationScheduler({0: 2}), BatchSizeFinder()])
def test_a_callback_that_sets_the_same_is_refused(rival: pl.Callback) -> None:
    """Before anything runs, by name."""

    class WithLoader(Regression):
        batch_size = 8

        def train_dataloader(self) -> "DataLoader[object]":
            return loader()

    with pytest.raises(UserError, match=f"AutoAccumulate and {type(rival).__name__}, which set the same things"):
        fit(None, AutoAccumulate(), rival, module=WithLoader())


@pytest.mark.parametrize("micro_batching", ["loader", "step"])
@pytest.mark.parametrize("micro_batch_size", [3, 8])
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end"])
def test_a_callback_that_sets_the_factor_in_mid_training_is_refused(
    hook: str, micro_batch_size: int, micro_batching: str
) -> None:
    """Also where nothing is cut: windows are weighted for the factor that was planned."""

    class Sets(pl.Callback):
        pass

    def set_factor(self: Sets, trainer: pl.Trainer, *_: object) -> None:
        trainer.accumulate_grad_batches = 2

    setattr(Sets, hook, set_factor)
    callback = AutoAccumulate(micro_batch_size=micro_batch_size, micro_batching=micro_batching)
    with pytest.raises(UserError, match=r"trainer\.accumulate_grad_batches=2 during training.*effective_batch_size="):
        fit(loader(), callback, Sets(), max_epochs=2)


def test_a_factor_of_the_trainers_below_one_is_refused() -> None:
    """Lightning takes it and divides by it."""
    with pytest.raises(UserError, match="accumulate_grad_batches=0 must be at least 1"):
        fit(loader(), AutoAccumulate(micro_batch_size=2), accumulate_grad_batches=0)


def test_manual_optimization_is_refused_with_the_way_out() -> None:
    """``plan_accumulation`` cuts windows by hand."""

    class Manual(Regression):
        automatic_optimization = False

    with pytest.raises(UserError, match="automatic_optimization=False.*plan_accumulation"):
        fit(loader(), AutoAccumulate(), module=Manual())


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_step_that_fetches_its_own_batches_is_refused() -> None:
    """It would hide the micro-batches."""

    class Fetching(Regression):
        def training_step(self, dataloader_iter: object) -> None:
            return None

    with pytest.raises(UserError, match="dataloader_iter"):
        fit(loader(), AutoAccumulate(), module=Fetching())
