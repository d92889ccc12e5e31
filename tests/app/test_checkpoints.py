"""A checkpoint under its own name is whole, whatever happens to who writes it, and one is found and read as data."""

import io
import os
import pickle
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from command_lines import TINY
from forks import forked

from lightning_ga import AtomicCheckpointIO, UserError
from lightning_ga.app.checkpoints import find_checkpoint, loads, read_safely


def cut_off(number: int, *arguments: str) -> None:
    """Run the command line, and be killed in the middle of the write of the so-manieth checkpoint."""
    from lightning_ga.train import main

    save, writes = torch.save, iter(range(1, number + 1))

    def cut(checkpoint: Any, file: Any, *more: Any, **settings: Any) -> None:
        if next(writes) < number:
            return save(checkpoint, file, *more, **settings)
        whole = io.BytesIO()
        save(checkpoint, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        return os.kill(os.getpid(), signal.SIGKILL)

    torch.save = cut
    main([*arguments])


def test_a_checkpoint_reaches_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """A loss of power leaves the old one or the new one, never a torn one."""
    place, events, synced, replaced = tmp_path / "last.ckpt", [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced(descriptor), events.append("flushed")))
    monkeypatch.setattr(Path, "replace", lambda part, target: (events.append("named"), replaced(part, target)))
    AtomicCheckpointIO().save_checkpoint({"x": 1}, place)
    assert events == ["flushed", "named"]
    assert place.is_file()


def test_a_run_killed_while_it_writes_leaves_the_checkpoint_before(command: Any) -> None:
    """It loads, the half-written one beside it is passed over, and the next write replaces that one."""
    line = (*TINY, "trainer.max_epochs=2", "callbacks=last", "test=false")
    killed = forked(cut_off, 2, *line, "hydra.run.dir=outputs/killed", folder=Path.cwd())
    assert killed.code == -signal.SIGKILL, killed.output[-2000:]
    folder = Path("outputs/killed/checkpoints")
    assert {file.name for file in folder.iterdir()} == {"last.ckpt", "last.ckpt.part"}
    assert torch.load(folder / "last.ckpt", weights_only=True)["epoch"] == 0
    assert 0 < (folder / "last.ckpt.part").stat().st_size < (folder / "last.ckpt").stat().st_size
    resumed = command(*line, "ckpt_path=last", folder="killed")
    assert resumed.code == 0, resumed.err
    assert {file.name for file in folder.iterdir()} == {"last.ckpt"}
    assert torch.load(folder / "last.ckpt", weights_only=True)["epoch"] == 1


@pytest.mark.parametrize("trainers", [pl, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
def test_trainers_of_both_namespaces_take_it(trainers: Any, tmp_path: Path) -> None:
    """As a plugin, also of a distributed strategy."""
    saver = AtomicCheckpointIO()
    for strategy in ("auto", "ddp"):
        trainer = trainers.Trainer(
            plugins=[saver], strategy=strategy, devices=1, accelerator="cpu", logger=False, default_root_dir=tmp_path
        )
        assert trainer.strategy.checkpoint_io is saver


def test_a_path_may_be_an_address(tmp_path: Path) -> None:
    """Of this machine, or remote: object stores have no rename, and show nothing before a write is complete."""
    saver = AtomicCheckpointIO()
    for address in (f"file://{tmp_path}/a.ckpt", "memory://atomic/a.ckpt"):
        saver.save_checkpoint({"step": 1}, address)
        assert saver.load_checkpoint(address) == {"step": 1}


WEIGHTS = {"weight": torch.ones(3, 2)}


def leave_run(root, name, age, **content):
    """What a run leaves: a checkpoint of some age in seconds."""
    path = root / name / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": WEIGHTS, **content}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_last_is_the_latest_with_the_same_weights(tmp_path):
    """That of this run's folder before all others; torn ones and those of other models are passed over."""
    old = leave_run(tmp_path, "old", 30)
    same = leave_run(tmp_path, "same", 20)
    leave_run(tmp_path, "other", 10, state_dict={"weight": torch.ones(2, 2)})
    torn = leave_run(tmp_path, "torn", 5)
    torn.write_bytes(torn.read_bytes()[:-100])
    assert find_checkpoint("last", WEIGHTS, [tmp_path, tmp_path / "missing"]) == same
    assert find_checkpoint("last", WEIGHTS, [tmp_path], own=tmp_path / "old") == old
    with pytest.raises(UserError, match="has left one"):
        find_checkpoint("best", WEIGHTS, [tmp_path])


class Harmful:
    def __reduce__(self):
        return (os.getcwd, ())


def test_a_file_that_would_run_code_is_refused(tmp_path):
    """Nothing is built from a checkpoint, and nobody is advised to build from it."""
    path = tmp_path / "a.ckpt"
    torch.save({"x": Harmful()}, path)
    with pytest.raises(UserError, match=r"no file of tensors and plain values \(it contains posix.getcwd") as told:
        read_safely(path)
    assert "weights_only" not in str(told.value)
    for content in (pickle.dumps(Harmful(), protocol=2), b"no checkpoint", b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match="no file of tensors and plain values"):
            read_safely(path)


def test_hyperparameters_that_do_not_load_are_left_out(tmp_path):
    """Each is named once, with what it means, but for partials and classes; what the caller has stays as it is."""
    saver, path = AtomicCheckpointIO(), tmp_path / "a.ckpt"
    given = {"lr": 0.1, "sizes": [1, 2], "optimizer": partial(torch.optim.SGD, lr=1), "net": torch.nn.Linear(1, 1)}
    given["scheduler"] = torch.optim.lr_scheduler.StepLR
    checkpoint = {"hyper_parameters": given, "datamodule_hyper_parameters": {"path": tmp_path}}
    with pytest.warns(UserWarning, match=r"hyperparameters net, path, .*, net=…, path=…\)"):
        saver.save_checkpoint(checkpoint, path)
    saver.save_checkpoint(checkpoint, path)  # a second warning would be an error
    saved = torch.load(path, weights_only=True)
    assert saved == {"hyper_parameters": {"lr": 0.1, "sizes": [1, 2]}, "datamodule_hyper_parameters": {}}
    assert len(given) == 5
    assert not loads(lambda: 1)


def test_a_folder_means_the_checkpoint_of_its_run(tmp_path):
    """The last state to go on with, the best one to test."""
    path = leave_run(tmp_path, "run", 10)
    best = path.with_name("best.ckpt")
    best.write_bytes(path.read_bytes())
    assert find_checkpoint(str(tmp_path / "run"), {}, []) == path
    assert find_checkpoint(str(tmp_path / "run"), {}, [], kind="best") == best
    best.unlink()
    assert find_checkpoint(str(path.parent), {}, [], kind="best") == path
    other = path.with_name("epoch_7.ckpt")  # as a callback of the user's own names it
    best_model = {"monitor": "val/x", "best_model_path": f"elsewhere/{other.name}"}
    torch.save({"callbacks": {"Other": {}, "ModelCheckpoint": best_model}}, path)
    other.write_bytes(path.read_bytes())
    for wanted in (str(tmp_path / "run"), "best"):
        assert find_checkpoint(wanted, {}, [], kind="best", own=tmp_path / "run") == other
    with pytest.raises(UserError, match="neither a file nor a folder"):
        find_checkpoint(str(tmp_path), {}, [])
