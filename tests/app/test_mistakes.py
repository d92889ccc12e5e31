"""Mistakes as they are typed: one sentence each, told before anything is trained."""

import errno
from inspect import signature

import pytest
import torch
from command_lines import TINY

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.app.mistakes import ARGUMENTS, explain

COMPOSED = [  # what the configuration alone tells
    (["model=nope"], ["model=nope does not exist", "mlp, net, own, resnet34d, simclr, timm"]),
    (["modle=mlp"], ["did you mean model?"]),
    (["trainer.max_epoch=3"], ["did you mean trainer.max_epochs?"]),
    (["max_epochs=3"], ["write trainer.max_epochs=3."]),
    (["lr=0.1"], ["write optimizer.lr=0.1."]),
    (["model=mlp", "accumulate.effective_batch=128"], ["did you mean accumulate.effective_batch_size?"]),
    (["data=[digits]", "precision=16"], ["precision=16 names no option", "bf16-mixed, bf16-true"]),
    (["hydra=null"], ["Config group override must be a string or a list"]),
    (["model=null", "hydra.run.dir=x"], ["model._target_ is missing"]),
    (["--config-dir="], ["--config-dir names no folder"]),
    (["callbacks.early_stopping.patience=1"], ["callbacks=[default,early_stopping]"]),
    (["ckpt_path=epoch=1.ckpt"], ["quote a value with = or , twice: 'KEY=\"VALUE\"'"]),
    (["logger=[csv,nope]"], ["logger=nope does not exist", "csv, default, many, mlflow, none"]),
    (["--config-dir", "none-of-mine"], ["none-of-mine"]),
    (["task=train", "hydra.run.dir=x"], ["task: ", "'train', expected one of [fit, validate, test, predict, export]"]),
    (["seed=abc", "hydra.run.dir=x"], ["seed", "abc"]),
    (["dry_run=true", "task=test", "hydra.run.dir=x"], ["task=test has none"]),
    (["+trainer.callbacks=[]", "hydra.run.dir=x"], ["trainer.callbacks is read by nothing: write callbacks.NAME"]),
    (["+trainer.enable_checkpointing=false", "hydra.run.dir=x"], ["write callbacks=none"]),
    (["+trainer.enable_progress_bar=true", "hydra.run.dir=x"], ["write progress=bar"]),
    (["tags=baseline", "hydra.run.dir=x"], ["tags=baseline is no list: write tags=[baseline]"]),
    (["tags=7", "hydra.run.dir=x"], ["write tags=[7]"]),
    (["model=mlp", "hydra.run.dir=."], ["hydra.run.dir is this folder"]),
    (["+experiment=mnist_mlp"], ["write experiment=OPTION, without a +"]),
    (["model=mlp", "hydra.run.dir="], ["hydra.run.dir is this folder"]),
    (["model=gpt", "hydra.run.dir=x"], ["model.context is taken from data.max_length", "choose another data=OPTION"]),
    (["callbacks.last.every_n_train_steps=20"], ["write +callbacks.last.every_n_train_steps=20."]),
    (["callbacks.best.mode=max"], ["write optimized_direction=max."]),
    (["callbacks.model_checkpoint.save_top_k=2"], ["write callbacks.best.save_top_k=2."]),
    (["logger.wandb.project=x"], ["logger=[default,wandb]"]),
    (["model.hidden=[32"], ["model.hidden=[32 cannot be read: close brackets and quotes"]),
    (["run.name='x"], ["run.name='x cannot be read"]),
    (["trainer.max_epochs==3"], ["trainer.max_epochs==3 cannot be read"]),
    (["accumulate.effective_batch_size=linear(1,2,steps=3)"], ["{_target_:linear,ARGUMENT:VALUE}"]),
    (["model=mlp,timm"], ["add -m to run each of them", "'model=[mlp,timm]'"]),
    (["gradient_checkpointing=true"], ["write accumulate.checkpoint=auto."]),
    (["optimiser.lr=0.1"], ["did you mean optimizer.lr?"]),
    (["model=mlp", "model.optimizer.lr=0.5"], ["write optimizer.lr=0.5."]),
    (["model=mlp", "model.name=resnet50"], ["write model=timm model.name=resnet50."]),
    (["model=timm", "model.options.drop_rate=0.1"], ["write +model.options.drop_rate=0.1."]),
    (["model=resnet50"], ["write model=timm model.name=resnet50."]),
    (["optimizer=lamb"], ["write optimizer=timm optimizer.name=lamb."]),
    (["data=/my/pictures"], ["data=/my/pictures does not exist", "data.root=/my/pictures"]),
    (["train=False"], ["write task=test ckpt_path=best."]),
    (["hparams_search=mine"], ["pip install hydra-optuna-sweeper", "takes 2.10"]),
    (["hydra/sweeper=optuna"], ["pip install hydra-optuna-sweeper"]),
    (["hydra/launcher=submitit_slurm"], ["pip install hydra-submitit-launcher"]),
    (["--config-name", "mine"], ["mine.yaml is in no folder"]),
    (["--lr", "1e-3"], ["write optimizer.lr=1e-3."]),
    (["--cfg", "jobs"], ["invalid choice: 'jobs'"]),
    (["+optimiser.lr=0.1", "hydra.run.dir=x"], ["is read by nothing: write optimizer.lr=0.1"]),
    (["seed=None", "hydra.run.dir=x"], ["write seed=null"]),
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
    (["model=mlp", "trainer.limit_train_batches=0"], ["limit_train_batches=0 leaves no batch", "above 0"]),
    (["model=mlp", "trainer.max_epochs=three"], ["trainer.max_epochs=three", "a whole number or null"]),
    (["model=mlp", "optimizer.lr=fast"], ["optimizer.lr=fast", "Adam takes a number as lr"]),
    (["model=mlp", "data.augment=flip"], ["data.augment=flip", "a list ("]),
    (["model=mlp", "model.hidden=128"], ["model.hidden=128", "each a whole number"]),
    (["model=mlp", "model.optimizer=sgd"], ["model.optimizer=sgd", "a class ({_target_: NAME})"]),
    (["model=mlp", "+trainer.foo=1"], ["trainer.foo=1: Trainer got an unexpected", "max_epochs"]),
    (["model=mlp", "trainer.devices=two"], ["trainer.devices=two", "int > 0"]),
    (["model=mlp", "model.hidden=[-1]"], ["negative dimension", "Typed there: model.hidden=[-1]"]),
    (["model=mlp", "data.augment=[{_target_:torchvision.transforms.v2.RandomFlip}]"], ["RandomVerticalFlip?"]),
    (
        ["model=mlp", "optimizer=timm", "optimizer.name=lam"],
        ["optimizer.name=lam: ValueError: Optimizer lam not found", "timm.optim.list_optimizers()"],
    ),
    (["model=mlp", "lr_scheduler.warmup_epochs=9"], ["warmup_epochs=9", "the 4 epochs of the run"]),
    (["model=mlp", "accumulate.normalize=TargetTokens"], ["'accumulate.normalize={_target_:TargetTokens,key:1}'"]),
    (["model=gpt", "data=definitions", "model.heads=3"], ["model.heads=3 does not divide model.width=128"]),
    (["model=gpt", "data=definitions", "model.heads=0"], ["model.heads=0 does not divide model.width=128"]),
    (
        ["model=gpt", "data=definitions", "model.context=16"],
        ["must be at least the data.max_length=512"],
    ),
    (["model=mlp", "accumulate.whole=[encoder]"], ["accumulate.whole= names 'encoder'"]),
    (["model=mlp", "accumulate.micro_batch_multiple=0"], ["accumulate.micro_batch_multiple=0 must be at least 1"]),
    (["model=mlp", "checkpoint_every=fast"], ["checkpoint_every='fast' is neither", "write 20, '30s' or '5min'"]),
    (["model=mlp", "accumulate.memory_budget=1KiB"], ["accumulate.memory_budget='1KiB'", "accumulate.checkpoint="]),
    (["model=mlp", "optimizer.lr=-1"], ["optimizer.lr=-1: ValueError: Invalid learning rate: -1"]),
    (["model=mlp", "data.batch_size=0"], ["data.batch_size=0: ValueError: batch_size should be a positive integer"]),
    (["model=mlp", "data.mixup=-1"], ["data.mixup=-1 and data.cutmix=0.0 must be at least 0; 0 mixes nothing."]),
    (["model=mlp", "trainer.max_epochs=-5"], ["trainer.max_epochs=-5: ", "must be a non-negative integer or -1"]),
    (["model=mlp", "trainer.check_val_every_n_epoch=0"], ["every_n_epoch=0 must be above 0; trainer.limit_val_"]),
    (["model=mlp", "trainer.val_check_interval=0"], ["val_check_interval=0 must be above 0; trainer.limit_val_"]),
    (["model=mlp", "lr_scheduler=step", "lr_scheduler.step_size=0"], ["lr_scheduler.step_size=0 must be above 0; lr_"]),
    (["model=hashed_patches", "optimizer=adagrad", "model.rows=0"], ["model.rows=0 must be above 0; leave it out"]),
    (["model=mlp", "lr_scheduler.warmup=5"], ["lr_scheduler.warmup=5 must be a share", "lr_scheduler.warmup_epochs=…"]),
    (["model=mlp", "seed=-1"], ["seed=-1 must be from 0 to 4294967295, or null."]),
    (["model=mlp", "optimized_metric=val/accuracy"], ["write optimized_metric=val/acc,"]),
]
RELATED = [  # of the same kinds as rows above
    (["trainner.max_epochs=1"], ["did you mean trainer.max_epochs?"]),
    (["model=mlp", "model.lr=0.5"], ["write optimizer.lr=0.5."]),
    (["epochs=3"], ["write trainer.max_epochs=3."]),
    (["trainer.gpus=2"], ["write trainer.accelerator=gpu trainer.devices=2."]),
    (["extras.print_config=false"], ["write --cfg job."]),
    (["model=mlp", "callbacks.best.save_top_k=all"], ["callbacks.best.save_top_k=all", "a whole number"]),
    (["model=mlp", "accumulate.normalize=TargetToken"], ["accumulate.normalize=TargetToken cannot be imported"]),
]
ROWS = [*COMPOSED, *BUILT, *(pytest.param(*row, marks=pytest.mark.slow) for row in RELATED)]


