"""Callbacks of Lightning's own beside ours keep their meaning, or are refused."""

from typing import Any

import lightning.pytorch as pl
import pytest
from reference import Samples, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError


def loader() -> "DataLoader[object]":
    return DataLoader(Samples(64), batch_size=8)


def test_data_that_another_run_of_the_loop_left_are_set_up_anew() -> None:
    """As the learning rate finder of Lightning 2.5 leaves them."""

    class Leaves(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            trainer.fit_loop._combined_loader = object()

    callback = AutoAccumulate(16, micro_batch_size=4)
    _, trainer = fit(loader(), Leaves(), callback, max_epochs=1)
    assert callback.plan.factor == 4
    assert trainer.global_step == 4


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
    with pytest.raises(UserError, match="accumulate_grad_batches=0 must be at least 1"):
        fit(loader(), AutoAccumulate(micro_batch_size=2), accumulate_grad_batches=0)
