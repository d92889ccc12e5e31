"""How many optimizer steps there will be, and what counts them: schedules, validation and limits."""

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from reference import Regression, Samples, StreamOf, Validated, fit, loader
from torch.utils.data import DataLoader, Sampler

from lightning_ga import AutoAccumulate, UserError, optimizer_steps
from lightning_ga.plan.config import Request
from lightning_ga.schedule import by_samples, by_step


class Scheduled(Regression):
    """Asks for the number of steps where schedules are made."""

    def configure_optimizers(self) -> Any:
        self.steps = optimizer_steps(self.trainer)
        return super().configure_optimizers()


def test_a_stream_has_no_count() -> None:
    """The answer is then Lightning's own, with the callback or without it."""
    for callbacks in ([], [AutoAccumulate(micro_batch_size=2)]):
        module, _ = fit(DataLoader(StreamOf(Samples(30)), 4), *callbacks, module=Scheduled(), max_steps=5)
        assert module.steps == 5
    module, trainer = fit(loader(30, 4), module=Scheduled(), accumulate_grad_batches=3)
    assert module.steps == trainer.global_step == 6


@pytest.mark.parametrize("asked", [24, {0: 24, 1: 32}, by_step({0: 8, 2: 24})])
def test_steps_are_not_guessed_while_the_samples_of_a_batch_are_not_known(asked: Any) -> None:
    """Once training has begun they are counted."""
    ready_made = DataLoader(list(loader(64, 8)), batch_size=None)
    with pytest.raises(
        UserError, match=r"effective_batch_size=.* before training has read a batch: with .*accumulate="
    ):
        fit(ready_made, AutoAccumulate(asked), module=Scheduled(), max_epochs=2)
    callback = AutoAccumulate(asked)
    assert fit(ready_made, callback, max_epochs=2)[1].global_step == callback.optimizer_steps()
    for known in (AutoAccumulate(), AutoAccumulate(accumulate=3)):
        module, trainer = fit(ready_made, known, module=Scheduled(), max_epochs=2)
        assert module.steps == trainer.global_step == known.optimizer_steps()


