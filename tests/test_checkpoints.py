"""A checkpoint under its own name is whole, whatever happens to who writes it, and one is found and read as data."""

import io
import os
import pickle
import signal
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from command_lines import TINY
from forks import forked
from omegaconf import OmegaConf
from torch import nn

from lightning_ga import AtomicCheckpointIO, UserError
from lightning_ga.batch.pytree import same_values
from lightning_ga.checkpoints import loads, newest_checkpoint, read_safely


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
    plain = {"lr": 0.1, "sizes": [1, {"deep": (torch.ones(2), None)}], "dtype": torch.half, "shape": torch.Size([3])}
    given = {**plain, "optimizer": partial(torch.optim.SGD, lr=1), "net": torch.nn.Linear(1, 1)}
    given["scheduler"] = torch.optim.lr_scheduler.StepLR
    checkpoint = {"hyper_parameters": given, "datamodule_hyper_parameters": {"path": tmp_path}}
    with pytest.warns(UserWarning, match=r"hyperparameters net, path, .*, net=…, path=…\)"):
        saver.save_checkpoint(checkpoint, path)
    saver.save_checkpoint(checkpoint, path)  # a second warning would be an error
    saved = torch.load(path, weights_only=True)
    assert saved.keys() == {"hyper_parameters", "datamodule_hyper_parameters"}
    assert same_values(saved["hyper_parameters"], plain)
    assert saved["datamodule_hyper_parameters"] == {}
    assert given.keys() == {*plain, "optimizer", "net", "scheduler"}


class Configured(pl.LightningModule):
    """Reads its configuration by attributes."""

    def __init__(self, configuration: Any) -> None:
        super().__init__()
        self.save_hyperparameters(configuration)
        self.line = nn.Linear(1, configuration.width)


def test_a_configuration_of_omegaconf_loads(tmp_path):
    """With attributes, as Lightning gives it to the module."""
    saver, path = AtomicCheckpointIO(), tmp_path / "a.ckpt"
    module = Configured(OmegaConf.create({"width": 3}))
    trainer = pl.Trainer(accelerator="cpu", logger=False, plugins=[saver], enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["hyper_parameters"] == {"width": 3}
    assert Configured.load_from_checkpoint(path).hparams.width == 3


@pytest.mark.parametrize(
    "value", [b"x", 1j, {1, 2}, OrderedDict(a=[1]), torch.device("cpu"), nn.Parameter(torch.ones(1))]
)
def test_what_is_kept_loads(value: Any, tmp_path: Path) -> None:
    assert loads(value)
    torch.save(value, tmp_path / "a.pt")
    assert same_values(torch.load(tmp_path / "a.pt", weights_only=True), value)


@pytest.mark.parametrize("value", [lambda: 1, Path("a"), [{"deep": Harmful()}], ({1: range(3)},)])
def test_what_would_not_load_is_not_kept(value: Any) -> None:
    assert not loads(value)


def leave(path, steps, **content):
    """A checkpoint of a training; later ones are older, as after a copy of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"global_step": steps, "loops": {}, "lr_schedulers": [], "optimizer_states": []}
    torch.save({**state, **content}, path)
    os.utime(path, (1e9 - steps, 1e9 - steps))
    return path


def test_the_newest_is_the_whole_one_of_the_most_steps(tmp_path):
    """Torn files, weights alone, and those that are being written do not count; where the folder is does not matter."""
    assert newest_checkpoint(tmp_path / "missing") is None
    assert newest_checkpoint(tmp_path) is None
    leave(tmp_path / "checkpoints" / "step-10.ckpt", 10)
    whole = leave(tmp_path / "hpc_ckpt_1.ckpt", 20)
    torn = leave(tmp_path / "checkpoints" / "step-30.ckpt", 30)
    torn.write_bytes(torn.read_bytes()[:-10])
    leave(tmp_path / "checkpoints" / "step-40.ckpt.part", 40)
    torch.save({"global_step": 50, "loops": {}, "state_dict": {}}, tmp_path / "weights.ckpt")
    assert newest_checkpoint(tmp_path) == whole
    for path in (whole, tmp_path / "checkpoints" / "step-10.ckpt"):
        path.unlink()
    with pytest.raises(UserError, match=r"No checkpoint in .* \(step-30.ckpt, weights.ckpt\) is the whole state"):
        newest_checkpoint(tmp_path)


def test_a_sharded_checkpoint_is_whole_once_its_record_is_the_newest(tmp_path):
    """A process that dies while it overwrites one leaves shards that are newer."""
    shard = tmp_path / "last.ckpt" / "__0_0.distcp"
    record = leave(tmp_path / "last.ckpt" / "meta.pt", 7)  # Lightning's has no optimizer_states
    shard.touch()
    with pytest.raises(UserError, match="last.ckpt"):
        newest_checkpoint(tmp_path)
    os.utime(record)
    os.utime(shard, (1e9, 1e9))
    assert newest_checkpoint(tmp_path) == tmp_path / "last.ckpt"
    record.unlink()
    with pytest.raises(UserError, match="last.ckpt"):
        newest_checkpoint(tmp_path)


def test_a_whole_file_that_reading_would_run_counts_last(tmp_path):
    """Scripts of one's own may keep anything among the hyperparameters; only the script's Trainer loads that."""
    own = leave(tmp_path / "own.ckpt", 10, hyper_parameters={"x": Harmful()})
    assert newest_checkpoint(tmp_path) == own
    whole = leave(tmp_path / "a.ckpt", 5)
    assert newest_checkpoint(tmp_path) == whole
    whole.unlink()
    own.write_bytes(own.read_bytes()[:-10])
    with pytest.raises(UserError, match="own.ckpt"):
        newest_checkpoint(tmp_path)


def test_a_file_with_bytes_that_were_lost_does_not_count(tmp_path):
    """A machine that loses its power may leave zeros within a file, whose end is there."""
    weights = torch.arange(10_000.0)
    own = leave(tmp_path / "own.ckpt", 10, hyper_parameters={"x": Harmful()}, state_dict={"weights": weights})
    written = own.read_bytes()
    data = weights.numpy().tobytes()
    assert data in written
    own.write_bytes(written.replace(data, data[:20_000] + bytes(20_000)))
    with pytest.raises(UserError, match="own.ckpt"):
        newest_checkpoint(tmp_path)
