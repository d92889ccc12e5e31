"""A resume lands on the same sample, whatever wrote the checkpoint and whatever the micro-batch now is."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from reference import Regression, Samples, SaveAll, StreamOf, Validated, cut, fit, loader, plain_loop, worst_error
from torch.utils.data import DataLoader, Sampler

from lightning_ga import AutoAccumulate
from lightning_ga.loading import orders


class Saver(pl.Callback):
    """Saves a checkpoint on each call of one hook, and notes the steps that loggers would be given."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder, self.hook = folder, hook
        self.saved: list[tuple[Path, int]] = []
        self.logger_steps: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.logger_steps.append((trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped))

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        vars(self)[self.hook] = self.save

    def save(self, trainer: Any, *_: Any) -> None:
        path = self.folder / f"{len(self.saved)}.ckpt"
        trainer.save_checkpoint(path)
        self.saved.append((path, trainer.global_step))


def run(module: Regression, micro_batch: int, *callbacks: pl.Callback, verify: bool = True, **settings: Any) -> Any:
    loader = DataLoader(Samples(27), batch_size=5, shuffle=True)
    callback = AutoAccumulate(micro_batch_size=micro_batch, micro_batching="loader", verify=verify)
    settings = {"accumulate_grad_batches": 2, "max_epochs": 3, **settings}
    return fit(loader, callback, *callbacks, module=module, **settings)


OVER_EPOCHS = {"val_check_interval": 4, "check_val_every_n_epoch": None}
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("on_train_batch_end", {}),
    ("on_train_batch_end", OVER_EPOCHS),
    ("on_validation_end", {"val_check_interval": 2}),
    ("on_validation_end", OVER_EPOCHS),
    ("on_train_epoch_end", {"max_steps": 8}),
    ("on_train_epoch_end", {"reload_dataloaders_every_n_epochs": 1}),
    ("on_train_batch_end", {"reload_dataloaders_every_n_epochs": 1}),
]


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda number: f"{RUNS[number][0]}-{RUNS[number][1]}")
def test_training_continues_as_if_it_had_not_stopped(number: int, tmp_path: Path) -> None:
    """Windows, gradients, steps of optimizer and loggers, and validation are those of the whole run."""
    hook, settings = RUNS[number]
    saver = Saver(tmp_path, hook)
    whole, whole_trainer = run(Validated(), 4, saver, **settings)
    assert saver.saved
    saved = list(enumerate(saver.saved, number))
    for place, (path, step) in saved[:: 5 if settings else 2]:
        watcher, module = Saver(tmp_path, "on_exception"), Validated()
        micro_batch = (4, 3, 10)[place % 3]
        _, trainer = run(module, micro_batch, watcher, ckpt_path=path, seed=1, verify=False, **settings)
        assert [sorted(w) for w in module.windows[step:]] == [sorted(w) for w in whole.windows[step:]]
        left = whole.gradients[step:]
        assert len(module.gradients) == len(left)
        assert left == [] or worst_error(module.gradients, left) <= 1e-12
        assert trainer.global_step == whole_trainer.global_step
        assert set(watcher.logger_steps) <= set(saver.logger_steps)
        late = [at for at in whole.steps_at_validation if at > step]
        assert [at for at in module.steps_at_validation if at > step] == late
        for ours, theirs in zip(module.parameters(), whole.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_state_in_a_checkpoint_is_plain_values(tmp_path: Path) -> None:
    """It loads with ``weights_only=True``, and has seed and position."""
    saver = Saver(tmp_path, "on_train_batch_end")
    run(Regression(), 5, saver)
    path, _ = saver.saved[3]
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == []
    state = torch.load(path, weights_only=True)["callbacks"]["AutoAccumulate"]
    done = {"samples_done": 20, "batches_done": 4, "windows_done": 2}
    before = {"samples_before": 0, "batches_before": 0, "steps_before": 0, "shuffles": False}
    assert state["position"] == {"seed": 7, "epoch": 0, **done, **before}
    assert state["probe"] is None


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_exception"])
@pytest.mark.loader_only(reason="in the step a resume is stock Lightning's")
def test_a_stock_run_is_continued_at_its_place(hook: str, tmp_path: Path) -> None:
    """From the last window that was whole, in mid-epoch and after an error."""

    class Failing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if hook == "on_exception" and self.global_step == 4 and batch_idx == 1:
                raise KeyError("an error of the user's")
            return super().training_step(batch, batch_idx)

    saver, data = Saver(tmp_path, hook), Samples(30)  # stock weighs ragged windows otherwise
    loader = DataLoader(data, batch_size=5)
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 3}
    try:
        fit(loader, saver, module=Failing(), **settings)
    except KeyError:
        assert hook == "on_exception"
    oracle = plain_loop(data, windows := cut(range(30), 10) * 3)
    for path, step in saver.saved[::5]:
        module, trainer = fit(loader, AutoAccumulate(micro_batch_size=4), ckpt_path=path, **settings)
        assert trainer.global_step == 9
        assert [window for window in module.windows if window] == windows[step:], path
        assert not windows[step:] or worst_error(module.gradients, oracle[step:]) <= 1e-12


