"""Mistakes as they are typed: one sentence each, told before anything is trained."""

import errno

import pytest
import torch

from lightning_ga import UserError
from lightning_ga.app.errors import explain

COMPOSED = [  # what the configuration alone tells
    (["model=nope"], ["model=nope does not exist", "mlp, own, resnet34d, simclr, timm"]),
    (["modle=mlp"], ["did you mean model?"]),
    (["trainer.max_epoch=3"], ["did you mean trainer.max_epochs?"]),
    (["max_epochs=3"], ["did you mean trainer.max_epochs?"]),
    (["lr=0.1"], ["did you mean optimizer.lr?"]),
    (["model=mlp", "accumulate.effective_batch=128"], ["did you mean accumulate.effective_batch_size?"]),
    (["data=[digits]", "precision=16"], ["precision=16 names no option", "bf16-mixed, bf16-true"]),
    (["hydra=null"], ["Config group override must be a string or a list"]),
    (["model=null", "hydra.run.dir=x"], ["model._target_ is missing"]),
    (["--config-dir="], ["--config-dir names no folder"]),
    (["callbacks.early_stopping.patience=1"], ["callbacks=[default,early_stopping]"]),
    (["ckpt_path=epoch=1.ckpt"], ["is quoted twice", "'ckpt_path=\"epoch=1.ckpt\"'"]),
    (["logger=[csv,nope]"], ["logger=nope does not exist", "csv, default, many, mlflow, none"]),
    (["--config-dir", "none-of-mine"], ["none-of-mine"]),
    (["task=train", "hydra.run.dir=x"], ["task: ", "'train', expected one of [fit, validate, test, predict, export]"]),
    (["seed=abc", "hydra.run.dir=x"], ["seed", "abc"]),
    (["dry_run=true", "task=test", "hydra.run.dir=x"], ["task=test has none"]),
    (["+trainer.callbacks=[]", "hydra.run.dir=x"], ["trainer.callbacks and trainer.logger are read by nothing"]),
    (["+experiment=mnist_mlp"], ["write experiment=OPTION, without a +"]),
    (["model=mlp", "hydra.run.dir="], ["hydra.run.dir is empty"]),
    (["model=gpt", "hydra.run.dir=x"], ["model.context", "data.max_length"]),
]
BUILT = [  # what the classes say
    (["model=timm", "model.name=resnet34dd"], ["'resnet34dd'"]),
    (["model=mlp", "accumulate.effective_batch_size=0"], ["effective_batch_size=0 must be at least 1"]),
    (["model=mlp", "task=test"], ["needs trained weights", "ckpt_path=best"]),
    (["model=mlp", "+model.dropout=0.1"], ["unexpected keyword argument 'dropout'"]),
    (["model=mlp", "ckpt_path=/etc/passwd"], ["'/etc/passwd' is no file of tensors"]),
    (["model=mlp", "ckpt_path=last"], ["no run of this model below 'outputs' or 'multirun' has left one"]),
    (["model=mlp", "model.num_classes=3"], ["model.num_classes=3 is less than the 10 classes"]),
    (["model=own", "model._target_=none_of_mine.Model"], ["none_of_mine.Model", "No module named 'none_of_mine'"]),
    (["model=own"], ["model._target_", "Missing mandatory value"]),
    (["model=mlp", "lr_scheduler=none", "trainer.limit_train_batches=0"], ["Nothing was trained"]),
    (["model=mlp", "data=cifar10"], ["add data.download=true to the same line"]),
]


@pytest.mark.parametrize(("arguments", "parts"), [*COMPOSED, *BUILT], ids=lambda value: value[-1] if value else "")
def test_a_mistake_ends_in_one_sentence(command, arguments, parts):
    """Exit code 1 and one line on stderr that names the mistake; nothing is trained."""
    run = command(*arguments)
    for part in parts:
        assert part in run.mistake
    assert "Epoch" not in run.out


def test_traceback_shows_an_error_in_full(command):
    with pytest.raises(UserError, match="data=mnist"):
        command("model=mlp", "data=mnist", "--traceback")


def test_an_error_of_the_users_own_code_is_one_line():
    told = explain(RuntimeError("mat1 and mat2 shapes cannot be multiplied\n\nand more"))
    assert told == "RuntimeError: mat1 and mat2 shapes cannot be multiplied (--traceback shows all)"
    of_worker = OSError("Caught OSError in worker 0.\nOriginal Traceback (most recent call last):\nOSError: broken")
    assert explain(of_worker).startswith("OSError: Caught OSError in worker 0. OSError: broken (")
    with pytest.raises(AssertionError) as caught:
        exec("assert 1 == 2")
    assert "<string>, line 1" in explain(caught.value)


def test_notes_follow_the_sentence():
    """As of what holds the memory."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has …")
    error.add_note("As the probe recorded it: …")
    assert explain(error).endswith("(--traceback shows all) As the probe recorded it: …")
    assert "No space left on device" in explain(OSError(errno.ENOSPC, "No space left on device", "x"))
