"""What is asked for and cannot be, or exceeds the data: refused or warned of before training, in a true sentence."""

from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch import Callback
from reference import Regression, Samples, StreamOf, fit, loader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_ga import AutoAccumulate, UserError, optimizer_steps
from lightning_ga.schedule import by_step

SAMPLES = 64


@pytest.mark.parametrize(("asked", "micro_batch"), [(256, "auto"), (65, 20), ({0: 16, 1: 1000}, 20)])
def test_an_effective_batch_above_the_data_is_warned_of(asked: Any, micro_batch: Any) -> None:
    callback = AutoAccumulate(asked, micro_batch_size=micro_batch)
    with pytest.warns(UserWarning, match=r"effective batch of [\d,]+ samples is above the 64 of an epoch"):
        _, trainer = fit(loader(SAMPLES, 16), callback)
    assert callback.plan.effective_batch_size == sum(callback.plan.chunks[0]) == SAMPLES
    assert trainer.global_step == callback.optimizer_steps() == (2 if not isinstance(asked, dict) else 5)


def test_an_effective_batch_above_the_data_is_warned_of_in_the_step() -> None:
    with pytest.warns(UserWarning, match=r"effective batch of 256 samples is above the 64 of an epoch"):
        fit(loader(SAMPLES, 16), AutoAccumulate(256, micro_batching="step"), max_epochs=1)


class Counting(Callback):
    """A callback of another package that counts something else."""

    def optimizer_steps(self, what: str) -> int:
        return len(what)


def test_steps_are_not_asked_of_other_callbacks() -> None:
    callback = AutoAccumulate(32)
    _, trainer = fit(loader(SAMPLES, 16), Counting(), callback, max_epochs=1)
    trainer.callbacks.sort(key=lambda each: isinstance(each, AutoAccumulate))
    assert optimizer_steps(trainer) == trainer.global_step == 2


@pytest.mark.filterwarnings("ignore:The effective batch of 12 samples is above the 8 of an epoch")
def test_a_window_above_what_drop_last_leaves_is_trained(micro_batching: Any) -> None:
    """``drop_last`` leaves out batches, never windows."""
    data = DataLoader(Samples(9), 4, drop_last=True)
    module, _ = fit(data, AutoAccumulate(12), module=Regression(), max_epochs=1)
    assert [sorted(window) for window in module.windows] == [list(range(8))]


class TurnsManual(Regression):
    """Turns to manual optimization when training starts."""

    def on_train_start(self) -> None:
        self.automatic_optimization = False


class Own(BatchSampler):
    """A batch sampler of the user's own."""


OWN_BATCHES = DataLoader(Samples(53), batch_sampler=Own(SequentialSampler(range(53)), 4, False))
READY_MADE = DataLoader(StreamOf(list(loader(53, 4))), batch_size=None)
NO_WHOLE_NUMBER = "effective_batch_size=6 is no whole number of batches: with {}, .* Use a multiple of 4"
REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], type[Regression], str]] = {
    "manual": (
        *(loader(SAMPLES, 16), {"micro_batch_size": 8}, {}, TurnsManual),
        "TurnsManual sets automatic_optimization=False.*leave AutoAccumulate out",
    ),
    "factor": (
        loader(SAMPLES, 16),
        {},
        {"accumulate_grad_batches": 0},
        Regression,
        "accumulate_grad_batches=0 must be at least",
    ),
    "parts of batches": (
        *(OWN_BATCHES, {"effective_batch_size": 6, "micro_batch_size": 2}, {}, Regression),
        NO_WHOLE_NUMBER.format(r"a batch sampler of its own \(Own\)"),
    ),
    "parts of ready-made batches": (
        *(READY_MADE, {"effective_batch_size": by_step({0: 6, 9: 4}), "micro_batch_size": 2}, {}, Regression),
        NO_WHOLE_NUMBER.format("batch_size=None"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_before_the_first_step(name: str) -> None:
    data, arguments, settings, kind, told = REFUSED[name]
    module = kind()
    with pytest.raises(UserError, match=told):
        fit(data, AutoAccumulate(**arguments), module=module, **settings)
    assert not module.gradients


class Two(Regression):
    """Has two optimizers."""

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers()] * 2


def test_several_optimizers_are_not_sent_in_a_circle() -> None:
    with pytest.raises(RuntimeError, match="multiple optimizers") as caught:
        fit(loader(SAMPLES, 16), AutoAccumulate(), module=Two())
    (note,) = caught.value.__notes__
    assert "leave AutoAccumulate out of the callbacks and cut each batch in training_step" in note


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


EMPTY = {
    "stream": lambda: DataLoader(Nothing(), batch_size=2),
    "dataset": lambda: DataLoader(Samples(0), batch_size=2),
    "loaders": lambda: [DataLoader(Samples(0)), DataLoader(Samples(0))],
    "dropped": lambda: DataLoader(Samples(3), batch_size=4, drop_last=True),
    "list": list,
}


@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize("name", EMPTY)
def test_data_that_contain_nothing_are_passed_over(name: str, micro_batching: Any) -> None:
    ends = []
    for callbacks in ((), (AutoAccumulate(micro_batching=micro_batching),)):
        _, trainer = fit(EMPTY[name](), *callbacks, module=Regression(), max_epochs=2)
        ends.append((trainer.global_step, trainer.current_epoch))
    assert ends[0] == ends[1]
    assert ends[0][0] == 0


def test_ready_made_batches_that_are_loaded_again_are_as_large_as_before() -> None:
    data = DataLoader(list(loader(16, 4)), batch_size=None)  # type: ignore[arg-type]
    module, _ = fit(data, AutoAccumulate(8), max_epochs=2, reload_dataloaders_every_n_epochs=1)
    assert [len(window) for window in module.windows] == [8] * 4
