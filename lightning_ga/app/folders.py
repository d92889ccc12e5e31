"""A run's folder belongs to that run: Hydra itself writes into whatever is there.

A folder that is named by the clock gets another name if a run of the same second has made it. One that was named by the
user is refused if it holds a run, unless this run goes on with it. While a run lasts, a lock keeps others out.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from lightning_ga.app.arguments import is_first_rank
from lightning_ga.errors import UserError

HOLDS = ("config.yaml", "result.json", "checkpoints")  # any of them is worth keeping
LEAVES = (  # what a run leaves, beside its log
    *(
        "*.html",
        "*.json",
        "config.yaml",
        "probe.png",
        "loss_curves.png",
        "classification_report.txt",
        "predictions.csv",
    ),
    *("checkpoints/*.ckpt", "csv/*", "tensorboard/*"),
)
STARTED_AGAIN = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")  # the same run, by its scheduler


@contextmanager
def own_folders() -> Iterator[None]:
    """A context in which the folder of each run and sweep that Hydra starts is its own."""
    compose: Callable[..., DictConfig] = Hydra.compose_config
    with ExitStack() as locks:

        def compose_and_own(*args: Any, with_log_configuration: bool = False, **kwargs: Any) -> DictConfig:
            config = compose(*args, with_log_configuration=with_log_configuration, **kwargs)
            if with_log_configuration and is_first_rank(os.environ):  # it will be run, and not only shown
                HydraConfig.instance().set_config(config)
                own(config, kwargs["run_mode"], locks)
            return config

        Hydra.compose_config = compose_and_own  # type: ignore[method-assign]
        try:
            yield
        finally:
            Hydra.compose_config = compose  # type: ignore[method-assign]


def own(config: DictConfig, mode: RunMode, locks: ExitStack) -> None:
    """Make the folder of a run or a sweep; ``hydra.sweep.dir`` of an earlier sweep goes on with it."""
    is_run = mode == RunMode.RUN
    section = config.hydra.run if is_run else config.hydra.sweep
    by_clock = "${now:" in OmegaConf.to_container(section)["dir"]  # type: ignore[index, call-overload]
    wanted = Path(section.dir)
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            if not by_clock:
                break
    lock(folder, locks)
    if is_run and not by_clock:
        require_free(folder, config)
    if folder != wanted:
        quoted = str(folder).replace("'", "\\'")
        with read_write(config.hydra):
            section.dir = str(folder)
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{quoted}'")  # for the jobs of a sweep


def lock(folder: Path, locks: ExitStack) -> None:
    """Keep other processes from writing a run into a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"Another run is writing into {str(folder)!r}: wait for its end, or give hydra.run.dir=FOLDER."
        ) from None
    except OSError:  # some network file systems
        pass


def require_free(folder: Path, config: Any, checkpoint: Path | None = None) -> None:
    """Refuse a folder that holds a run, unless ``ckpt_path`` goes on with that very run or it may be overwritten."""
    held = [name for name in HOLDS if (folder / name).exists()]
    if not held or config.get("overwrite") or any(os.environ.get(name, "0") != "0" for name in STARTED_AGAIN):
        return
    wanted = checkpoint or config.get("ckpt_path")
    goes_on = wanted in ("last", "best") or (wanted is not None and is_below(Path(wanted), folder))
    if not (goes_on and config.get("task") == "fit") and not any(folder.glob("hpc_ckpt_*.ckpt")):
        raise UserError(
            f"{str(folder)!r} holds a run already ({', '.join(held)}): give this one another folder, go on with "
            f"ckpt_path={folder}, or replace what is there with overwrite=true."
        )


def is_below(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it."""
    return folder.resolve() in (path.resolve(), *path.resolve().parents)


def clear(folder: Path) -> None:
    """Remove what an earlier run has left in a folder, and nothing else."""
    for path in [path for pattern in LEAVES for path in folder.glob(pattern)]:
        if path.is_file():
            path.unlink()
