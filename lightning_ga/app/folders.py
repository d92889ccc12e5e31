"""Folders of runs and sweeps: each belongs to one run, while Hydra itself would write into any folder."""

import os
from collections.abc import Mapping, Sequence
from functools import partialmethod
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_ga.app.mistakes import explain
from lightning_ga.app.run_files import PLAN, RESULT, SWEEP, read_config, read_json, read_yaml
from lightning_ga.app.settings import Config
from lightning_ga.app.terminal import is_first_rank, report_error
from lightning_ga.errors import UserError

LEAVES = (RESULT, PLAN, "checkpoints/*.ckpt", "csv/metrics.csv")  # files that show that a folder contains a run
FOLDER = "${oc.select:run.folder,.}"  # of all ranks but the first, below the root of outputs
STARTED_AGAIN = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")  # the same run, by its scheduler


class OwnFolder(Callback):
    """Refuses the folder of another run or sweep before Hydra writes into it: ``hydra.callbacks`` names this class."""

    def on_run_start(self, config: DictConfig, kind: str = "run", **kwargs: Any) -> None:
        """Look at the folder of a run, or of a sweep."""
        HydraConfig.instance().set_config(config)
        try:
            folder = Path(config.hydra[kind].dir or "")
            if folder == Path():
                raise UserError(f"hydra.{kind}.dir is this folder, and Hydra would write into it: name another one.")
            if is_first_rank():
                if kind == "run" and continues(config):
                    set_aside(folder)
                else:
                    require_free(folder, config)
                before = OmegaConf.select(read_yaml(folder / SWEEP), "hydra.overrides.task")
                if before not in (None, config.hydra.overrides.task):
                    raise UserError(f"{str(folder)!r} contains the sweep {' '.join(before)}: give another folder.")
        except Exception as error:  # Hydra only warns of errors of callbacks
            report_error(explain(error), error)
            raise SystemExit(1) from None

    on_multirun_start = partialmethod(on_run_start, kind="sweep")


def continues(config: Mapping[str, Any]) -> bool:
    """Whether a fit goes on from the newest checkpoint of its own folder: it says so, or its scheduler starts it again.

    The folder must be the same at each start and on each rank: not one that is named by the clock.
    """
    is_auto = config.get("ckpt_path") == "auto"
    is_restart = any(os.environ.get(name, "0") != "0" for name in STARTED_AGAIN)
    if str(config.get("task", "fit")) != "fit" or not (is_auto or config.get("elastic") or is_restart):
        return False
    own: Any = HydraConfig.get()
    words: Any = OmegaConf.to_container(own.overrides.hydra, resolve=False)
    typed = [word for word in words if word.startswith("hydra.run.dir=") and FOLDER not in word]
    run: Any = config.get("run") or {}
    has_folder = bool(typed or run.get("folder") or own.mode == RunMode.MULTIRUN)
    if is_auto and not has_folder:
        raise UserError("ckpt_path=auto looks in the run's folder, and each start has another: give hydra.run.dir=…")
    return has_folder


def set_aside(folder: Path) -> None:
    """Rename the folder of a run that ended before its first checkpoint, so that it begins anew in a new one.

    Raises:
        UserError: If there are checkpoints, and none is whole.
    """
    if any(folder.rglob("*.ckpt")):
        from lightning_ga.checkpoints import newest_checkpoint  # imports torch: not before it is needed

        newest_checkpoint(folder)
    elif files_of_run(folder, LEAVES):
        earlier = [*folder.parent.glob(f"{escape(folder.name)}-before-*")]
        place = folder.with_name(f"{folder.name}-before-{len(earlier) + 1}")
        folder.rename(place)
        print(f"{folder} contained a run without checkpoints, which is in {place} now.")


def files_of_run(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of a folder that match one of the patterns."""
    return [*chain.from_iterable(map(folder.glob, patterns))]


def require_free(folder: Path, config: Mapping[str, Any], *, leaves: Sequence[str] = LEAVES) -> None:
    """Refuse a folder that contains a run, unless ``ckpt_path`` resumes that very run."""
    held = [path.name for path in files_of_run(folder, leaves)]
    if not held or continues(config):
        return
    wanted = config.get("ckpt_path") or "/"  # nowhere
    resuming = ["hpc_ckpt_*.ckpt"]  # which SLURM's requeue leaves
    if wanted in ("last", "best"):
        resuming += [f"**/checkpoints/{wanted}.ckpt", "**/checkpoints/last.ckpt"]  # this one tells which is the best
    is_inside = Path(wanted).resolve().is_relative_to(folder.resolve())
    if str(config.get("task", "fit")) == "fit" and (is_inside or files_of_run(folder, resuming)):
        return
    raise UserError(
        f"{str(folder)!r} contains files of a run ({', '.join(held[:3])}): give the new run another folder, or "
        f"resume with task=fit ckpt_path={folder}."
    )


def roots_of_runs(config: Mapping[str, Any]) -> list[Path]:
    """Folders below which runs are: those of ``paths``, and those of ``hydra.run.dir`` and ``hydra.sweep.dir``.

    The latter begin where a folder is named by the clock; if none is, the folder that contains the run's own.
    """
    paths: Any = config.get("paths") or {}
    roots = [Path(paths.get("output_root", "outputs")), Path(paths.get("sweep_root", "multirun"))]
    own = HydraConfig.get()
    written: Any = OmegaConf.to_container(own, resolve=False)
    for kind in ("run", "sweep"):
        _, _, from_the_clock_on = written[kind]["dir"].partition("${now:")  # logs/${now:%Y}/${now:%H}: below logs
        root = Path(getattr(own, kind).dir).parents[from_the_clock_on.count("/")]
        if not Path.cwd().is_relative_to(root.resolve()):  # that would be the whole project
            roots.append(root)
    return [*dict.fromkeys(roots)]


def done_before(folder: Path, config: Config) -> Mapping[str, Any] | None:
    """The result of a job that an earlier start of the same sweep has completed; the folder of another is refused."""
    if read_config(folder) != config:
        require_free(folder, config)
        return None
    return read_json(folder / RESULT) or None
