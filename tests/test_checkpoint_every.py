"""Checkpoints every few windows, written while training goes on."""

import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ga import AutoAccumulate, UserError, checkpoint_every
from lightning_ga.checkpoint_every import BackgroundWriter, CheckpointEvery
from lightning_ga.checkpoints import newest_checkpoint, write_whole


class Net(pl.LightningModule):
    """A line that notes its weight after each optimizer step, and counts samples in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1).double()
        self.register_buffer("seen", torch.zeros(()))
        self.weights: dict[int, float] = {0: self.line.weight.item()}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += len(batch[0])
        return self.line(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        self.weights[self.global_step] = self.line.weight.item()


def trainer_of(*callbacks: Any, epochs: int = 1) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


def loader_of(samples: int = 40) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.linspace(0, 1, samples).double()[:, None]), batch_size=8, shuffle=True)


def fit(
    *callbacks: Any,
    samples: int = 40,
    ckpt_path: Path | None = None,
    epochs: int = 1,
    module: type[Net] = Net,
    **settings: Any,
) -> Net:
    """Train in windows of 8 samples, each two micro-batches."""
    torch.manual_seed(0)
    net = module()
    accumulate = AutoAccumulate(**{"effective_batch_size": 8, "micro_batch_size": 4, "verify": False, **settings})
    trainer_of(accumulate, *callbacks, epochs=epochs).fit(net, loader_of(samples), ckpt_path=ckpt_path)
    return net


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("every", [0, -1, "3h", "s", 1.5, None])
def test_an_interval_is_windows_or_a_time(every):
    with pytest.raises(UserError, match="is neither a number of windows nor a time"):
        CheckpointEvery(".", every)


def test_checkpoints_are_written_to_a_folder(tmp_path, monkeypatch):
    """It may be below the home of the user; of a bucket is said that it is none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    fit(CheckpointEvery("~/run", 2))
    assert newest_checkpoint("~/run") == tmp_path / "run" / "step-4.ckpt"
    with pytest.raises(UserError, match="dirpath='s3://bucket/run' must be a folder that all hosts mount: copy"):
        CheckpointEvery("s3://bucket/run")


