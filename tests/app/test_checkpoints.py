import os
import pickle

import pytest
import torch
from omegaconf import OmegaConf

from lightning_ga import UserError
from lightning_ga.app.checkpoints import (
    differences,
    find_checkpoint,
    read_safely,
    require_checkpoint,
    require_same_model,
    require_same_optimizer,
)

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
    """Nothing is built from a checkpoint, and nobody is advised to build from it."""
    path = tmp_path / "a.ckpt"
    torch.save({"x": Harmful()}, path)
    with pytest.raises(
        UserError, match=r"not a checkpoint of tensors and plain values \(it holds posix.getcwd"
    ) as told:
        read_safely(path)
    assert "weights_only" not in str(told.value)
    for content in (pickle.dumps(Harmful(), protocol=2), b"no checkpoint", b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a checkpoint of tensors and plain values") as told:
            read_safely(path)
        assert "weights_only" not in str(told.value)


def test_bare_weights_are_no_checkpoint(tmp_path):
    """The message names the key that takes them."""
    path = tmp_path / "weights.pt"
    torch.save(torch.nn.Linear(2, 3).state_dict(), path)
    with pytest.raises(UserError, match=r"holds weights alone.*model.init_from="):
        require_checkpoint(path, read_safely(path))
    torch.save({"a": 1}, path)
    with pytest.raises(UserError, match="no checkpoint of a run"):
        require_checkpoint(path, read_safely(path))


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path):
    """What is missing, unknown or of another shape is counted."""
    path, one, other = tmp_path / "a.ckpt", torch.nn.Linear(2, 3), torch.nn.Linear(2, 4, bias=False)
    require_same_model(path, one.state_dict(), one.state_dict())
    with pytest.raises(UserError, match=r"another model: 1 weights are unknown \(such as bias\), 1 .* another shape"):
        require_same_model(path, one.state_dict(), other.state_dict())
    sgd, adam = torch.optim.SGD(one.parameters(), 0.1), torch.optim.Adam(one.parameters())
    content = {"optimizer_states": [sgd.state_dict()]}
    require_same_optimizer(path, content, sgd)
    with pytest.raises(UserError, match=r"another optimizer than Adam \(it has no amsgrad, betas,"):
        require_same_optimizer(path, content, adam)


def test_a_folder_means_the_checkpoint_of_its_run(tmp_path):
    """The last state to go on with, the best one to test."""
    path = leave_run(tmp_path, "run", MLP, 10)
    best = path.with_name("best.ckpt")
    best.write_bytes(path.read_bytes())
    assert find_checkpoint(str(tmp_path / "run"), MLP, []) == path
    assert find_checkpoint(str(tmp_path / "run"), MLP, [], kind="best") == best
    best.unlink()
    assert find_checkpoint(str(path.parent), MLP, [], kind="best") == path
    with pytest.raises(UserError, match="folder without checkpoints"):
        find_checkpoint(str(tmp_path), MLP, [])


def test_what_differs_from_the_run_of_a_checkpoint_is_told(tmp_path):
    """Data, model and recipe; a test does not care for the optimizer, and folders change no result."""
    path = leave_run(tmp_path, "run", MLP, 10)
    config = {"model": MLP, "data": {"batch_size": 32, "root": "a"}, "optimizer": {"lr": 0.1}}
    OmegaConf.save(OmegaConf.create(config), tmp_path / "run" / "config.yaml")
    now = {"model": MLP, "data": {"batch_size": 64, "root": "b"}, "optimizer": {"lr": 0.2}}
    assert differences(path, config | {"data": {"batch_size": 32, "root": "b"}}, fit=True) is None
    told = differences(path, now, fit=True)
    assert told.endswith("data.batch_size (32 then, 64 now), optimizer.lr (0.1 then, 0.2 now).")
    assert "optimizer" not in differences(path, now, fit=False)


def test_a_checkpoint_in_the_older_format_is_read(tmp_path):
    """It is no archive, so it does not lack the end of one."""
    path = leave_run(tmp_path, "older", MLP, 10)
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert read_safely(path) == {"state_dict": {}}


def test_a_torn_checkpoint_is_never_taken(tmp_path):
    """The message says which, and why."""
    torn = leave_run(tmp_path, "torn", MLP, 10)
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"torn/checkpoints/last.ckpt' is not a checkpoint .*its end is missing"):
        read_safely(find_checkpoint("last", MLP, [tmp_path]))


def test_a_checkpoint_that_was_being_written_is_none(tmp_path):
    """A run that was killed in its first write has left its beginning only."""
    path = leave_run(tmp_path, "killed", MLP, 10)
    path.rename(path.with_name("last.ckpt.part"))
    with pytest.raises(UserError, match="no run of this model"):
        find_checkpoint("last", MLP, [tmp_path])
