import inspect
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lightning_ga import AutoAccumulate
from lightning_ga.app.build import check_targets
from lightning_ga.train import config_folder

FILES = sorted(path.relative_to(config_folder()) for path in config_folder().rglob("*.yaml"))
TEXT = {
    "data/definitions.yaml": ["model=gpt"],
    "model/gpt.yaml": ["data=definitions"],
    "experiment/definitions_gpt.yaml": [],
}
"""Files that are for text alone, and what each is chosen with."""


@cache
def composed(*overrides: str) -> DictConfig:
    """Compose as the command line does, once for all who read it."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("train", [*overrides, "paths.output_dir=run"])


def resolved(config: DictConfig) -> dict:
    return OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_composes_and_resolves(file: Path):
    """Chosen alone with the defaults around it, and it names nothing that is off the allow-list."""
    if file == Path("search/optuna.yaml"):
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra 'sweep' is not installed")
    overrides = [] if file == Path("train.yaml") else [f"{file.parent}={file.stem}"]
    overrides += TEXT.get(str(file), [])
    config = resolved(composed(*(o for o in overrides if not o.startswith("hydra="))))
    check_targets({name: section for name, section in config.items() if name != "hydra"})
    assert {"data", "model", "optimizer", "trainer", "accumulate"} <= config.keys()


@pytest.mark.parametrize(("metric", "direction"), [("val/acc", "maximize"), ("val/loss", "minimize")])
def test_a_search_looks_for_the_better_metric(metric: str, direction: str):
    search = OmegaConf.merge(OmegaConf.load(config_folder() / "search/optuna.yaml"), {"optimized_metric": metric})
    assert search.hydra.sweeper.direction == direction


@pytest.mark.parametrize("data", ["digits", "fashion_mnist"])
@pytest.mark.parametrize("experiment", [f.stem for f in FILES if f.parent == Path("experiment") and str(f) not in TEXT])
def test_every_experiment_takes_a_set_that_is_at_hand(experiment: str, data: str):
    config = resolved(composed(f"experiment={experiment}", f"data={data}"))
    assert config["data"]["_target_"] == resolved(composed(f"data={data}"))["data"]["_target_"]
    assert config["model"].get("in_channels", 1) == 1
    assert config["data"]["augment"] == []


@pytest.mark.parametrize("option", ["auto", "fixed", "scheduled"])
def test_accumulate_has_the_arguments_of_the_callback(option: str):
    """Every one can be set as accumulate.<argument>, and the defaults are the callback's own."""
    section = resolved(composed(f"accumulate={option}"))["accumulate"]
    parameters = {
        name: list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        for name, parameter in inspect.signature(AutoAccumulate.__init__).parameters.items()
        if name != "self"
    }
    assert section.pop("_target_") == "lightning_ga.AutoAccumulate"
    assert list(section) == list(parameters)
    if option == "auto":
        assert section == parameters


@pytest.mark.parametrize(
    ("experiment", "batch", "accumulate", "precision"),
    [
        ("cifar10_resnet34d", 32, None, "32-true"),
        ("cifar10_resnet34d_8x4", 8, 4, "32-true"),
        ("mnist_mlp", 32, None, "32-true"),
        ("mnist_mlp_accumulate4", 32, 4, "32-true"),
        ("mixed_precision_16x2", 16, 2, "bf16-mixed"),
    ],
)
def test_the_classic_recipes(experiment: str, batch: int, accumulate: int | None, precision: str):
    """Micro-batch, factor and precision are those of the recipe's name."""
    config = resolved(composed(f"experiment={experiment}"))
    assert config["data"]["batch_size"] == batch
    assert config["trainer"]["precision"] == precision
    assert (config["accumulate"]["micro_batch_size"], config["accumulate"]["accumulate"]) == (batch, accumulate)


def test_the_recipe_for_text_weighs_tokens():
    config = resolved(composed("experiment=definitions_gpt"))
    assert config["accumulate"]["normalize"]["_target_"] == "lightning_ga.weights.TargetTokens"
    assert config["model"]["context"] == config["data"]["max_length"]
    assert config["optimized_metric"] == "val/loss"


@pytest.mark.parametrize(("metric", "mode"), [("val/loss", "min"), ("val/perplexity", "min"), ("val/acc", "max")])
def test_the_best_checkpoint_is_the_best(metric: str, mode: str):
    config = resolved(composed(f"optimized_metric={metric}", "callbacks=[default,early_stopping]"))
    modes = {config["callbacks"][name]["mode"] for name in ("best", "early_stopping")}
    assert modes == {mode}


def test_keys_that_users_type():
    """They are part of the interface: a rename breaks everyone's notes."""
    config = composed()
    for key in (
        "trainer.max_epochs", "trainer.accelerator", "model.name", "model.pretrained", "data.root", "data.download",
        "data.batch_size", "data.num_workers", "optimizer.lr", "accumulate.memory_budget", "seed", "task", "dry_run",
    ):  # fmt: skip
        assert OmegaConf.select(config, key, default="missing") != "missing", key
    assert "ckpt_path" in config
