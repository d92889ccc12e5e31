"""Rows that are ours: a training of the command line, in this process."""

import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from lightning_ga.app.run_files import RunFiles, read_run
from lightning_ga.train import main

QUIET = ("progress=none", "logger=csv", "trainer.log_every_n_steps=1")


def trained(folder: Path, overrides: Sequence[str]) -> RunFiles:
    """Do what ``python -m lightning_ga.train OVERRIDES`` does, and read the files that it leaves.

    Args:
        folder: Where the run's files and what it prints go.
        overrides: As they are typed.

    Raises:
        RuntimeError: If the run ends with an error, with the end of what it printed.
    """
    run, log = folder / "run", folder / "printed.txt"
    with log.open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            main([*QUIET, *overrides, f"hydra.run.dir={run}"])
            failed = False
        except SystemExit as end:
            failed = bool(end.code)
        finally:
            for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything leaves them to what runs next
                os.environ.pop(name, None)
    if failed:
        raise RuntimeError(f"{' '.join(overrides)}: {log.read_text(encoding='utf-8')[-2000:]}")
    return read_run(run)
