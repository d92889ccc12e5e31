import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lightning_ga import UserError
from lightning_ga.app.checkpoints import (
    differences,
    find_checkpoint,
    load_initial_weights,
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
    leave_run(tmp_path, "old", MLP, 30)
    same = leave_run(tmp_path, "same", MLP | {"optimizer": {"lr": 0.5}}, 20)
    leave_run(tmp_path, "other", MLP | {"hidden": [9]}, 10)
    assert find_checkpoint("last", MLP, [tmp_path, tmp_path / "missing"]) == same


class Harmful:
    def __reduce__(self):
        return (os.getcwd, ())


def test_a_file_that_would_run_code_is_refused(tmp_path):
    """Nothing is built from a checkpoint, and nobody is advised to build from it."""
    path = tmp_path / "a.ckpt"
    torch.save({"x": Harmful()}, path)
    with pytest.raises(UserError, match=r"no file of tensors and plain values \(it holds posix.getcwd") as told:
        read_safely(path)
    assert "weights_only" not in str(told.value)
    for content in (pickle.dumps(Harmful(), protocol=2), b"no checkpoint", b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match="no file of tensors and plain values") as told:
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


def test_other_factors_of_the_batch_are_told(tmp_path):
    """Where they make the effective batch; not where that is asked for, and not before a test."""
    path = leave_run(tmp_path, "run", MLP, 10)

    def told(asked, *, fit=True):
        recipe = {"model": MLP, "accumulate": {"effective_batch_size": asked}}
        then, now = ({**recipe, "trainer": {"devices": devices, "max_epochs": devices}} for devices in (1, 2))
        OmegaConf.save(OmegaConf.create(then), tmp_path / "run" / "config.yaml")
        return differences(path, now, fit=fit)

    assert told(None).endswith("checkpoint: trainer.devices (1 then, 2 now).")
    assert told(64) is told({0: 32, 2: 64}) is told(None, fit=False) is None


def test_a_torn_checkpoint_is_never_taken(tmp_path):
    torn = leave_run(tmp_path, "torn", MLP, 10)
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"torn/checkpoints/last.ckpt' is no file of tensors .*its end is missing"):
        read_safely(find_checkpoint("last", MLP, [tmp_path]))


def test_a_checkpoint_whose_bytes_have_changed_is_refused(tmp_path):
    """torch would load it without a word: zeros in a tensor, a tensor that is another's, compression."""
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"weight": torch.full((4096,), 7.0)}}, path)
    whole = path.read_bytes()
    assert read_safely(path)["state_dict"]["weight"][0] == 7.0
    middle = whole.index(torch.full((64,), 7.0).numpy().tobytes()) + 512
    path.write_bytes(whole[:middle] + bytes(100) + whole[middle + 100 :])
    assert 0.0 in torch.load(path, weights_only=True)["state_dict"]["weight"]
    with pytest.raises(UserError, match=r"its bytes have changed since it was written: .*data/0"):
        read_safely(path)
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(tmp_path / "b.ckpt", "w", zipfile.ZIP_DEFLATED) as after:
        for name in before.namelist():
            after.writestr(name, before.read(name))
    with pytest.raises(UserError, match="it is compressed"):
        read_safely(tmp_path / "b.ckpt")


