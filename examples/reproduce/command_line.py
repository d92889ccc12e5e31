"""Parts of the command line as recipes use them: a whole training, or its data and model for a loop by hand."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from hydra import compose, initialize_config_dir
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from omegaconf import DictConfig

from examples.reproduce.recipe import Curve
from lightning_ga.app.build import make
from lightning_ga.app.run_files import RunFiles, read_run
from lightning_ga.train import config_folder, main

QUIET = ("progress=none", "logger=csv", "callbacks=none", "accumulate.cache=false", "trainer.log_every_n_steps=1")


def trained(folder: Path, overrides: Sequence[str]) -> RunFiles:
    """Do what ``python -m lightning_ga.train OVERRIDES`` does, and read the files that it leaves.

    Args:
        folder: Where the run's files and what it prints go.
        overrides: As they are typed.

    Raises:
        RuntimeError: If the run ends with an error, with the end of what it printed.
    """
    run, log = folder / "run", folder / "printed.txt"
    try:
        with log.open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file), seeds_forgotten():
            main([*overrides, *QUIET, f"hydra.run.dir={run}"])
    except SystemExit as end:
        raise RuntimeError(f"{' '.join(overrides)}: {log.read_text(encoding='utf-8')[-2000:]}") from end
    return read_run(run)


class Built(NamedTuple):
    """What the command line builds of its overrides.

    Attributes:
        config: All keys.
        module: The model, with the weights that a run begins with.
        data: Read, ready to be loaded.
    """

    config: DictConfig
    module: LightningModule
    data: LightningDataModule


def built(overrides: Sequence[str]) -> Built:
    """Build what a loop by hand needs: the same data, model and optimizer."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("train", [*overrides, "paths.output_dir=."])
    with seeds_forgotten():
        seed_everything(config.seed, verbose=False)
        data = make(config, "data")
        data.setup("fit")
        return Built(config, make(config, "model"), data)


def curve(run: RunFiles, name: str) -> Curve:
    """Read a logged curve; steps are counted from 1."""
    return [(step + 1, value) for step, value in run.curves.get(name, [])]


@contextmanager
def seeds_forgotten() -> Iterator[None]:
    """Return a context that drops what ``seed_everything`` leaves to later trainings."""
    try:
        yield
    finally:
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
            os.environ.pop(name, None)
