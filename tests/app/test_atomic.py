"""A checkpoint under its own name is whole, whatever happens to who writes it."""

import io
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from command_lines import TINY
from forks import forked
from lightning.fabric.plugins import CheckpointIO
from lightning_fabric.plugins import CheckpointIO as LegacyCheckpointIO

from lightning_ga import AtomicCheckpointIO


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


def killed_in_write(number: int, *arguments: str) -> None:
    """A run of the command line in this folder that is killed while it writes its so-manieth checkpoint."""
    run = forked(cut_off, number, *arguments, folder=Path.cwd())
    assert run.code == -signal.SIGKILL, run.output[-2000:]


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
    line = (*TINY, "trainer.max_epochs=3", "callbacks=last", "test=false")
    killed_in_write(2, *line, "hydra.run.dir=outputs/killed")
    folder = Path("outputs/killed/checkpoints")
    assert {file.name for file in folder.iterdir()} == {"last.ckpt", "last.ckpt.part"}
    assert torch.load(folder / "last.ckpt", weights_only=True)["epoch"] == 0
    assert 0 < (folder / "last.ckpt.part").stat().st_size < (folder / "last.ckpt").stat().st_size
    resumed = command(*line, "ckpt_path=last", folder="killed")
    assert resumed.code == 0, resumed.err
    assert {file.name for file in folder.iterdir()} == {"last.ckpt"}
    assert torch.load(folder / "last.ckpt", weights_only=True)["epoch"] == 2


def test_a_run_killed_in_its_first_write_has_left_none(command: Any) -> None:
    killed_in_write(1, *TINY, "callbacks=last", "hydra.run.dir=outputs/killed")
    resumed = command(*TINY, "ckpt_path=last")
    assert resumed.code == 1
    assert "ckpt_path=last: no run of this model below 'outputs' or 'multirun' has left one" in resumed.err


def test_what_fails_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, an object that cannot be pickled, Ctrl-C: the file is the one before."""
    path = tmp_path / "new" / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def fail(checkpoint: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert [file.name for file in path.parent.iterdir()] == ["a.ckpt"]
    assert AtomicCheckpointIO().load_checkpoint(path) == {"step": 1}


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    saver = AtomicCheckpointIO()
    saver.save_checkpoint({"step": 1}, tmp_path / "epoch=0.ckpt")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "epoch=0.ckpt")
    saver.save_checkpoint({"step": 2}, str(tmp_path / "last.ckpt"))
    assert saver.load_checkpoint(tmp_path / "epoch=0.ckpt") == {"step": 1}
    assert saver.load_checkpoint(tmp_path / "last.ckpt") == {"step": 2}


@pytest.mark.parametrize("trainers", [pl, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
def test_trainers_of_both_namespaces_take_it(trainers: Any, tmp_path: Path) -> None:
    """As a plugin, also of a distributed strategy."""
    saver = AtomicCheckpointIO()
    assert isinstance(saver, CheckpointIO)
    assert isinstance(saver, LegacyCheckpointIO)
    for strategy in ("auto", "ddp"):
        trainer = trainers.Trainer(
            plugins=[saver], strategy=strategy, devices=1, accelerator="cpu", logger=False, default_root_dir=tmp_path
        )
        assert trainer.strategy.checkpoint_io is saver


def test_the_command_line_uses_it_unless_a_plugin_of_the_users_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever trainer group is chosen."""
    from hydra import compose, initialize_config_dir

    from lightning_ga.app import build
    from lightning_ga.train import config_folder

    monkeypatch.setattr(build, "check_launcher", lambda trainer: None)
    own = "+trainer.plugins=[{_target_: lightning.pytorch.plugins.io.AsyncCheckpointIO}]"
    for plugins, atomic in (([], True), ([own], False)):
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            config = compose("train", [*TINY, "callbacks=none", "logger=none", "paths.output_dir=run", *plugins])
        trainer = build.build_trainer(config, Path("run"))
        assert isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO) is atomic


def test_a_path_may_be_an_address(tmp_path: Path) -> None:
    """Of this machine, or remote: object stores have no rename, and show nothing before a write is complete."""
    saver = AtomicCheckpointIO()
    for address in (f"file://{tmp_path}/a.ckpt", "memory://atomic/a.ckpt"):
        saver.save_checkpoint({"step": 1}, address)
        assert saver.load_checkpoint(address) == {"step": 1}