@pytest.mark.parametrize(("arguments", "parts"), ROWS, ids=lambda value: value[-1] if value else "")
def test_a_mistake_ends_in_one_sentence(command, arguments, parts):
    """Exit code 1 and one line on stderr that names the mistake; nothing is trained."""
    run = command(*arguments)
    for part in parts:
        assert part in run.mistake
    assert "Epoch" not in run.out


def test_a_schedule_that_ends_with_its_run_says_so(command, shared):
    """If training is to go on after the last epoch."""
    line = (*TINY, "lr_scheduler=onecycle")
    shared(*line, folder="first")
    run = command(*line, "ckpt_path=outputs/first", "trainer.max_epochs=2", folder="longer")
    assert "ends after 4 optimizer steps, as lr_scheduler=onecycle does: train from the start" in run.mistake


def test_a_key_of_ones_own_that_nothing_reads_is_told(command):
    """It goes to loggers, so that the run continues."""
    run = command("model=mlp", "+note.author=me", "dry_run=true", "debug=default", "accumulate.verify=false")
    assert run.code == 0, run.err
    assert (
        run.err.strip()
        == "Warning: +note.author=me is read by nothing here: it only goes to loggers and into config.yaml."
    )


def test_the_remedy_of_a_long_sentence_is_whole():
    """Sentences of the package are not cut; those of libraries, which may list all weights, are."""
    assert explain(UserError("x " * 900 + "do this.")).endswith("do this.")
    assert len(explain(RuntimeError("x " * 900))) < 700


def test_messages_of_libraries_without_a_way_out_get_one():
    told = explain(RuntimeError("No supported gpu backend found!"), ["trainer.accelerator=gpu", "seed=1"])
    assert told.startswith("trainer.accelerator=gpu: RuntimeError: No supported gpu backend found!: use trainer.acc")
    assert explain(RuntimeError("Input and output sizes should be greater than 0, but")).startswith("data.image_size")


def test_sentences_of_the_callback_name_the_keys_of_the_line():
    told = explain(
        UserError('give normalize= a function, such as lightning_ga.counters.Samples(), or whole=("a", "b").')
    )
    assert told == 'give accumulate.normalize= a function, such as Samples, or accumulate.whole=["a", "b"].'


def test_every_argument_of_the_callback_is_a_key_of_the_line():
    """But for ``accumulate=``, also a group of the line, which is told apart by its value."""
    assert {*ARGUMENTS.split("|")} == {*signature(AutoAccumulate).parameters} - {"accumulate"}


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
