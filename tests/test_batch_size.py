"""The critical batch: branches are trainings from a checkpoint, and the verdict follows from their losses."""

import json
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from reference import Regression, Samples, loss, permutation, quiet_trainer
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError, measure_batch_size
from lightning_ga.app.terminal import Interrupted
from lightning_ga.batch_size import _Branches, main
from lightning_ga.plan.critical_batch import BatchPoint, CriticalBatch

SIZE, QUIET = 64, {"accelerator": "cpu", "devices": 1}


class Judged(Regression):
    """Validated on the training samples."""

    made: list["Judged"] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", loss(self.net, *batch[:2]), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(Samples(SIZE), 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(SIZE), SIZE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one epoch, after which the schedule halves the rate."""
    saver = ModelCheckpoint(tmp_path_factory.mktemp("run"), filename="last")
    quiet_trainer(saver, max_epochs=1, enable_checkpointing=True).fit(Judged(), datamodule=Data())
    return Path(saver.best_model_path)


def by_hand(checkpoint: Path, windows: list[list[int]], lr: float) -> float:
    """The loss after a plain loop from the checkpoint."""
    content, module, data = torch.load(checkpoint, weights_only=True), Judged(), Samples(SIZE)
    module.load_state_dict(content["state_dict"])
    optimizer = torch.optim.SGD(module.net.parameters(), lr=lr)
    optimizer.load_state_dict(content["optimizer_states"][0])
    optimizer.param_groups[0]["lr"] = lr
    for window in windows:
        optimizer.zero_grad()
        loss(module.net, data.inputs[window], data.targets[window]).backward()
        optimizer.step()
    return loss(module.net, data.inputs, data.targets).item()


def test_a_branch_is_a_plain_training_from_the_checkpoint(checkpoint, tmp_path):
    """The same samples for every batch, with the rate that the rule says; a second call measures nothing again."""
    samples, rounded = 120, 128  # two epochs
    told: list[str] = []
    settings: dict[str, Any] = {"batch": 4, "samples": samples, "folder": tmp_path, "seeds": 2, "scale_lr": "linear"}

    def make() -> tuple[Judged, Data]:
        pl.seed_everything(7, verbose=False)  # as a script may do: the seeds of branches are others all the same
        return Judged(), Data()

    found = measure_batch_size(make, checkpoint, tell=told.append, **settings, **QUIET)
    assert found.samples == rounded
    assert [point.batch for point in found.points] == [2, 4, 8, 16]
    for point in found.points:
        for seed, measured in enumerate(point.losses):
            orders = [permutation(SIZE, seed, epoch) for epoch in range(2)]
            order = [index for each in orders for index in each][:rounded]
            windows = [order[start : start + point.batch] for start in range(0, rounded, point.batch)]
            assert measured == pytest.approx(by_hand(checkpoint, windows, 0.05 * point.batch / 4), rel=1e-9)
    assert len(told) == 8
    kept = json.loads((tmp_path / "batch_size.json").read_text())
    del kept["losses"]["8/1"]  # as if it had been interrupted before the last
    (tmp_path / "batch_size.json").write_text(json.dumps(kept))
    again = measure_batch_size(lambda: (Judged(), Data()), checkpoint, tell=told.append, **settings, **QUIET)
    assert again == found
    assert told[8].startswith("1 of 1: batch 8, seed 1")
    assert len(told) == 9


