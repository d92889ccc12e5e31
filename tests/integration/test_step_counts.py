"""How many optimizer steps there will be, and what counts them: schedules, validation and limits."""

from math import ceil
from typing import Any

import lightning.pytorch as pl
import pytest
from reference import Regression, Samples, StreamOf, Validated, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, optimizer_steps


class Scheduled(Regression):
    """Asks for the number of steps where schedules are made."""

    def configure_optimizers(self) -> Any:
        self.steps = optimizer_steps(self.trainer)
        return super().configure_optimizers()


def loader(samples: int = 30, batch_size: int = 4) -> Any:
    return DataLoader(Samples(samples), batch_size)


def test_a_stream_has_no_count() -> None:
    """The answer is then Lightning's own, with the callback or without it."""
    for callbacks in ([], [AutoAccumulate(micro_batch_size=2)]):
        module, _ = fit(DataLoader(StreamOf(Samples(30)), 4), *callbacks, module=Scheduled(), max_steps=5)
        assert module.steps == 5
    module, trainer = fit(loader(), module=Scheduled(), accumulate_grad_batches=3)
    assert module.steps == trainer.global_step == 6


# --- intervals: windows of three batches -----------------------------------------------------------

FACTOR = 3
IN_WINDOWS: list[tuple[int, dict[str, Any], list[int]]] = [
    (21, {"val_check_interval": 5}, [2, 4, 6, 9, 11, 13]),
    (21, {"val_check_interval": 5, "check_val_every_n_epoch": None}, [2, 4, 6, 8, 10, 12, 14]),
    (21, {"val_check_interval": 0.5, "limit_train_batches": 10}, [2, 4, 6, 8]),
    (21, {"val_check_interval": 5, "max_steps": 5}, [2, 4]),
]


@pytest.mark.parametrize(("batches", "settings", "expected"), IN_WINDOWS, ids=str)
def test_validation_is_due_after_whole_windows(
    batches: int, settings: dict[str, Any], expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Its interval is rounded up to windows; the plan says so. Cut in the step, batches are stock Lightning's."""

    def validated_at(*callbacks: pl.Callback) -> list[int]:
        arguments = {"accumulate_grad_batches": FACTOR, **settings}
        return fit(loader(4 * batches), *callbacks, module=Validated(), **arguments)[0].steps_at_validation

    assert validated_at(AutoAccumulate(micro_batch_size=6, micro_batching="loader", verify=False)) == expected
    interval = settings.get("val_check_interval")
    is_rounded = isinstance(interval, int) and interval % FACTOR != 0
    line = f"validation every {ceil((interval or 0) / FACTOR)} windows, for val_check_interval={interval} batches"
    assert (line in caplog.text) is is_rounded
    assert validated_at(AutoAccumulate(micro_batch_size=3, micro_batching="step", verify=False)) == validated_at()


def test_validation_by_time(micro_batching: Any) -> None:
    """An interval of no seconds is due after every batch."""
    callback = AutoAccumulate(micro_batch_size=3, micro_batching=micro_batching)
    module, trainer = fit(loader(16), callback, module=Validated(), max_epochs=1, val_check_interval={"seconds": 0})
    assert trainer.global_step == module.steps_at_validation[-1] == 4


@pytest.mark.filterwarnings("ignore:The effective batch of 64 samples is above the 30")
def test_an_interval_above_the_epoch_is_refused_in_batches_of_the_recipe() -> None:
    callback = AutoAccumulate(64, micro_batching="loader")
    module, _ = fit(loader(), callback, module=Validated(), val_check_interval=8, max_epochs=1)
    assert module.steps_at_validation == [1]
    with pytest.raises(ValueError, match=r"`val_check_interval` \(9\) must be less than or equal to .* \(8\)"):
        fit(loader(), AutoAccumulate(micro_batch_size=1), module=Validated(), val_check_interval=9)