@pytest.mark.parametrize("asked", [8, {0: 8, 1: 16}, by_step({0: 8, 10**6: 16}), by_step({0: 8, 5: 16})])
def test_windows_that_do_not_change_are_not_counted_one_by_one(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those after the last step."""
    looked_up: list[int] = []
    count_at = Request.count_at

    def noted(self: Request, epoch: int, *, step: int, samples: int) -> int | None:
        looked_up.append(epoch)
        return count_at(self, epoch, step=step, samples=samples)

    monkeypatch.setattr(Request, "count_at", noted)
    callback = AutoAccumulate(asked, micro_batching="step", verify=False)
    module, trainer = fit(loader(160, 4), callback, module=Scheduled(), max_epochs=300, max_steps=7)
    assert module.steps == trainer.global_step == 7
    assert len(looked_up) < 40


def test_epochs_after_the_last_change_are_counted_together(micro_batching: Any) -> None:
    callback = AutoAccumulate(by_step({0: 4, 5: 12}), micro_batch_size=4, micro_batching=micro_batching)
    module, trainer = fit(loader(28, 4), callback, module=Scheduled(), max_epochs=4)
    assert module.steps == trainer.global_step == callback.optimizer_steps() == 6 + 3 * 3


class Estimated(Regression):
    """Asks Lightning for the number of steps where schedules are made."""

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("asked", [{"effective_batch_size": 16}, {"accumulate": 4}])
def test_lightning_counts_the_steps_of_windows_of_one_size(asked: dict[str, Any], micro_batching: Any) -> None:
    callback = AutoAccumulate(**asked, micro_batch_size=4, micro_batching=micro_batching, verify=False)
    module, trainer = fit(loader(72, 4), callback, module=Estimated(), max_epochs=2)
    assert module.steps == trainer.global_step == 10


class SetsFactor(Regression):
    """Sets the recipe's factor in a hook that runs before the data are read."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def set_factor_in(self, hook: str) -> None:
        if hook == self.hook:
            self.trainer.accumulate_grad_batches = 3

    def setup(self, stage: str) -> None:
        self.set_factor_in("setup")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.set_factor_in("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.set_factor_in("on_fit_start")


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers", "on_fit_start"])
def test_the_recipe_has_the_factor_that_a_hook_of_the_set_up_gives(micro_batching: Any, hook: str) -> None:
    stock, _ = fit(loader(24, 4), module=SetsFactor(hook), max_epochs=1)
    callback = AutoAccumulate(micro_batching=micro_batching, verify=False, cache=False)
    module, _ = fit(loader(24, 4), callback, module=SetsFactor(hook), max_epochs=1)
    assert callback.plan.effective_batch_size == 12
    assert len(module.gradients) == 2
    torch.testing.assert_close(module.gradients, stock.gradients)


class Paired(Regression):
    """Trains on two loaders at a time, and keeps the samples of each pass over the larger one."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)


def test_samples_of_several_loaders_are_those_of_the_largest() -> None:
    """Batches of 8 and 12 are cut into as many as 4 pieces, and count as 12 samples."""
    data = CombinedLoader({"a": loader(64, 8), "b": loader(96, 12)}, "min_size")
    callback = AutoAccumulate(24, micro_batch_size=2)
    module, trainer = fit(data, callback, module=Paired(), max_epochs=1)
    assert str(callback.plan).startswith("effective batch 24 = 6 × 4 × 1")
    assert [len(indices) for _, indices in module.micro_batches] == [4, 6] * 16
    assert trainer.global_step == callback.optimizer_steps() == 4
    fitting = AutoAccumulate(24, verify=False, cache=False)
    fit(data, fitting, module=Paired(), max_epochs=1)
    assert fitting.fits.samples == 12
    changes = AutoAccumulate(by_samples({0: 12, 24: 36}), micro_batch_size=4)
    assert fit(data, changes, module=Paired(), max_epochs=1)[1].global_step == changes.optimizer_steps() == 4
    with pytest.raises(UserError, match="batches of 12 samples on 1 ranks are kept. Use a multiple of 12"):
        fit(data, AutoAccumulate(20, micro_batch_size=2), module=Paired(), max_epochs=1)


class PairedInLittleMemory(Paired):
    """Runs out of memory with more than 6 samples of the larger loader."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch["b"][0]) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def test_reports_of_memory_count_samples_of_the_largest_of_several_loaders() -> None:
    data = CombinedLoader({"a": loader(64, 8), "b": loader(96, 12)}, "min_size")
    callback = AutoAccumulate(verify=False, cache=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, trainer = fit(data, callback, module=PairedInLittleMemory(), max_epochs=1)
        trainer.validate(PairedInLittleMemory(), data, verbose=False)
    reports = [str(each.message) for each in caught if str(each.message).startswith("Memory ran out")]
    stages = ["training", "validation"]
    if torch.cuda.is_available():  # a trial of the whole window has met the error before training does
        stages = ["validation"]
    assert [report.split(" after")[0] for report in reports] == [
        f"Memory ran out in {stage} with 12 samples" for stage in stages
    ]
    assert all("in micro-batches of at most 6 samples" in report for report in reports)


# --- intervals: windows of three batches -----------------------------------------------------------

FACTOR = 3
EPOCHS = 2
IN_WINDOWS: list[tuple[int, int, dict[str, Any]]] = [
    (21, 5, {"val_check_interval": 5}),
    (21, 5, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
    (10, 5, {"val_check_interval": 0.5, "limit_train_batches": 10}),
    (21, 5, {"val_check_interval": 5, "max_steps": 5}),
    (20, 6, {"val_check_interval": 6}),
    (20, 25, {"val_check_interval": 25, "check_val_every_n_epoch": None}),
]


def steps_when_due(batches: int, every: int, settings: dict[str, Any]) -> list[int]:
    """Walk over the recipe's batches: what falls due within a window is due at its end."""
    found = []
    step = total = 0
    is_due = False
    for _ in range(EPOCHS):
        for batch in range(1, batches + 1):
            total += 1
            counted = batch if settings.get("check_val_every_n_epoch", 1) else total
            is_due = is_due or counted % every == 0
            if batch % FACTOR == 0 or batch == batches:
                step += 1
                if is_due:
                    found.append(step)
                is_due = False
    return [step for step in found if step <= settings.get("max_steps", step)]


@pytest.mark.parametrize(("batches", "every", "settings"), IN_WINDOWS, ids=str)
def test_validation_is_due_at_the_end_of_the_window_in_which_its_batches_are_done(
    batches: int, every: int, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The plan says so if that is later than in the recipe. Cut in the step, batches are stock Lightning's."""

    def validated_at(*callbacks: pl.Callback) -> list[int]:
        arguments = {"accumulate_grad_batches": FACTOR, "max_epochs": EPOCHS, **settings}
        samples = 4 * batches
        return fit(loader(samples, 4), *callbacks, module=Validated(), **arguments)[0].steps_at_validation

    expected = steps_when_due(batches, every, settings)
    assert validated_at(AutoAccumulate(micro_batch_size=6, micro_batching="loader", verify=False)) == expected
    interval = settings.get("val_check_interval")
    waits = isinstance(interval, int) and interval % FACTOR != 0
    line = f"validation at the end of the window in which val_check_interval={interval} batches are done"
    assert (line in caplog.text) is waits
    assert validated_at(AutoAccumulate(micro_batch_size=3, micro_batching="step", verify=False)) == validated_at()


def test_a_window_of_no_whole_number_of_batches_may_still_end_where_validation_is_due(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Five batches of 30 are three windows of 50; three batches of 10 are none of 50."""
    for batch, waits in ((30, False), (10, True)):
        caplog.clear()
        callback = AutoAccumulate(50, micro_batching="loader", verify=False)
        fit(loader(300, batch), callback, module=Validated(), max_epochs=1, val_check_interval=batch // 6 or 1)
        assert ("validation at the end of the window" in caplog.text) is waits


def test_validation_by_time(micro_batching: Any) -> None:
    """An interval of no seconds is due after every batch."""
    callback = AutoAccumulate(micro_batch_size=3, micro_batching=micro_batching)
    module, trainer = fit(loader(16, 4), callback, module=Validated(), max_epochs=1, val_check_interval={"seconds": 0})
    assert trainer.global_step == module.steps_at_validation[-1] == 4


@pytest.mark.filterwarnings("ignore:The effective batch of 64 samples is above the 30")
def test_an_interval_above_the_epoch_is_refused_in_batches_of_the_recipe() -> None:
    callback = AutoAccumulate(64, micro_batching="loader")
    module, _ = fit(loader(30, 4), callback, module=Validated(), val_check_interval=8, max_epochs=1)
    assert module.steps_at_validation == [1]
    with pytest.raises(ValueError, match=r"`val_check_interval` \(9\) must be less than or equal to .* \(8\)"):
        fit(loader(30, 4), AutoAccumulate(micro_batch_size=1), module=Validated(), val_check_interval=9)


READS: list[int] = []  # no object that is put back


class Asked(Sampler[int]):
    """Notes when it is read."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        READS.append(len(READS))
        return iter(range(24))


class Once(Scheduled):
    """Ends after its first epoch, and notes how often its sampler has been read when steps were counted."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.reads = len(READS)
        return optimizer

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = True


def test_a_sampler_is_not_read_for_each_epoch_whose_steps_are_counted() -> None:
    """It may have millions of samples, and training hundreds of epochs."""
    READS.clear()
    module, _ = fit(DataLoader(Samples(24), 4, sampler=Asked()), AutoAccumulate(8), module=Once(), max_epochs=50)
    assert module.steps == 50 * 3
    assert module.reads < 10
    callback = AutoAccumulate({0: 8, 1: 12})
    module, trainer = fit(DataLoader(Samples(24), 4, sampler=Asked()), callback, module=Scheduled(), max_epochs=3)
    assert module.steps == trainer.global_step == callback.optimizer_steps() == 3 + 2 + 2
