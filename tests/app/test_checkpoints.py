import os
import pickle

import pytest
import torch
from omegaconf import OmegaConf

from lightning_ga import UserError
from lightning_ga.app.checkpoints import find_checkpoint

MLP = {"_target_": "lightning_ga.models.MLPClassifier", "hidden": [8], "optimizer": {"lr": 0.1}}


def leave_run(root, name, model, age):
    """What a run leaves: a configuration and a checkpoint of some age in seconds."""
    path = root / name / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": {}}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    OmegaConf.save(OmegaConf.create({"model": model}), root / name / "config.yaml")
    return path


def test_last_is_the_latest_run_of_the_same_model(tmp_path):
    """A newer run of another model is passed over; another optimizer is the same model."""
    leave_run(tmp_path, "old", MLP, 30)
    same = leave_run(tmp_path, "same", MLP | {"optimizer": {"lr": 0.5}}, 20)
    leave_run(tmp_path, "other", MLP | {"hidden": [9]}, 10)
    assert find_checkpoint("last", MLP, [tmp_path, tmp_path / "missing"]) == same


def test_no_run_of_the_model(tmp_path):
    """The message says where it was looked for."""
    with pytest.raises(UserError, match="no run of this model"):
        find_checkpoint("best", MLP, [tmp_path])


class Harmful:
    def __reduce__(self):
        return (os.getcwd, ())


def test_a_file_that_would_run_code_is_refused(tmp_path):
    """Nothing is built from a checkpoint."""
    path = tmp_path / "a.ckpt"
    torch.save({"x": Harmful()}, path)
    with pytest.raises(UserError, match="not a checkpoint of tensors and plain values"):
        find_checkpoint(str(path), MLP, [])
    path.write_bytes(pickle.dumps(Harmful(), protocol=2))
    with pytest.raises(UserError):
        find_checkpoint(str(path), MLP, [])
    path.write_bytes(b"no checkpoint")
    with pytest.raises(UserError, match="not a checkpoint of tensors and plain values"):
        find_checkpoint(str(path), MLP, [])


def test_a_checkpoint_in_the_older_format_is_whole(tmp_path):
    """It is no archive, so it does not lack the end of one."""
    path = leave_run(tmp_path, "older", MLP, 10)
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert find_checkpoint(str(path), MLP, []) == path


def test_a_torn_checkpoint_is_never_taken_and_nothing_in_its_place(tmp_path):
    """The message says which, and names one that is whole."""
    older = leave_run(tmp_path, "older", MLP, 30)
    torn = leave_run(tmp_path, "torn", MLP, 10)
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(
        UserError, match=r"torn/checkpoints/last.ckpt' is a torn checkpoint: its end is missing"
    ) as told:
        find_checkpoint("last", MLP, [tmp_path])
    assert str(told.value).endswith(f"give the path of another one, such as {str(older)!r}.")
    with pytest.raises(UserError, match="give the path of another one.$"):
        find_checkpoint(str(torn), MLP, [])


def test_a_checkpoint_that_was_being_written_is_none(tmp_path):
    """A run that was killed in its first write has left its beginning only."""
    path = leave_run(tmp_path, "killed", MLP, 10)
    path.rename(path.with_name("last.ckpt.part"))
    with pytest.raises(UserError, match=r"last.ckpt.part' was being written when its run was killed"):
        find_checkpoint("last", MLP, [tmp_path])