def test_a_checkpoint_without_checksums_is_read(tmp_path):
    """torch can be told to write none: then nothing says that its bytes have changed."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(100)}, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert read_safely(tmp_path / "a.ckpt")["a"].sum() == 100


PROGRESS = {"fit_loop": {"epoch_progress": {"total": {"ready": 1}, "is_last_batch": True}, "state_dict": {}}}
WHOLE = {
    "epoch": 1,
    "global_step": 4,
    "pytorch-lightning_version": "2.6.6",
    "state_dict": {"weight": torch.zeros(1)},
    "loops": {**PROGRESS, "val_loop": {"combined_loader": [{"place": "any"}]}},
    "callbacks": {"AutoAccumulate": {"position": {}}},
    "optimizer_states": [{"state": {}, "param_groups": [{}]}],
    "lr_schedulers": [],
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pytorch-lightning_version": None}, "pytorch-lightning_version is missing, or is something else"),
        ({"pytorch-lightning_version": 2}, "pytorch-lightning_version"),
        ({"global_step": -5}, "global_step"),
        ({"global_step": True}, "global_step"),
        ({"epoch": "x"}, "epoch"),
        ({"state_dict": "x"}, "state_dict"),
        ({"state_dict": {"weight": 1.0}}, "state_dict"),
        ({"loops": "x"}, "loops"),
        ({"loops": {"fit_loop": {"epoch_progress": {"total": {"ready": "x"}}}}}, "loops"),
        ({"loops": {"fit_loop": {"epoch_progress": {"total": {"ready": -1}}}}}, "loops"),
        ({"loops": {"fit_loop": {"epoch_loop.state_dict": {"_batches_that_stepped": "x"}}}}, "loops"),
        ({"callbacks": []}, "callbacks"),
        ({"callbacks": {"AutoAccumulate": "x"}}, "callbacks"),
        ({"callbacks": {"ModelCheckpoint": {"best_model_path": "/run/checkpoints/../../x"}}}, "callbacks"),
        ({"lr_schedulers": "x"}, "lr_schedulers"),
        ({"optimizer_states": "x"}, "optimizer_states"),
        ({"optimizer_states": ["x"]}, "optimizer_states"),
        ({"optimizer_states": []}, "holds weights alone, and no state of an optimizer.*model.init_from="),
        ({"optimizer_states": None}, "holds weights alone, and no state of an optimizer.*model.init_from="),
    ],
)
def test_a_checkpoint_of_other_content_is_refused(changes, words):
    require_checkpoint(Path("a.ckpt"), WHOLE, fit=True)
    require_checkpoint(Path("a.ckpt"), {key: WHOLE[key] for key in list(WHOLE)[:4]})
    with pytest.raises(UserError, match=rf"'a\.ckpt' .*{words}"):
        require_checkpoint(Path("a.ckpt"), {**WHOLE, **changes}, fit=True)


def trained(make, net):
    """A checkpoint's part of an optimizer that has stepped."""
    optimizer = make(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"global_step": 1, "optimizer_states": [optimizer.state_dict()]}


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        lambda weights: torch.optim.Adam(weights, amsgrad=True),
        lambda weights: torch.optim.SGD(weights, 0.1),
        lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adafactor,
    ],
)
def test_a_training_does_not_go_on_with_a_fresh_optimizer(make):
    """State that is not there, or is that of other weights: Lightning would begin anew, or fail in the first step."""
    path, net = Path("a.ckpt"), torch.nn.Linear(2, 3)
    content = trained(make, net)
    elsewhere = [torch.nn.Parameter(torch.empty_like(weight, device="meta")) for weight in net.parameters()]
    require_same_optimizer(path, content, make(elsewhere))
    state = content["optimizer_states"][0]
    keeps = any(isinstance(value, torch.Tensor) for each in state["state"].values() for value in each.values())
    if not keeps or make is torch.optim.Adafactor:  # it keeps nothing, or needs values to take a step
        return
    others = trained(make, torch.nn.Linear(2, 4))["optimizer_states"][0]["state"]
    for broken in ({}, others, {place + 9: kept for place, kept in state["state"].items()}):
        with pytest.raises(UserError, match=r"another optimizer than \w+ \(it has no state that fits its weights\)"):
            require_same_optimizer(path, {**content, "optimizer_states": [{**state, "state": broken}]}, make(elsewhere))


@pytest.mark.parametrize("content", [b"text", b"", (2**62).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"{]"])
def test_weights_that_are_no_safetensors_are_refused(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.safetensors' is no whole file of safetensors"):
        load_initial_weights(torch.nn.Linear(2, 3), str(path))
    with pytest.raises(UserError, match="model.init_from="):
        find_checkpoint(str(path), MLP, [])


def test_a_configuration_that_cannot_be_read_is_passed_over(tmp_path):
    same = leave_run(tmp_path, "same", MLP, 20)
    leave_run(tmp_path, "other", MLP, 10)
    (tmp_path / "other" / "config.yaml").write_text("model: {_target_")
    assert find_checkpoint("last", MLP, [tmp_path]) == same
