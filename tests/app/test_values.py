from copy import deepcopy
from functools import cache

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_ga import UserError
from lightning_ga.app.values import RULES, check_values, resolved
from lightning_ga.train import config_folder


@cache
def chosen(*groups: str) -> DictConfig:
    """Compose as the command line does; this takes longer than all that is tested here."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("train", ["model=mlp", *groups, "paths.output_dir=run"])


def composed(*overrides: str) -> dict:
    """Compose options of groups once, and set values in a copy as Hydra does."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    groups = {each.input_line for each in parsed if (config_folder() / each.key_or_group).is_dir()}
    config = deepcopy(chosen(*sorted(groups)))
    ConfigLoaderImpl._apply_overrides_to_config([each for each in parsed if each.input_line not in groups], config)
    return resolved(config)


def check(*overrides: str) -> None:
    """Look at the values."""
    check_values(composed(*overrides))


@pytest.mark.parametrize(
    "wrong",
    [
        "seed=abc", "seed=-1", "seed=1.5", "seed=true", "dry_run=maybe", "test=1", "accumulate.verify=maybe",
        "trainer.max_epochs=abc", "trainer.max_epochs=", "trainer.max_epochs=-2", "trainer.accumulate_grad_batches=0",
        "trainer.log_every_n_steps=abc",
        "trainer.gradient_clip_val=-1", "data.num_workers=-1", "data.num_workers=abc", "data.num_workers=9999",
        "paths.data_dir=123", "paths.output_root=null",
        "data.batch_size=abc", "data.batch_size=null", "data.val_fraction=2", "data.val_fraction=-1",
        "data.image_size=0", "data.channels=2", "data.mean=[]", "data.std=0", "data.split_seed=-1",
        "precision.float32_matmul=most", "lr_scheduler.warmup=2", "task=tset", "progress=maybe",
        "compile=null", "compile=nope",
        "trainer.val_check_interval=0", "trainer.limit_train_batches=-1",
        "data.augment=abc", "data.augment=[abc]", "data.augment=null",
        "optimizer.lr=abc", "optimizer.lr=-1", "optimizer.lr=1e400", "model.hidden=-5", "model.hidden=[0]",
        "data.image_size=100000", "data.batch_size=1e-3", "trainer.max_steps=1.5e0",
        "optimized_metric=null", "optimized_metric=[val/acc]", "data.root=5", "data.root=null", "model.init_from=[a]",
        "callbacks.best.save_top_k=abc",
        "run.name=a/b", "run.name=..", "run.name=", "run.tags=a", "run.tags=[a/b]", "run.tags=null",
        "data.mixup=-1", "data.cutmix=abc", "data.rand_augment=31", "model.label_smoothing=2",
        "optimizer.decay_norms=maybe",
        "trainer.limit_train_batches=0", "data.val_fraction=0", "data.val_fraction=1", "data.test_fraction=0",
        "optimizer.betas=[0.9]", "optimizer.betas=[0.9,1]", "optimizer.betas=0.9", "optimizer.weight_decay=-1",
        "accumulate.on_oom=pray", "accumulate.objective=speed", "accumulate.micro_batching=no",
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused(wrong: str):
    key = wrong.partition("=")[0]
    with pytest.raises(UserError, match=rf"^{key}=.+ must be .+; for example {key}=.+\.$"):
        check(wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("seed=abc", "a whole number from 0"),
        ("data.batch_size=0", "a whole number of at least 1"),
        ("data.image_size=100000", "a whole number from 1 to 4096"),
        ("optimizer.lr=abc", "a number"),
        ("task=tset", "one of .+; for example task=test"),
        ("trainer.val_check_interval=0", "a share of an epoch above 0"),
        ("data.augment=abc", "a list of transforms"),
    ],
)
def test_the_sentence_says_what_may_be(wrong: str, words: str):
    with pytest.raises(UserError, match=f"^{wrong} must be .*{words}"):
        check(wrong)


@pytest.mark.parametrize(
    ("group", "wrong"),
    [
        ("optimizer=sgd", "optimizer.momentum=-1"),
        ("callbacks=early_stopping", "callbacks.early_stopping.patience=abc"),
        ("model=timm", "model.name=null"),
        ("model=timm", "model.options=5"),
        ("model=hashed_patches", "model.rows=0"),
        ("trainer=cpu", "+trainer.overfit_batches=abc"),
        ("lr_scheduler=step", "lr_scheduler.step_size=0"),
        ("lr_scheduler=step", "lr_scheduler.gamma=-1"),
        ("lr_scheduler=onecycle", "lr_scheduler.max_lr=-1"),
        ("lr_scheduler=onecycle", "lr_scheduler.pct_start=2"),
        ("data=synthetic", "data.samples=0"),
        ("data=synthetic", "data.samples=abc"),
    ],
)
def test_a_wrong_value_of_one_option_is_refused(group: str, wrong: str):
    with pytest.raises(UserError, match=f"^{wrong.lstrip('+')} must be "):
        check(group, wrong)


@pytest.mark.parametrize(
    "right",
    [
        *("seed=null", "trainer.max_epochs=-1", "data.mean=[0.1,0.2]", "data.num_classes=null"),
        *("optimized_metric=val/loss", "progress=none", "compile=max-autotune", "trainer.val_check_interval=null"),
        *("trainer.val_check_interval=10", "trainer.val_check_interval=0.5", "trainer.limit_train_batches=0.1"),
    ],
)
def test_a_right_value_is_taken(right: str):
    key, _, typed = right.partition("=")
    config = composed(right)
    check_values(config)
    assert OmegaConf.select(OmegaConf.create(config), key) == yaml.safe_load(typed)


def test_whole_numbers_may_be_written_in_powers_of_ten():
    """1e3 is a float to YAML, and a thousand to whoever typed it; shares stay shares."""
    typed = ["data.batch_size=1e3", "trainer.max_steps=1e9", "accumulate.effective_batch_size=1e3"]
    config = composed(*typed, "trainer.limit_train_batches=1e2", "accumulate.memory_budget=1e9")
    check_values(config)
    assert config["data"]["batch_size"] == config["accumulate"]["effective_batch_size"] == 1000
    assert config["trainer"]["max_steps"] == config["accumulate"]["memory_budget"] == 10**9
    assert isinstance(config["trainer"]["limit_train_batches"], int)
    config = composed("accumulate.memory_budget=1.0", "accumulate.accumulate={0:2e0,2:4e0}")
    check_values(config)
    assert isinstance(config["accumulate"]["memory_budget"], float)
    assert config["accumulate"]["accumulate"] == {0: 2, 2: 4}
    assert isinstance(config["trainer"]["limit_val_batches"], float)


@pytest.mark.parametrize("key", RULES)
def test_every_example_obeys_its_rule(key: str):
    assert RULES[key].holds(yaml.safe_load(str(RULES[key].example)))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dry_run=true", "task=test"], "task=test has none"),
        (["device_memory=much"], "device_memory='much' must be a whole number of bytes"),
        (["device_memory=16GiB"], "nothing can be trained on it: add dry_run=true"),
        (["device_memory=16GiB", "dry_run=true", "accumulate=off"], "needs a callback that plans"),
        (["model.in_channels=3"], "model.in_channels=3 does not fit data.channels=1"),
        (["model.image_size=9"], "model.image_size=9 does not fit data.image_size=32"),
        (["model.optimizer=null"], "model.optimizer is read from optimizer: choose optimizer=OPTION"),
        (["model.lr_scheduler=5"], "model.lr_scheduler is read from lr_scheduler"),
        (["model=gpt", "data=definitions", "model.context=5"], "model.context=5 does not fit data.max_length=512"),
        (["optimized_metric=nope"], "optimized_metric=nope is not measured"),
        (["optimized_metric=test/acc"], "callbacks.best cannot watch test/acc"),
        (["model=gpt", "data=definitions", "optimized_metric=val/acc"], "val/acc is not measured: .* val/perplexity"),
        (["model=mlp", "optimized_metric=val/perplexity"], "val/perplexity is not measured"),
    ],
)
def test_keys_that_contradict_each_other(overrides: list[str], words: str):
    with pytest.raises(UserError, match=words):
        check(*overrides)


@pytest.mark.parametrize(
    ("name", "end"),
    [("first", "-first"), ("null", ""), ("${oc.env:TOKEN}", ""), ("a-${oc.env:TOKEN}", ""), ("${oc.env:X,b}", "-b")],
)
def test_the_value_of_a_variable_is_in_no_folders_name(monkeypatch, name: str, end: str):
    """It may be a secret, and names of folders are seen by others."""
    monkeypatch.setenv("TOKEN", "hidden")
    monkeypatch.delenv("X", raising=False)
    config = OmegaConf.create({"run": {"name": yaml.safe_load(name)}, "dir": "runs${named:${run.name}}"})
    assert config.dir == f"runs{end}"


def test_a_class_of_the_users_own_may_use_the_keys_otherwise():
    """The table is about the classes that it was written for."""
    for key, others, words in (
        ("+data.samples=many", "data._target_=mine.Data", "data.samples=many must be"),
        ("optimized_metric=test/acc", "callbacks=none", "cannot watch test/acc"),
        ("optimized_metric=mine", "model._target_=mine.Model", "mine is not measured"),
    ):
        check(key, others)
        with pytest.raises(UserError, match=words):
            check(key)