class OfItems(Judged):
    """Its loss is a mean over items, of which samples have unlike numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        weight = 1 + batch[1].abs().ceil()
        return (weight * (self.net(batch[0]) - batch[1]) ** 2).sum() / weight.sum()


def test_branches_weigh_micro_batches_as_the_callback_does(checkpoint: Path, tmp_path: Path) -> None:
    """A loss that is a mean over items, cut into single samples, gives what it gives uncut."""

    def losses(name: str, **ours: Any) -> list[tuple[float, ...]]:
        settings: dict[str, Any] = {"batch": 4, "samples": 64, "folder": tmp_path / name, "seeds": 2, "tell": str}
        settings["make_callback"] = partial(AutoAccumulate, verify=False, **ours)
        found = measure_batch_size(lambda: (OfItems(), Data()), checkpoint, **settings, **QUIET)
        return [point.losses for point in found.points]

    uncut = losses("uncut", micro_batch_size=16)
    assert losses("cut", micro_batch_size=1, normalize=items) == [pytest.approx(each) for each in uncut]
    assert losses("samples", micro_batch_size=1) != [pytest.approx(each) for each in uncut]


def items(batch: Any) -> torch.Tensor:
    return (1 + batch[1].abs().ceil()).sum()


def test_branches_of_another_setting_are_measured_anew(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another checkpoint of the same step and name, another precision or Trainer; those of the same are kept."""

    def measured(branches: _Branches, size: int, seed: int, _: Any) -> float:
        calls.append((size, seed))
        return float(branches.content["state_dict"]["net.0.weight"].sum()) + size + seed

    def losses(**trainer: Any) -> tuple[int, float]:
        """How many branches ran, and the first loss."""
        calls.clear()
        found = measure_batch_size(
            lambda: (Judged(), Data()),
            path,
            batch=4,
            samples=64,
            folder=tmp_path,
            seeds=2,
            tell=str,
            **QUIET,
            **trainer,
        )
        return len(calls), found.points[0].losses[0]

    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(_Branches, "loss", measured)
    content, path = torch.load(checkpoint, weights_only=True), tmp_path / "last.ckpt"
    path.write_bytes(checkpoint.read_bytes())
    first = losses()
    assert first[0] == 8
    assert losses() == (0, first[1])
    content["state_dict"]["net.0.weight"] += 1
    torch.save(content, path)
    other = losses()
    assert other == (8, pytest.approx(first[1] + content["state_dict"]["net.0.weight"].numel()))
    assert losses() == (0, other[1])
    for trainer in ({"precision": "bf16-mixed"}, {"gradient_clip_val": 0.5}, {"plugins": [Plugin()]}):
        assert losses(**trainer)[0] == 8
        assert losses(**trainer)[0] == 0
    assert losses(plugins=[Plugin()])[0] == 0  # an equal one, as another process makes it


class Plugin:
    """An object that JSON cannot hold."""


def test_what_would_show_nothing_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """One seed, a rate that has fallen to nothing, no such metric, too few samples."""
    settings: dict[str, Any] = {"batch": 4, "samples": 64, "folder": tmp_path, "tell": lambda _: None, **QUIET}
    for more, message in [
        ({"seeds": 1}, "seeds=1 gives no standard error"),
        ({"lr": 0.0}, "lr=0.0 must be a number above 0"),
        ({"tolerance": "x"}, "tolerance='x' must be a number above 0"),
        ({"scale_lr": "cubic"}, "scale_lr='cubic' must be one of 'none', 'linear', 'sqrt'"),
        ({"monitor": "val/acc"}, "monitor='val/acc' is no metric of validation: val/loss"),
        ({"batch": 20, "samples": 30}, "contain no window of 80 samples"),
        ({"batch": 256}, "samples=64 are too few to compare batch=256 with another"),
        ({"callbacks": []}, "callbacks= would be shared by all branches: .* configure_callbacks"),
    ]:
        with pytest.raises(UserError, match=message):
            measure_batch_size(lambda: (Judged(), Data()), checkpoint, **{**settings, **more})


def verdict(losses: dict[int, list[float]], tolerance: float) -> CriticalBatch:
    return CriticalBatch(tuple(BatchPoint(batch, tuple(losses[batch])) for batch in sorted(losses)), tolerance, 100)


def test_the_verdict_is_the_largest_batch_below_the_bound() -> None:
    """It names what the next one costs."""
    losses = {2: [1.0, 1.02], 4: [1.0, 1.0], 8: [1.004, 1.006], 16: [1.1, 1.2]}
    found = verdict(losses, 0.01)
    assert found.largest == 8
    assert found.sentence() == (
        "8 is the largest of these batches within 1 % of the lowest loss; 16 costs 0.15 ± 0.05 of loss on the same "
        "samples."
    )


