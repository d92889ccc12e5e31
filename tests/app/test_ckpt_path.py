"""Which file ``ckpt_path=`` means."""

import os

import pytest
import torch

from lightning_ga import UserError
from lightning_ga.app.ckpt_path import find_checkpoint

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


def test_jobs_of_a_sweep_do_not_go_on_from_each_other(tmp_path):
    """All begin with the same run, however late they start; a job that is started again has its own checkpoint."""
    before = leave_run(tmp_path, "runs/before", 30)
    sweep = tmp_path / "sweeps" / "new"
    first = leave_run(sweep, "lr=1/seed=0", 10)
    (sweep / "multirun.yaml").touch()
    assert find_checkpoint("last", WEIGHTS, [tmp_path], own=sweep / "lr=1" / "seed=1") == before
    assert find_checkpoint("last", WEIGHTS, [tmp_path], own=sweep / "lr=1" / "seed=0") == first
    assert find_checkpoint("last", WEIGHTS, [tmp_path], own=tmp_path / "runs" / "after") == first


def test_the_best_of_several_is_told_by_the_newest(tmp_path):
    """If no callback has left a last one."""
    older = leave_run(tmp_path, "run", 20)
    best = older.rename(older.with_name("best-0-4.ckpt"))
    newest = leave_run(tmp_path, "newest", 10, callbacks={"Best": {"monitor": "x", "best_model_path": str(best)}})
    newest.rename(best.with_name("best-1-8.ckpt"))
    for wanted in (str(tmp_path / "run"), "best"):
        assert find_checkpoint(wanted, WEIGHTS, [tmp_path], kind="best") == best


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
