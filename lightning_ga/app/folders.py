"""Folders of runs and sweeps: each belongs to one, where Hydra itself writes into whatever is there.

A folder that is named by the clock gets another name if a run of the same second has made it. One that was named by the
user is refused if it holds a run, unless this run goes on with it. While a run lasts, a lock keeps others out. A sweep
that is started again leaves out the jobs that are done, and ends with a table of all.
"""

import fcntl
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from hydra._internal.hydra import Hydra
from hydra.core import utils
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from lightning_ga.app.composed import is_first_rank, replaced
from lightning_ga.app.run_files import CONFIG, CURVES, PARTS, read_config, read_json, read_yaml, write_table
from lightning_ga.app.terminal import columns
from lightning_ga.app.values import FOLDER, as_written, direction, resolved, walk
from lightning_ga.errors import CONTROLS, UserError, printable

LOG, RESULT, TABLE = "train.log", "result.json", "sweep.csv"
LEAVES = (  # what a run leaves, beside its log
    *(CONFIG, *PARTS, "checkpoints/*.ckpt", "predictions.csv", CURVES, "report.html", "probe.png", "loss_curves.png"),
    *("classification_report.txt", "*/hparams.yaml", "tensorboard/events.*"),
)
SHARED = ("*.ckpt", "metrics.csv")  # what a run leaves where its configuration says
FOLDERS, INSIDE = ("output_dir", "dirpath", "save_dir", "default_root_dir"), ("name", "version", "sub_dir", "filename")
"""Keys of a logger, a checkpoint or a profiler that make up where it writes."""
STARTED_AGAIN = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")  # the same run, by its scheduler


@contextmanager
def own_folders(*, starts: bool = True) -> Iterator[None]:
    """A context in which the folder of each run and sweep that Hydra starts is its own; help ``starts`` none."""
    compose: Any = Hydra.compose_config
    save: Any = utils._save_config
    jobs = set[Path]()
    with ExitStack() as locks:

        def compose_and_own(*args: Any, with_log_configuration: bool = False, **kwargs: Any) -> DictConfig:
            config: DictConfig = compose(*args, with_log_configuration=with_log_configuration, **kwargs)
            if starts and with_log_configuration and is_first_rank(os.environ):  # it will be run, and not only shown
                HydraConfig.instance().set_config(config)
                own(config, kwargs["run_mode"], locks)
            return config

        def check_and_save(config: DictConfig, name: str, folder: Path) -> None:
            if HydraConfig.get().mode == RunMode.MULTIRUN and name == CONFIG:  # Hydra's first file of a job
                if folder in jobs:
                    raise UserError(
                        f"hydra.sweep.subdir names {Path(folder).parent} for two jobs of this sweep: give each its own."
                    )
                jobs.add(folder)
                if any(folder.parent.glob("*")):
                    done_before(folder.parent, as_written(config, resolved(config)))
            save(config, name, folder)

        with replaced((Hydra, "compose_config", compose_and_own), (utils, "_save_config", check_and_save)):
            yield


def own(config: DictConfig, mode: RunMode, locks: ExitStack) -> None:
    """Make the folder of a run or a sweep; ``hydra.sweep.dir`` of an earlier sweep goes on with it."""
    is_run = mode == RunMode.RUN
    section = config.hydra.run if is_run else config.hydra.sweep
    by_clock = "${now:" in OmegaConf.to_container(section)["dir"]  # type: ignore[index, call-overload]
    if not FOLDER.holds(section.dir):  # Hydra would write into the current folder
        raise UserError(FOLDER.sentence(f"hydra.{'run' if is_run else 'sweep'}.dir", section.dir))
    wanted = Path(section.dir)
    if CONTROLS.search(str(wanted)):  # a line of a launcher's script
        raise UserError(f"{str(wanted)!r} holds control characters, which the folder of a run cannot have.")
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True)
            locks.callback(remove_unused, new)
            break
        except FileExistsError:
            if not by_clock:
                break
    lock(folder, locks)
    if not by_clock:
        require_free(folder, config, names=() if is_run else (CONFIG, *PARTS))
    if folder != wanted:
        with read_write(config.hydra):
            section.dir = str(folder)
            if not is_run:  # its jobs are composed anew
                quoted = str(folder).replace("'", "\\'")
                config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{quoted}'")


def remove_unused(new: Sequence[Path]) -> None:
    """Remove new folders, the innermost first, if no run began in them: a mistake was found before."""
    with suppress(OSError):
        files = [path for path in new[0].rglob("*") if not path.is_dir()]
        if not any(path.name not in (LOG, "multirun.yaml") and path.parent != new[0] / ".hydra" for path in files):
            shutil.rmtree(new[0])
            for folder in new[1:]:
                folder.rmdir()


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


