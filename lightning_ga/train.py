"""The command line: ``python -m lightning_ga.train`` and ``lightning-ga`` are the same program.

A user's mistake ends in one sentence and exit code 1. What is built from a configuration in ``conf/`` is in
``app/build.py``, what is then done with it in ``app/tasks.py``; both are imported when a job starts, so that all that
needs no training answers at once.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import hydra
from hydra._internal import utils
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_ga.app.composed import (
    check_arguments,
    checked_composition,
    completed_values,
    is_first_rank,
    options_first,
    rank_overrides,
    replaced,
    typed_targets,
)
from lightning_ga.app.errors import chain, explain
from lightning_ga.app.folders import done_before, own_folders, report_sweep, require_free_folders
from lightning_ga.app.terminal import Interrupted, printable_everywhere, silence
from lightning_ga.app.values import Config, as_written, check_values, resolved
from lightning_ga.errors import RankError, UserError, printable

TRACEBACK = "--traceback"


class ReportedError(Exception):
    """A failed job of a sweep whose sentence has been printed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line, by default that of the process.

    Raises:
        SystemExit: With code 1 after a user's mistake, told in one sentence; 130 after Ctrl-C, 143 after SIGTERM.
    """
    printable_everywhere()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:  # Hydra's parser would print its own
        print(f"lightning_ga {version('lightning_ga')}")
        return
    show_traceback = TRACEBACK in arguments or os.environ.get("HYDRA_FULL_ERROR") == "1"
    arguments = options_first([argument for argument in arguments if argument != TRACEBACK])
    try:
        run_hydra(arguments, show_traceback)
        sys.stdout.flush()
    except ReportedError:
        raise SystemExit(1) from None
    except (KeyboardInterrupt, Interrupted) as end:
        interrupted = end if isinstance(end, Interrupted) else Interrupted(signal.SIGINT)
        print_error(str(interrupted))
        raise SystemExit(interrupted.code) from None
    except BrokenPipeError:  # whoever reads the output has read enough
        silence(sys.stdout)
        raise SystemExit(141) from None
    except Exception as error:
        sentence = None if show_traceback else explain(error, top_level_keys())
        if sentence is None:
            raise
        if isinstance(error, OSError) and not error.filename:  # perhaps of the output, which is flushed at the end
            silence(sys.stdout)
        print_error(sentence, error)
        raise SystemExit(1) from None


def run_hydra(arguments: Sequence[str], show_traceback: bool) -> None:
    """Let Hydra compose the configuration and call the job with it, once for each combination of a sweep."""
    check_arguments(arguments, groups())
    jobs = Jobs(arguments, show_traceback=show_traceback)
    given = [*arguments, *rank_overrides(arguments, os.environ)]
    program = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="train")
    raised = replaced((sys, "argv", [sys.argv[0], *given]), (utils, "run_and_report", lambda job: job()))  # not printed
    checked = checked_composition(own=config_folder(), known_keys=top_level_keys(), typed=given)
    with raised, checked, own_folders(starts=not {"--help", "-h"} & {*given}), completed_values():
        try:
            program(jobs.run)()
        finally:
            if jobs.sweep is not None:
                report_sweep(*jobs.sweep)


class Jobs:
    """What Hydra calls with each configuration; the folder and the metric of a sweep, once a job of one ran."""

    def __init__(self, arguments: Sequence[str], *, show_traceback: bool) -> None:
        self._allow = typed_targets(arguments)
        self._show_traceback = show_traceback
        self.sweep: tuple[Path, str] | None = None

    def run(self, cfg: DictConfig) -> float | None:
        """Check a configuration and do what it says; return the optimized metric, for sweepers."""
        multirun = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            config = resolved(cfg)
            written = as_written(cfg, config)
            folder, before = HydraConfig.get().runtime.output_dir, None
            if multirun:
                self.sweep = Path(HydraConfig.get().sweep.dir), str(config["optimized_metric"])
                before = done_before(Path(folder), written)
            return self._run(config, written, folder) if before is None else before
        except Exception as error:
            sentence = None if self._show_traceback else explain(error)
            if sentence is None:
                raise
            job = HydraConfig.get().job
            print_error(f"job {job.num} ({job.override_dirname}): {sentence}" if multirun else sentence, error)
            if multirun:
                raise ReportedError from error
            raise SystemExit(1) from None  # within the job: Hydra would add a line of its own

    def _run(self, config: Config, written: Config, folder: str) -> float | None:
        check_values(config)
        hydra_config = HydraConfig.get()
        searches = hydra_config.mode == RunMode.MULTIRUN and "BasicSweeper" not in hydra_config.sweeper._target_
        with ExitStack() as locks:
            if is_first_rank(os.environ):
                require_free_folders(config, folder, locks)
            from lightning_ga.app.tasks import run_task  # imports torch: not before it is needed

            value = None if searches and config["dry_run"] else run_task(config, written, self._allow)
        if searches and value is None:
            raise UserError(
                f"A search compares jobs by optimized_metric={config['optimized_metric']}, and this one measures "
                "none: use task=fit without dry_run=true, and leave validation on."
            )
        return value


def config_folder() -> Path:
    """``conf``: inside the package in a wheel, beside it in the source tree."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def groups() -> list[str]:
    """Groups of options."""
    return sorted(path.name for path in config_folder().iterdir() if path.is_dir())


def top_level_keys() -> list[str]:
    """Groups and keys that ``train.yaml`` knows."""
    keys = OmegaConf.load(config_folder() / "train.yaml")
    return [*groups(), *(str(key) for key in keys if key != "defaults")]


def print_error(sentence: str, error: BaseException | None = None) -> None:
    """A user's mistake, told by the first rank; what befell one rank alone, by that one."""
    alone = any(isinstance(link, RankError) for link in chain(error))
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    rank = getattr(getattr(rank_zero, "rank_zero_only", None), "rank", None)
    if rank is None:
        rank = 0 if is_first_rank(os.environ) else 1
    if rank == 0 or alone:
        print(f"Error{f' on rank {rank}' if rank else ''}: {printable(sentence)}", file=sys.stderr)


if __name__ == "__main__":
    main()