def test_the_last_two_checkpoints_are_kept_and_continue_the_run(tmp_path, micro_batching):
    """Each is the state at the end of a window: weights and buffers of the same moment."""
    whole = fit(CheckpointEvery(tmp_path, 2), epochs=2, micro_batching=micro_batching)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-10.ckpt", "step-8.ckpt"]
    for step in (8, 10):
        saved = torch.load(tmp_path / f"step-{step}.ckpt", weights_only=True)["state_dict"]
        assert float(saved["line.weight"]) == whole.weights[step]
        assert float(saved["seen"]) == 8 * step
    (tmp_path / "step-10.ckpt").unlink()
    newest = newest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-8.ckpt"
    resumed = fit(CheckpointEvery(tmp_path, 2), epochs=2, ckpt_path=newest, micro_batching=micro_batching)
    assert resumed.weights[10] == pytest.approx(whole.weights[10], rel=1e-14)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_time_is_measured_from_checkpoint_to_checkpoint(tmp_path, monkeypatch):
    """Here each window takes 40 seconds."""
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr("lightning_ga.checkpoint_every.time.monotonic", lambda: next(clock))
    fit(CheckpointEvery(tmp_path, "1min"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2.ckpt", "step-4.ckpt"]


class Replay:
    """An object of a user's own in the checkpoint."""

    def __init__(self) -> None:
        self.rows = torch.zeros(3)
        self.first = self.rows[:1]
        self.recent = deque([[0]], maxlen=1)


class Replaying(Net):
    def __init__(self) -> None:
        super().__init__()
        self.replay = Replay()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.replay.rows += len(batch[0])
        self.replay.recent[0][0] += len(batch[0])
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["replay"] = self.replay


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(tmp_path, monkeypatch):
    """The writer waits until the last window is done; what it then writes is the state of the first.

    That of objects, too, and their tensors share memory as before.
    """
    begun = threading.Event()

    def slow(place: Path, write: Callable[[Any], object]) -> None:
        assert begun.wait(60)
        write_whole(place, write)

    monkeypatch.setattr(checkpoint_every, "write_whole", slow)

    class Last(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                begun.set()

    net = fit(CheckpointEvery(tmp_path, 3), Last(), module=Replaying)
    saved = torch.load(tmp_path / "step-3.ckpt", weights_only=False)
    assert saved["replay"].rows.tolist() == [24, 24, 24]
    assert saved["replay"].first.data_ptr() == saved["replay"].rows.data_ptr()
    assert list(saved["replay"].recent) == [[24]]
    assert float(saved["state_dict"]["line.weight"]) == net.weights[3] != net.weights[5]
    assert float(saved["state_dict"]["seen"]) == 24
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 6
    assert not [*tmp_path.glob("*.part")]


def test_a_disk_that_is_full_ends_the_run_and_removes_nothing(tmp_path, monkeypatch):
    """The error of the thread comes with the next checkpoint, at the latest as training ends."""
    first = tmp_path / "step-1.ckpt"

    def full(place: Path, write: Callable[[Any], object]) -> None:
        if place == first:
            return write_whole(place, write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_every, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        fit(CheckpointEvery(tmp_path, 1))
    assert newest_checkpoint(tmp_path) == first


def test_another_dataset_or_batch_is_refused_with_both_numbers(tmp_path):
    fit(CheckpointEvery(tmp_path, 4))
    newest = newest_checkpoint(tmp_path)
    with pytest.raises(UserError, match="of a training with 40 samples, and this one has 48"):
        fit(CheckpointEvery(tmp_path, 4), samples=48, epochs=2, ckpt_path=newest)
    with pytest.raises(UserError, match="with 8 samples per optimizer step, and this one has 16"):
        fit(CheckpointEvery(tmp_path, 4), epochs=2, ckpt_path=newest, effective_batch_size=16)
    fit(CheckpointEvery(tmp_path, 4), epochs=2, ckpt_path=newest, effective_batch_size={0: 8, 1: 16})


def test_what_a_killed_process_has_half_written_is_removed_by_the_next_checkpoint(tmp_path):
    """Files of others stay."""
    others = [tmp_path / name for name in ("last.ckpt", "last.ckpt.part", "step-a.ckpt")]
    for path in (tmp_path / "step-3.ckpt.part", *others):
        path.touch()
    (tmp_path / "step-1.ckpt").mkdir()
    fit(CheckpointEvery(tmp_path, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["step-2.ckpt", "step-4.ckpt", *(p.name for p in others)]
    )


def test_other_processes_get_no_thread(tmp_path):
    """A copy has a thread of its own, and writes whole checkpoints."""
    writer = pickle.loads(pickle.dumps(BackgroundWriter()))
    writer.save_checkpoint({"weight": torch.ones(2)}, tmp_path / "step-1.ckpt.part")
    writer.wait()
    assert torch.load(tmp_path / "step-1.ckpt")["weight"].equal(torch.ones(2))


@dataclass(frozen=True)
class Width:
    value: int = 3


class Configured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": Width(), "rate": 0.1})


def test_a_frozen_hyperparameter_is_left_out(tmp_path):
    """As by other checkpoints, and said once."""
    with pytest.warns(UserWarning, match="hyperparameters width,"):
        fit(CheckpointEvery(tmp_path, 2), module=Configured)
    assert torch.load(tmp_path / "step-4.ckpt", weights_only=True)["hyper_parameters"] == {"rate": 0.1}


def test_a_training_that_goes_back_keeps_what_it_writes(tmp_path):
    """Checkpoints of later steps are put aside, so that the newest is of this training."""
    fit(CheckpointEvery(tmp_path, 2), epochs=3)
    assert names(tmp_path) == ["step-12.ckpt", "step-14.ckpt"]
    fit(CheckpointEvery(tmp_path, 2))
    assert names(tmp_path) == ["step-12.ckpt.ahead", "step-14.ckpt.ahead", "step-2.ckpt", "step-4.ckpt"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-4.ckpt"


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_sigterm_in_the_last_window_of_an_epoch_loses_nothing(tmp_path, mode):
    """The run ends there, with the state of the window, and continues."""

    class Notice(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(pl.utilities.exceptions.SIGTERMException):
        fit(Notice(), CheckpointEvery(tmp_path, 1000), epochs=2, micro_batching=mode)
    assert names(tmp_path) == ["step-5.ckpt"]
    saved = torch.load(tmp_path / "step-5.ckpt", weights_only=True)["state_dict"]
    assert float(saved["line.weight"]) == fit(micro_batching=mode).weights[5]
    resumed = fit(CheckpointEvery(tmp_path), epochs=2, ckpt_path=tmp_path / "step-5.ckpt", micro_batching=mode)
    assert resumed.global_step == 10


class Counter(pl.Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}


def test_callbacks_after_it_are_saved_as_they_are_after_the_window(tmp_path):
    """Wherever it stands in the list."""
    trainer_of(CheckpointEvery(tmp_path, 2), Counter()).fit(Net(), loader_of())
    saved = torch.load(tmp_path / "step-4.ckpt", weights_only=True)["callbacks"]
    assert saved["Counter"] == {"batches": 4}


class Alternating(Net):
    """Two optimizers that step in each batch, but for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers()[: 1 if batch_idx == 0 else 2]:
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


def test_steps_that_pass_over_multiples_are_saved_after_them(tmp_path):
    """Batches end at the steps 1, 3, 5, 7 and 9."""
    trainer_of(CheckpointEvery(tmp_path, 4)).fit(Alternating(), loader_of())
    assert names(tmp_path) == ["step-5.ckpt", "step-9.ckpt"]


class Endless(IterableDataset[Any]):
    """A stream that says of its length that there is none."""

    def __iter__(self) -> Any:
        return iter(torch.ones(16, 1, 1).double())

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_stream_may_have_no_length(tmp_path):
    trainer_of(CheckpointEvery(tmp_path, 2)).fit(Net(), DataLoader(Endless(), batch_size=4))
    assert names(tmp_path) == ["step-2.ckpt", "step-4.ckpt"]


def test_a_second_fit_from_the_start_may_have_other_data(tmp_path):
    """What the first one resumed from is forgotten."""
    fit(CheckpointEvery(tmp_path, 2))
    callback = CheckpointEvery(tmp_path, 2)
    fit(callback, epochs=2, ckpt_path=newest_checkpoint(tmp_path))
    net = fit(callback, samples=48)
    assert net.trainer.global_step == 48 // 8