@pytest.mark.parametrize("factor", [1, 2])
def test_an_epoch_of_unknown_length_that_was_validated_is_not_trained_again(factor: int, tmp_path: Path) -> None:
    """A checkpoint of the validation after its last batch is continued with the next epoch."""
    saver, loader = Saver(tmp_path, "on_validation_end"), DataLoader(StreamOf(Samples(24 * factor)), batch_size=8)
    settings: dict[str, Any] = {"accumulate_grad_batches": factor, "max_epochs": 2}
    whole, _ = fit(loader, AutoAccumulate(verify=False), saver, module=Validated(), **settings)
    module, trainer = fit(
        loader, AutoAccumulate(verify=False), module=Validated(), ckpt_path=saver.saved[0][0], **settings
    )
    assert (trainer.global_step, module.steps_at_validation) == (6, [6])
    assert worst_error(module.gradients, whole.gradients[3:]) <= 1e-12


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("micro_batch", [2, 16])
@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_run_cut_in_the_loader_goes_on_cut_in_the_step(step: int, micro_batch: int, tmp_path: Path) -> None:
    """Its loop has counted micro-batches, and goes on by batches: four of two in each epoch."""
    saver, settings = SaveAll(tmp_path), {"accumulate_grad_batches": 2, "max_epochs": 2}
    cuts = {"micro_batch_size": micro_batch, "verify": False}
    fit(loader(64, 8), AutoAccumulate(**cuts), saver, **settings)
    path = tmp_path / f"step{step}.ckpt"
    module, trainer = fit(
        loader(64, 8), AutoAccumulate(**{**cuts, "micro_batching": "step"}), ckpt_path=path, **settings
    )
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)
    assert [len(window) for window in module.windows[step:]] == [16] * (8 - step)


class InAWindow(Regression):
    """A rate that is halved at every tenth batch; memory runs out in one call of the step."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.fails, self.calls = fails, 0
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 10}]


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_a_run_that_goes_on_within_a_window_has_its_rate_and_its_clock(tmp_path: Path) -> None:
    """Where the step cuts, a checkpoint of a window's second batch goes on with its third."""

    def train(module: InAWindow, *callbacks: pl.Callback, **settings: Any) -> list[float]:
        ours = AutoAccumulate(32, micro_batching="step", micro_batch_size=8, scale_lr="linear", verify=False)
        return fit(loader(192, 8), ours, *callbacks, module=module, **settings)[0].rates

    saver = Saver(tmp_path, "on_train_batch_end")
    whole = train(InAWindow(), saver)
    path, step = saver.saved[21]
    assert train(InAWindow(), ckpt_path=path) == whole[step:]
    with pytest.raises(torch.OutOfMemoryError):  # the window's first two batches are gone
        train(InAWindow(fails=2), ckpt_path=path)


def test_an_epoch_of_unknown_length_begins_with_a_whole_window(tmp_path: Path) -> None:
    """After a checkpoint of the last of its three batches, windows are of two batches and of one, as before."""
    saver, loader = Saver(tmp_path, "on_train_batch_end"), DataLoader(StreamOf(Samples(24)), batch_size=8)
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
    whole, _ = fit(loader, AutoAccumulate(verify=False), saver, **settings)
    path, step = saver.saved[2]
    module, trainer = fit(loader, AutoAccumulate(verify=False), ckpt_path=path, **settings)
    assert (step, trainer.global_step) == (2, 4)
    assert worst_error(module.gradients, whole.gradients[step:]) <= 1e-12


