"""The command line: ``python -m lightning_ga.train`` and ``lightning-ga`` are the same program.

Tested in tests/app/test_train.py.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_ga.app.folders import FOLDER, done_before
from lightning_ga.app.mistakes import explain
from lightning_ga.app.other_tools import check_words, config_folder, is_override
from lightning_ga.app.own_process import run_apart
from lightning_ga.app.settings import check_typed, read_settings, shown
from lightning_ga.app.terminal import Interrupted, is_first_rank, report_error, silence, warn
from lightning_ga.errors import UserError

TRACEBACK = "--traceback"


class FailedJobError(Exception):
    """A failed job of a sweep whose sentence has been printed."""


class PackageConfig(SearchPathPlugin):
    """Lets Hydra look for files in the package's ``conf`` last, after those of the user."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder."""
        search_path.append("lightning_ga", f"file://{config_folder()}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line, by default that of the process; exit with 1 after a mistake, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:  # Hydra's parser would print its own
        print(f"lightning_ga {version('lightning_ga')}")
        return
    show_traceback = TRACEBACK in arguments
    try:
        check_words(arguments, options())
        arguments = in_order([argument for argument in arguments if argument != TRACEBACK])
        if str(Path.cwd()) not in sys.path:  # for the user's own package, as ``python -m`` does
            sys.path.insert(0, str(Path.cwd()))
        run_hydra(arguments, show_traceback)
    except FailedJobError:
        raise SystemExit(1) from None
    except (KeyboardInterrupt, Interrupted) as end:
        interrupted = end if isinstance(end, Interrupted) else Interrupted(signal.SIGINT)
        report_error(str(interrupted))
        raise SystemExit(interrupted.code) from None
    except BrokenPipeError:  # whoever reads the output has read enough
        silence(sys.stdout)
        raise SystemExit(141) from None
    except Exception as error:
        if show_traceback:
            raise
        report_error(explain(error, arguments, options()), error)
        raise SystemExit(1) from None


def run_hydra(arguments: Sequence[str], show_traceback: bool) -> None:
    """Let Hydra compose the configuration and call a job with it, once for each combination of a sweep."""
    Plugins.instance().register(PackageConfig)
    given = [*arguments, *rank_overrides(arguments, os.environ)]
    HydraConfig.instance().cfg = None  # of an earlier call in this process
    parsing = patch.object(argparse.ArgumentParser, "error", refuse)  # which would print nine lines of usage

    def job(cfg: DictConfig) -> float | None:
        parsing.stop()
        own = HydraConfig.get()
        is_sweep = own.mode == RunMode.MULTIRUN
        try:
            return run_job(cfg, given)
        except Exception as error:
            if show_traceback:
                raise
            of_job = f"job {own.job.num} ({own.job.override_dirname}): " if is_sweep else ""
            report_error(of_job + explain(error, given, options()), error, trace=True)
            if is_sweep:
                raise FailedJobError from error
            raise SystemExit(1) from None  # within the job: Hydra would add a line of its own

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors, and prints nothing
    parsing.start()
    try:
        with patch.object(sys, "argv", [sys.argv[0], *given]):
            hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="train")(job)()
    finally:
        parsing.stop()
        ran: Any = HydraConfig.instance().cfg  # in this process if other processes ran the jobs, too: OwnFolder sets it
        if ran is not None and ran.hydra.mode == RunMode.MULTIRUN:
            from lightning_ga.app.sweep_report import report_sweep  # imports matplotlib: not before it is needed

            report_sweep(Path(ran.hydra.sweep.dir))
        sys.stdout.flush()  # here, because Hydra exits after --help


def refuse(_: argparse.ArgumentParser, message: str) -> NoReturn:
    """Refuse options in one sentence, as any other mistake."""
    raise UserError(f"{message}: --help shows examples, --hydra-help all options.")


def run_job(cfg: DictConfig, arguments: Sequence[str]) -> float | None:
    """Do what a configuration says; return the optimized metric, for sweepers."""
    own = HydraConfig.get()
    unread = check_typed(cfg, arguments, {**dict.fromkeys(own.runtime.choices, ()), **options()})  # of the user, too
    settings = read_settings(cfg)
    for sentence in unread:
        warn(sentence)
    is_sweep = own.mode == RunMode.MULTIRUN
    folder = Path(own.runtime.output_dir)
    result = None
    if is_sweep:
        result = done_before(folder, shown(cfg))
    if result is None:
        from lightning_ga.app import build, tasks  # import torch: not before it is needed

        if is_sweep and build.starts_processes(cfg):
            result = run_apart(folder, arguments)
        else:
            result = tasks.run_task(cfg, settings)
    value: float | None = result.get(str(result.get("optimized_metric")))
    return value


def options() -> dict[str, list[str]]:
    """The options of every group of the package."""
    found: dict[str, list[str]] = {}
    for file in sorted(config_folder().glob("*/[!_]*.yaml")):
        found.setdefault(file.parent.name, []).append(file.stem)
    del found["hydra"]
    return found


def in_order(arguments: Sequence[str]) -> list[str]:
    """The arguments with options first, as Hydra expects them, and ``--config-path`` in place of ``--config-dir``."""
    words: list[str] = []
    groups = options()
    for word in arguments:
        option, _, value = word.partition("=")
        if words and words[-1] in ("--config-dir", "-cd"):
            option = words.pop()
            value = word
        if option in ("--config-dir", "-cd") and option != word:
            if not value:  # Hydra would run without it
                raise UserError(f"{option} names no folder.")
            word = f"--config-path={Path(value).expanduser().absolute()}"
        if option in groups and value in ("null", "None"):
            word = f"~{option}"
        elif option in groups and value.isdecimal():
            raise UserError(f"{word} names no option. There are: {', '.join(groups[option])}.")
        words.append(word)
    return sorted(words, key=is_override)


def rank_overrides(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Overrides for all ranks but the first: they tell and keep nothing, in no folder that their own clock names."""
    folder = f"hydra.run.dir=${{paths.output_root}}/{FOLDER}"
    added = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null", folder]
    keys = [argument.lstrip("+").partition("=")[0] for argument in arguments]
    if is_first_rank(environment):
        return []
    return [one for one in added if one.partition("=")[0] not in keys]


if __name__ == "__main__":
    main()