@pytest.mark.parametrize("diverged", [nan, inf, -inf])
def test_a_batch_with_which_training_diverges_is_beyond_the_bound(diverged: float) -> None:
    """Though one seed alone does."""
    losses = {2: [diverged, 1.0], 4: [1.0, 1.0], 8: [1.0, 1.0], 16: [1.0, diverged], 32: [1.1, 1.1]}
    found = verdict(losses, 0.01)
    assert found.largest == 8
    assert found.sentence() == (
        "8 is the largest of these batches within 1 % of the lowest loss; with 16 training diverged."
    )
    found = verdict({2: [diverged] * 2, 4: [1.0, diverged]}, 0.01)
    assert found.largest == 2
    assert found.sentence() == "Training diverged with each of these batches: not all losses are finite."


@given(st.dictionaries(st.integers(1, 64), st.lists(st.floats(0.1, 9), min_size=2, max_size=2), min_size=1))
def test_no_larger_batch_than_the_verdict_follows_within_the_bound(losses: dict[int, list[float]]) -> None:
    """And all from the best one up to it are within."""
    found = verdict(losses, 0.05)
    after = [point for point in found.points if point.batch > found.largest]
    assert not after or after[0].loss > found.bound
    between = [point for point in found.points if found.lowest.batch <= point.batch <= found.largest]
    assert all(point.loss <= found.bound for point in between)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ckpt_path=nowhere"], "ckpt_path=nowhere is no checkpoint in the folder of a run"),
        (["ckpt_path=a", "sampels=3"], "Key 'sampels' is not in struct"),
        (["ckpt_path=[1"], "while parsing a flow sequence"),
        (["ckpt_path=0"], "ckpt_path=0 is no checkpoint"),
        (["ckpt_path=off"], "ckpt_path=False is no checkpoint"),
        (["ckpt_path=null"], "ckpt_path=None is no checkpoint"),
        (["ckpt_path=a", "trainer=cpu"], "trainer=cpu names no option here: write trainer.accelerator=cpu"),
    ],
)
def test_what_is_typed_wrongly_is_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as told:
        main(arguments)
    assert "\n" not in str(told.value)


def test_a_batch_of_no_samples_is_refused(tmp_path: Path) -> None:
    """It is not taken for one that was left out, which is the run's."""
    (tmp_path / "checkpoints").mkdir()
    for name in ("checkpoints/last.ckpt", "config.yaml", "plan.json"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="batch=0 must be at least 1"):
        main([f"ckpt_path={tmp_path}", "batch=0"])
    with pytest.raises(UserError, match="or it ran with accumulate=off: give batch=…"):
        main([f"ckpt_path={tmp_path}"])


@pytest.mark.slow
def test_the_command_measures_a_run(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress, a table and the verdict; a rate that the run's schedule has brought to 0 is refused.

    Ctrl-C says that branches are kept; it does not end in silence. Branches have the run's callback.
    """
    main(["--help"])
    assert "scale_lr: sqrt" in capsys.readouterr().out
    small = ("model=mlp", "model.hidden=[8]", "trainer.max_epochs=1", "trainer.accelerator=cpu", "test=false")
    folder = command(*small, "accumulate.memory_budget=8GiB", "accumulate.normalize=null").folder
    callbacks: list[str] = []

    def interrupted(branches: _Branches, size: int, *_: Any) -> float:
        """Ctrl-C in a fit, as Lightning passes it on."""
        callbacks.append(repr(branches.make_callback(size)))
        raise SystemExit(1) from KeyboardInterrupt()

    measured = [f"ckpt_path={folder}", "samples=256", "seeds=2"]
    with pytest.raises(UserError, match="The checkpoint's learning rate has fallen to 0"):
        main(measured)
    with (
        monkeypatch.context() as patch,
        pytest.raises(Interrupted, match=r"Ctrl-C: finished branches are kept"),
    ):
        patch.setattr(_Branches, "loss", interrupted)
        main([*measured, "lr=0.001"])
    (callback,) = callbacks  # the run's own, but for its batch
    assert "effective_batch_size=16, memory_budget='8GiB', normalize=None, whole=[], verify=False)" in callback
    main([*measured, "lr=0.001"])
    done = capsys.readouterr().out
    assert "8 of 8: batch 128, seed 1, 256 samples: val/loss" in done
    assert "standard error" in done
    assert "of the lowest loss" in done
