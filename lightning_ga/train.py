"""The command line: ``python -m lightning_ga.train`` and ``lightning-ga`` are the same program.

Its configuration lies in ``conf/``; ``--help`` shows examples, groups and keys. This file holds the
way in and out: a user's mistake ends in one sentence and exit code 1. What is built from a
configuration is in ``app/build.py``, what is then done with it in ``app/tasks.py``; both are imported
when a job starts, so that all that needs no training answers at once.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_ga.app.arguments import check_arguments, is_first_rank, options_first, rank_overrides, typed_targets
from lightning_ga.app.completion import completed_values
from lightning_ga.app.composed import checked_composition
from lightning_ga.app.errors import chain, explain, is_expected
from lightning_ga.app.folders import own_folders, require_free_folders
from lightning_ga.app.interrupts import Interrupted, sigterm_ends
from lightning_ga.app.sweep import done_before, report_sweep
from lightning_ga.app.terminal import printable_everywhere, wrapped_output
from lightning_ga.app.values import Config, as_written, check_values, resolved
from lightning_ga.errors import RankError, UserError, printable

FULL_ERROR = "HYDRA_FULL_ERROR"  # set: Hydra raises errors instead of printing them
TRACEBACK = "--traceback"


class ReportedError(Exception):
    """A failed job of a sweep whose sentence has been printed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line, by default that of the process.

    Raises:
        SystemExit: With code 1 after a user's mistake, told in one sentence; 130 after Ctrl-C, 143 after SIGTERM.
    """
    printable_everywhere(sys.stdout, sys.stderr)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:  # Hydra's parser would print its own
        print(f"lightning_ga {version('lightning_ga')}")
        return
    show_traceback = TRACEBACK in arguments or os.environ.get(FULL_ERROR) == "1"
    arguments = options_first([argument for argument in arguments if argument != TRACEBACK])
    try:
        with sigterm_ends():
            run_hydra(arguments, show_traceback)
    except ReportedError:
        raise SystemExit(1) from None
    except (KeyboardInterrupt, Interrupted) as end:
        interrupted = end if isinstance(end, Interrupted) else Interrupted(signal.SIGINT)
        print_error(str(interrupted))
        raise SystemExit(interrupted.code) from None
    except BrokenPipeError:  # whoever reads the output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except Exception as error:
        if show_traceback or not is_expected(error):
            raise
        fail(error)


def run_hydra(arguments: Sequence[str], show_traceback: bool) -> None:
    """Let Hydra compose the configuration and call the job with it, once for each combination of a sweep."""
    check_arguments(arguments, groups())
    jobs = Jobs(arguments, show_traceback=show_traceback)
    given = [*arguments, *rank_overrides(arguments, os.environ)]
    program = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="train")
    lines = wrapped_output() if "--help" in arguments else nullcontext()
    checked = checked_composition(own=config_folder(), known_keys=top_level_keys(), typed=given)
    with lines, process_state(given), checked, own_folders(starts=not {"--help", "-h"} & {*given}), completed_values():
        try:
            program(jobs.run)()
        finally:
            jobs.report()


class Jobs:
    """What Hydra calls with each configuration."""

    def __init__(self, arguments: Sequence[str], *, show_traceback: bool) -> None:
        self._allow = typed_targets(arguments)
        self._show_traceback = show_traceback
        self._sweep: tuple[Path, str] | None = None
        self._folders: list[str] = []

    def run(self, cfg: DictConfig) -> float | None:
        """Check a configuration and do what it says.

        Returns:
            The optimized metric, for sweepers.
        """
        # Processes that the job starts must not inherit what is meant for this Hydra.
        os.environ.pop(FULL_ERROR, None)
        try:
            config = resolved(cfg)
            written = as_written(cfg, config)
            self._enter_folder(HydraConfig.get().runtime.output_dir)
            before = self._done_before(written) if HydraConfig.get().mode == RunMode.MULTIRUN else None
            return self._run(config, written) if before is None else before
        except Exception as error:
            if self._show_traceback or not is_expected(error):
                raise
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                fail(error)  # within the job: Hydra would add a line of its own
            hydra_job = HydraConfig.get().job
            print_error(f"job {hydra_job.num} ({hydra_job.override_dirname}): {explain(error)}")
            raise ReportedError from error
        finally:
            os.environ[FULL_ERROR] = "1"

    def _done_before(self, config: Config) -> float | None:
        self._sweep = Path(HydraConfig.get().sweep.dir), str(config["optimized_metric"])
        return done_before(Path(HydraConfig.get().runtime.output_dir), config)

    def _enter_folder(self, folder: str) -> None:
        if folder in self._folders:
            raise UserError(f"hydra.sweep.subdir names {folder} for two jobs of this sweep: give each its own.")
        self._folders.append(folder)

    def _run(self, config: Config, written: Config) -> float | None:
        check_values(config)
        if is_first_rank(os.environ):
            require_free_folders(config, self._folders[-1])
        from lightning_ga.app.tasks import run_task  # imports torch: not before it is needed

        hydra_config = HydraConfig.get()
        searches = hydra_config.mode == RunMode.MULTIRUN and "BasicSweeper" not in hydra_config.sweeper._target_
        value = None if searches and config["dry_run"] else run_task(config, written, self._allow)
        if searches and value is None:
            raise UserError(
                f"A search compares jobs by optimized_metric={config['optimized_metric']}, and this one measures "
                "none: use task=fit without dry_run=true, and leave validation on."
            )
        return value

    def report(self) -> None:
        """Print the table of a sweep."""
        if self._sweep is not None:
            report_sweep(*self._sweep)


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
    alone = any(isinstance(link, RankError) for link in chain(error))
    print_error(explain(error, top_level_keys()), alone=alone)
    raise SystemExit(1) from None


def print_error(sentence: str, *, alone: bool = False) -> None:
    """A user's mistake, told by the first rank; what befell one rank ``alone``, by that one."""
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    rank = getattr(getattr(rank_zero, "rank_zero_only", None), "rank", None)
    if rank is None:
        rank = 0 if is_first_rank(os.environ) else 1
    if rank == 0 or alone:
        print(f"Error{f' on rank {rank}' if rank else ''}: {printable(sentence)}", file=sys.stderr)


if __name__ == "__main__":
    main()