def require_free(folder: Path, config: Any, checkpoint: Path | None = None, *, key: str = "", names: Any = ()) -> None:
    """Refuse a folder that holds a run, unless ``ckpt_path`` goes on with that very run or it may be overwritten."""
    leaves = LEAVES if checkpoint is not None else (*LEAVES, LOG)  # a run that has read one has begun its log
    held = [path.name for name in names or leaves for path in folder.glob(name)][:3]
    if not held or config.get("overwrite") or any(os.environ.get(name, "0") != "0" for name in STARTED_AGAIN):
        return
    wanted = checkpoint or config.get("ckpt_path")
    goes_on = wanted in ("last", "best") or (wanted is not None and is_below(Path(wanted), folder))
    is_fit = config.get("task") == "fit"
    if not (goes_on and is_fit) and not any(folder.glob("hpc_ckpt_*.ckpt")):
        may_go_on = is_fit and not names and any(folder.glob("checkpoints/*.ckpt"))
        way_out = f"go on with ckpt_path={folder}, " if may_go_on else ""
        raise UserError(
            f"{str(folder)!r}{f', where {key} writes,' * bool(key)} holds what a run leaves ({', '.join(held)}): give "
            f"this one another folder, {way_out}or replace what is there by typing overwrite=true."
        )


def require_free_folders(config: Mapping[str, Any], own_folder: str, locks: ExitStack) -> None:
    """Refuse other folders of a resolved configuration to write to that hold a run, or lie in one."""
    own, locked = Path(own_folder).resolve(), set[Path]()
    for key, node in walk(config):
        if not isinstance(node, Mapping):
            continue
        base = next((str(node[name]) for name in FOLDERS if node.get(name)), own)
        place = Path(base, *(str(node[name]) for name in INSIDE if node.get(name))).resolve()
        place = place.parent if node.get("filename") else place
        if is_below(place, own):
            continue
        for folder in (place, *place.parents):
            holds_run = (folder / ".hydra").is_dir() or (folder == place and "output_dir" in node)
            if holds_run or folder == place:
                require_free(folder, config, key=key, names=LEAVES if holds_run else SHARED)
        if ("dirpath" in node or "output_dir" in node) and place not in locked:
            locked.add(place)
            place.mkdir(parents=True, exist_ok=True)
            lock(place, locks)


def is_below(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it."""
    return folder.resolve() in (path.resolve(), *path.resolve().parents)


def clear(folder: Path) -> None:
    """Remove what an earlier run has left in a folder, and nothing else."""
    for path in [path for pattern in LEAVES for path in folder.glob(pattern)]:
        if path.is_file() or path.is_symlink():
            path.unlink()


class Job(NamedTuple):
    """One job of a sweep, by the name of its folder; its value is the optimized metric, where it measured one."""

    name: str
    overrides: list[str]
    value: float | None
    outcome: str


def done_before(folder: Path, config: Mapping[str, Any]) -> float | None:
    """The optimized metric of a job that an earlier start of the same sweep has completed; nothing if none has.

    The folder of a job with another configuration is refused.
    """
    if not agrees(read_config(folder), config):
        require_free(folder, config, names=(*LEAVES, LOG))
        return None
    result = read_json(folder / RESULT, None)
    value = (result or {}).get(config["optimized_metric"])
    return None if result is None else math.nan if value is None else float(value)


def agrees(saved: Any, now: Any) -> bool:
    """Whether a saved configuration is that of now, in which what is counted in the data may be null still."""
    if isinstance(saved, dict) and isinstance(now, dict):
        saved, now = ({str(key): value for key, value in content.items()} for content in (saved, now))
        return saved.keys() == now.keys() and all(agrees(saved[key], now[key]) for key in now)
    return now is None or saved == now


def read_jobs(folder: Path, metric: str) -> list[Job]:
    """The jobs below a sweep's folder, the best first, then those without a value."""
    jobs = []
    for path in sorted(folder.glob("**/.hydra/overrides.yaml")):
        job = path.parent.parent
        result = read_json(job / RESULT, None)
        overrides = [str(override) for override in read_yaml(path)]
        planned = result is None and read_config(job).get("dry_run")
        outcome = "planned" if planned else "failed" if result is None else "done"
        jobs.append(Job(str(job.relative_to(folder)), overrides, (result or {}).get(metric), outcome))
    sign = -1 if direction(metric) == "max" else 1
    return sorted(jobs, key=lambda job: math.inf if job.value is None or math.isnan(job.value) else sign * job.value)


def report_sweep(folder: Path, metric: str) -> None:
    """Print the jobs in lines of the terminal and keep them as CSV, with the way to run again what is missing."""
    jobs = read_jobs(folder, metric)
    if len(jobs) < 2:
        return
    shared = set.intersection(*(set(job.overrides) for job in jobs))
    print(f"\njob  {metric:12} overrides")
    for job in jobs:
        value = f"{job.value:.4f}" if job.value is not None else "-" if job.outcome == "done" else job.outcome
        line = f"{job.name:>3}  {value:12} {' '.join(given for given in job.overrides if given not in shared)}"
        print(printable(line if len(line) <= columns() else f"{line[: columns() - 1]}…"))
    head = ["job", metric, "outcome", "overrides"]
    write_table(folder / TABLE, [head, *([job.name, job.value, job.outcome, *job.overrides] for job in jobs)])
    print(f"Files: {folder}")
    if any(job.outcome == "failed" for job in jobs):
        print(f"To run again what is missing, add hydra.sweep.dir={folder} to the same command line.")
