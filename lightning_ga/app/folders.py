"""A run's folder belongs to that run: Hydra itself writes into whatever is there.

A folder that is named by the clock gets another name if a run of the same second has made it. One that was named by the
user is refused if it holds a run, unless this run goes on with it. While a run lasts, a lock keeps others out.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from lightning_ga.app.arguments import is_first_rank
from lightning_ga.app.run_files import CONFIG, CURVES, PARTS
from lightning_ga.app.walk import walk
from lightning_ga.errors import CONTROLS, UserError

HOLDS = (CONFIG, "result.json", "checkpoints")  # any of them is worth keeping
LEAVES = (  # what a run leaves, beside its log
    *(CONFIG, *PARTS, CURVES, "report.html", "probe.png", "loss_curves.png", "classification_report.txt"),
    *("predictions.csv", "*/hparams.yaml", "checkpoints/*.ckpt", "tensorboard/events.*"),
)
FOLDERS = (".dirpath", ".save_dir", ".default_root_dir")  # keys of checkpoints and logs
STARTED_AGAIN = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")  # the same run, by its scheduler


@contextmanager
def own_folders(*, starts: bool = True) -> Iterator[None]:
    """A context in which the folder of each run and sweep that Hydra starts is its own; help ``starts`` none."""
    compose: Callable[..., DictConfig] = Hydra.compose_config
    with ExitStack() as locks:

        def compose_and_own(*args: Any, with_log_configuration: bool = False, **kwargs: Any) -> DictConfig:
            config = compose(*args, with_log_configuration=with_log_configuration, **kwargs)
            if starts and with_log_configuration and is_first_rank(os.environ):  # it will be run, and not only shown
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
    if CONTROLS.search(str(wanted)):  # a line of a launcher's script
        raise UserError(f"{str(wanted)!r} holds control characters, which the folder of a run cannot have.")
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
        with read_write(config.hydra):
            section.dir = str(folder)
            if not is_run:  # its jobs are composed anew
                quoted = str(folder).replace("'", "\\'")
                config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{quoted}'")


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


def require_free_folders(config: Mapping[str, Any], own_folder: str) -> None:
    """Refuse other folders of a resolved configuration to write to that hold a run, or lie in one."""
    if config["paths"]["output_dir"] != own_folder:
        require_free(Path(config["paths"]["output_dir"]), config)
    for key, value in walk(config):
        if key.endswith(FOLDERS) and isinstance(value, str) and not is_below(Path(value), Path(own_folder)):
            for folder in (Path(value), Path(value).parent):
                if (folder / ".hydra").is_dir():
                    require_free(folder, config)


def is_below(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it."""
    return folder.resolve() in (path.resolve(), *path.resolve().parents)


def clear(folder: Path) -> None:
    """Remove what an earlier run has left in a folder, and nothing else."""
    for path in [path for pattern in LEAVES for path in folder.glob(pattern)]:
        if path.is_file():
            path.unlink()
