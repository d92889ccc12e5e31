"""What the user wrote in batches goes on meaning batches of the recipe."""

from typing import Any

import pytest
from reference import Samples, StreamOf, Validated, cut, fit, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError


def loader(size: int = 30, batch_size: int = 4) -> Any:
    return DataLoader(Samples(size), batch_size=batch_size)


@pytest.mark.parametrize("limit", [1, 5, 100, 0.5, 0.99])
@pytest.mark.parametrize("factor", [1, 2])
def test_limit_train_batches_counts_batches_of_the_recipe(limit: int | float, factor: int) -> None:
    settings = {"limit_train_batches": limit, "accumulate_grad_batches": factor}
    stock, _ = fit(loader(), **settings)
    ours, _ = fit(loader(), AutoAccumulate(micro_batch_size=3), **settings)
    assert [sorted(w) for w in ours.windows] == [sorted(w) for w in stock.windows]
    assert worst_error(ours.gradients, plain_loop(Samples(30), stock.windows)) <= 1e-12


def test_limit_train_batches_cuts_a_stream() -> None:
    """Also where the stream would end before the limit."""
    for limit, windows in ((3, cut(range(12), 8)), (100, cut(range(30), 8))):
        module, _ = fit(
            DataLoader(StreamOf(Samples(30)), batch_size=4),
            AutoAccumulate(micro_batch_size=3),
            accumulate_grad_batches=2,
            limit_train_batches=limit,
            max_epochs=1,
        )
        assert worst_error(module.gradients, plain_loop(Samples(30), windows)) <= 1e-12


@pytest.mark.filterwarnings("ignore:The effective batch of 64 samples is above the 30")
def test_an_interval_above_the_epoch_is_refused_in_batches_of_the_recipe() -> None:
    fit(loader(), AutoAccumulate(64), module=Validated(), val_check_interval=8, max_epochs=1)
    with pytest.raises(UserError, match=r"val_check_interval=9 is more than the 8"):
        fit(loader(), AutoAccumulate(micro_batch_size=1), module=Validated(), val_check_interval=9)


def test_limits_are_the_users_again_after_the_fit() -> None:
    _, trainer = fit(loader(), AutoAccumulate(micro_batch_size=1), limit_train_batches=3, val_check_interval=2)
    assert (trainer.limit_train_batches, trainer.val_check_interval) == (3, 2)


def test_overfitting_turns_a_shuffle_off() -> None:
    shuffled = DataLoader(Samples(30), batch_size=4, shuffle=True)
    with pytest.warns(UserWarning, match="turning off the train dataloader shuffling"):
        module, _ = fit(shuffled, AutoAccumulate(micro_batch_size=3), overfit_batches=2)
    assert module.windows == cut(range(8), 4) * 2


class StopsAtTheFifth(Validated):
    """Asks for an end in the middle of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop |= 5 in batch[2].tolist()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("val_check_interval", [1, 5])
def test_training_stops_with_the_batch_in_which_it_is_asked_to(val_check_interval: int) -> None:
    """Not between two parts of it; validation follows, as in stock Lightning."""
    settings = {"val_check_interval": val_check_interval}
    stock, _ = fit(loader(), module=StopsAtTheFifth(), **settings)
    ours, trainer = fit(loader(), AutoAccumulate(micro_batch_size=1), module=StopsAtTheFifth(), **settings)
    assert ours.windows == stock.windows == cut(range(8), 4)
    assert ours.steps_at_validation == stock.steps_at_validation
    assert trainer.should_stop
