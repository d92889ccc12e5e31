import inspect
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lightning_ga import AutoAccumulate
from lightning_ga.train import config_folder

FILES = sorted(path.relative_to(config_folder()) for path in config_folder().rglob("[!_]*.yaml"))
TEXT = {
    "data/definitions.yaml": ["model=gpt"],
    "model/gpt.yaml": ["data=definitions"],
    "experiment/definitions_gpt.yaml": [],
}
OWN = ["model=own", "model._target_=x.Y", "data=own", "data._target_=x.Y"]
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
    """Chosen alone with the defaults around it, and every interpolation leads somewhere."""
    overrides = [] if file == Path("train.yaml") else [f"{file.parent}={file.stem}"]
    overrides = OWN if file.stem == "own" else overrides + TEXT.get(str(file), [])
    config = resolved(composed(*(o for o in overrides if not o.startswith("hydra="))))
    assert {"data", "model", "optimizer", "trainer", "accumulate"} <= config.keys()


@pytest.mark.parametrize("experiment", [f.stem for f in FILES if f.parent == Path("experiment") and str(f) not in TEXT])
def test_every_experiment_takes_a_set_that_is_at_hand(experiment: str):
    config = resolved(composed(f"experiment={experiment}", "data=digits"))
    assert config["data"]["_target_"] == resolved(composed("data=digits"))["data"]["_target_"]
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