@pytest.mark.parametrize(
    ("is_stock", "hook", "micro_batch"),
    [(False, "on_train_batch_end", 3), (False, "on_train_epoch_end", 8), (True, "on_train_batch_end", 3)],
)
def test_an_epoch_that_max_steps_ended_early_is_continued(
    is_stock: bool, hook: str, micro_batch: int, tmp_path: Path
) -> None:
    """With more steps a run continues as if it had never been stopped."""
    saver, loader = Saver(tmp_path, hook), DataLoader(Samples(44), batch_size=8)

    def ours() -> AutoAccumulate:
        return AutoAccumulate(micro_batch_size=micro_batch, micro_batching="loader", verify=False)

    fit(loader, saver, *([] if is_stock else [ours()]), max_steps=8)
    settings: dict[str, Any] = {"max_steps": 14, "max_epochs": None}
    module, trainer = fit(loader, ours(), ckpt_path=saver.saved[-1][0], **settings)
    whole, never_stopped = fit(loader, ours(), **settings)
    assert (trainer.global_step, trainer.current_epoch) == (14, never_stopped.current_epoch)
    assert module.windows[8:] == whole.windows[8:]
    assert worst_error(module.gradients, whole.gradients[8:]) <= 1e-12


class ShufflesOn(Sampler[int]):
    """Shuffles a list of its own each time, from where the last shuffle has left it."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)
        self.indices = list(range(32))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        self.generator.shuffle(self.indices)
        return iter(list(self.indices))


def shuffled_on(micro_batch: int, *callbacks: pl.Callback, **settings: Any) -> Any:
    loader = DataLoader(Samples(32), batch_size=4, sampler=ShufflesOn())
    callback = AutoAccumulate(micro_batch_size=micro_batch, micro_batching="loader")
    return fit(loader, callback, *callbacks, max_epochs=3, **settings)[0]


@pytest.mark.parametrize("kept", [True, False])
def test_an_epoch_goes_on_in_an_order_that_its_sampler_does_not_give_again(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has the order; if that is too long for it, a warning says what is lost."""
    if not kept:
        monkeypatch.setattr(orders, "MOST_KEPT", 16)
    whole = shuffled_on(4, SaveAll(tmp_path, [11, 16]))
    with nullcontext() if kept else pytest.warns(UserWarning, match="another order each time"):
        resumed = shuffled_on(2, ckpt_path=tmp_path / "step11.ckpt")
    of_epoch = [index for window in (*whole.windows[8:11], *resumed.windows[11:16]) for index in window]
    assert (sorted(of_epoch) == list(range(32))) is kept
    if kept:
        assert [sorted(each) for each in resumed.windows[11:16]] == [sorted(each) for each in whole.windows[11:16]]
    at_end = shuffled_on(2, ckpt_path=tmp_path / "step16.ckpt")
    assert sorted(index for window in at_end.windows[16:] for index in window) == list(range(32))


class LoadsMore(Regression):
    """Loads a dataset in each epoch that is larger than the one before."""

    def train_dataloader(self) -> DataLoader:
        sampler = ShufflesOn()
        sampler.indices = list(range(16 + 8 * self.current_epoch))
        return DataLoader(Samples(32), batch_size=4, sampler=sampler)


@pytest.mark.loader_only(reason="the step leaves the order to the loader")
def test_only_the_epoch_that_was_interrupted_has_lost_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs of data that are loaded later have an order of their own, whatever the checkpoint has kept."""
    monkeypatch.setattr(orders, "MOST_KEPT", 8)
    settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    fit(None, AutoAccumulate(verify=False), SaveAll(tmp_path, [2]), module=LoadsMore(), **settings)
    with pytest.warns(UserWarning, match="another order each time") as told:
        fit(None, AutoAccumulate(verify=False), module=LoadsMore(), ckpt_path=tmp_path / "step2.ckpt", **settings)
    assert ["another order each time" in str(each.message) for each in told].count(True) == 1
