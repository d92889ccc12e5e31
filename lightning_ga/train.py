"""The command line: ``python -m lightning_ga.train`` and ``lightning-ga`` are the same program.

Its configuration lies in ``conf/``; ``--help`` shows examples, groups and keys. This file holds the
way in and out: a user's mistake ends in one sentence and exit code 1. What is built from a
configuration is in ``build.py``, what is then done with it in ``tasks.py``.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_ga.app.allowlist import guarded_hydra
from lightning_ga.app.errors import EXPECTED, chain, explain
from lightning_ga.app.progress import quiet_lightning
from lightning_ga.app.tasks import TASKS, run_task
from lightning_ga.errors import RankError, UserError

FULL_ERROR = "HYDRA_FULL_ERROR"  # set: Hydra raises errors instead of printing them
TRACEBACK = "--traceback"
WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")


class ReportedError(Exception):
    """A failed job of a sweep whose sentence has been printed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        argv: Overrides and options; those of the process if left out.

    Raises:
        SystemExit: With code 1 after a user's mistake, told in one sentence.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = TRACEBACK in arguments or os.environ.get(FULL_ERROR) == "1"
    arguments = options_first([argument for argument in arguments if argument != TRACEBACK])
    program = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="train")
    try:
        refuse_rerun(arguments)
        arguments += of_one_rank(arguments, os.environ)
        with process_state(arguments), guarded_hydra():
            program(make_job(show_traceback))()
    except ReportedError:
        raise SystemExit(1) from None
    except EXPECTED as error:
        if show_traceback:
            raise
        fail(error)


def make_job(show_traceback: bool) -> Callable[[DictConfig], float | None]:
    """What Hydra calls with each configuration; it returns the optimized metric."""

    def job(cfg: DictConfig) -> float | None:
        # Processes that the job starts must not inherit what is meant for this Hydra.
        os.environ.pop(FULL_ERROR, None)
        try:
            check_task(cfg.task)
            with quiet_lightning():
                return run_task(cfg)
        except EXPECTED as error:
            if show_traceback:
                raise
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                fail(error)  # within the job: Hydra would add a line of its own
            print_error(f"job {HydraConfig.get().job.num} ({HydraConfig.get().job.override_dirname}): {explain(error)}")
            raise ReportedError from error
        finally:
            os.environ[FULL_ERROR] = "1"

    return job


def check_task(task: str) -> None:
    """Refuse a task that does not exist."""
    if task not in TASKS:
        nearest = get_close_matches(str(task), TASKS, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "."
        raise UserError(f"task={task} does not exist{hint} The tasks: {', '.join(TASKS)}.")


def config_folder() -> Path:
    """``conf``: inside the package in a wheel, beside it in the source tree."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def top_level_keys() -> list[str]:
    """Groups and keys that ``train.yaml`` knows."""
    folder = config_folder()
    groups = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return [*groups, *(str(key) for key in OmegaConf.load(folder / "train.yaml") if key != "defaults")]


def options_first(arguments: Sequence[str]) -> list[str]:
    """Options before overrides: Hydra takes overrides in one piece only, and Lightning appends some for its ranks.

    Examples:
        >>> options_first(["model=mlp", "--config-dir", "mine", "seed=1"])
        ['--config-dir', 'mine', 'model=mlp', 'seed=1']
    """
    options, overrides, rest = [], [], iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        options.append(argument)
        if argument in WITH_VALUE:
            options += list(islice(rest, 1))
    return [*options, *overrides]


def of_one_rank(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Overrides for ranks that ``torchrun`` or ``srun`` has started: all but the first keep no folder of their own.

    Each process names its folder by its own clock. Ranks that Lightning starts are told the folder of the first.

    Examples:
        >>> of_one_rank(["trainer=ddp"], {"RANK": "1"})
        ['hydra.output_subdir=null', 'hydra/job_logging=none', 'hydra.run.dir=${paths.output_root}']
        >>> of_one_rank(["trainer=ddp"], {"RANK": "0"})
        []
    """
    names = ("RANK",) if "RANK" in environment else ("SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")
    first = all(environment.get(name, "0") == "0" for name in names)
    if first or any(argument.startswith(("hydra.output_subdir=", "hydra/job_logging=")) for argument in arguments):
        return []
    told = any(argument.startswith("hydra.run.dir=") for argument in arguments)
    folder = [] if told else ["hydra.run.dir=${paths.output_root}"]
    return ["hydra.output_subdir=null", "hydra/job_logging=none", *folder]


def refuse_rerun(arguments: Sequence[str]) -> None:
    """``--experimental-rerun`` unpickles a file: nothing here does."""
    if any(argument.startswith("--experimental-rerun") for argument in arguments):
        raise UserError("--experimental-rerun unpickles a file, which can run any code: give the overrides again.")


@contextmanager
def process_state(arguments: Sequence[str]) -> Iterator[None]:
    """Show Hydra these arguments, have it raise its errors, and put everything back."""
    argv, full_error = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = [argv[0], *arguments]
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.pop(FULL_ERROR)
        if full_error is not None:
            os.environ[FULL_ERROR] = full_error


def fail(error: BaseException) -> NoReturn:
    """One sentence on stderr, and exit code 1."""
    print_error(explain(error, top_level_keys()), alone=any(isinstance(link, RankError) for link in chain(error)))
    raise SystemExit(1) from None


def print_error(sentence: str, *, alone: bool = False) -> None:
    """A user's mistake, told by the first rank; what befell one rank ``alone``, by that one."""
    rank = getattr(rank_zero_only, "rank", 0)
    if rank == 0 or alone:
        print(f"Error{f' on rank {rank}' if rank else ''}: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    main()
