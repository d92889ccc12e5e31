"""Train every client's programs in every mode: ``PYTHONPATH=tests python -m clients [WORD …]``."""

import logging
import os
import sys
import tempfile
import time
import warnings
from importlib import import_module
from pkgutil import iter_modules

import torch

from clients import programs, report
from clients.modes import Row, try_modes
from clients.program import Program


def main(words: list[str]) -> int:
    """Print the table of the programs whose titles hold one of the words; 1 if a row is wrong."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    rows: list[Row] = []
    for program in chosen(words):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache  # limits are looked for anew, and none is left behind
            rows += try_modes(program)
        print(f"{program.title}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    versions = report.found_versions()
    print(report.text(rows, versions))
    report.write(report.merged(rows) if words else rows, versions)
    print(report.details(rows))
    wrong = sum(row.verdict.startswith("WRONG") for row in rows)
    print(f"\n{len(rows)} rows, {wrong} wrong")
    return 1 if wrong else 0


def chosen(words: list[str]) -> list[Program]:
    """Programs of all clients, or those that are asked for."""
    found: list[Program] = []
    for file in iter_modules(programs.__path__):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found += import_module(f"clients.programs.{file.name}").PROGRAMS
    return [program for program in found if not words or any(word in program.title for word in words)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
