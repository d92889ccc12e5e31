"""How a benchmark shows what it measured: a table of 80 columns, and JSON with every number.

Of each, ``text`` makes table and legend of such a record, and ``main`` measures, shows and writes; it returns 1 if a
target is missed, and 2 where a CUDA device is needed and missing.
"""

import argparse
import io
import json
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
WIDTH = 80
MET = {True: "yes", False: "NO", None: "–"}  # a target, or none


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the description as it is written, and the default of each option."""


def options(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for the options of ``python -m benchmarks.NAME``."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description, formatter_class=_Help)


def conclude(
    name: str, record: Mapping[str, Any], text: Callable[[Mapping[str, Any]], str], missed: Iterable[str] = ()
) -> int:
    """Show a record and what it misses, and write it down; 1 if a target is missed."""
    seconds = f", {record['seconds']} s" if "seconds" in record else ""
    print(f"\r{text(record)}\n{write_json(name, record).name}{seconds}")
    told = [f"MISSED {each}" for each in missed]
    print(*told, sep="\n", end="\n" if told else "")
    return int(bool(told))


@dataclass(frozen=True, slots=True)
class Target:
    """What must hold of ours."""

    what: str
    value: float
    met: bool
    asked: str


def at_most(what: str, value: float, limit: float) -> Target:
    """A target that NaN misses, too."""
    return Target(what, value, value <= limit, f"at most {limit:.3g}" if limit else "none")


def at_least(what: str, value: float, limit: float) -> Target:
    """The same from below."""
    return Target(what, value, value >= limit, f"at least {limit:.3g}")


def judged(targets: Iterable[Mapping[str, Any]]) -> int:
    """Print targets, each in a line, and return 1 if one is missed."""
    met = []
    for target in targets:
        met.append(target["met"])
        print(f"{'met   ' if target['met'] else 'MISSED'} {target['what']}: {target['value']:.3g}, {target['asked']}")
    return int(not all(met))


def lacks_cuda(name: str) -> bool:
    """Say so where a benchmark needs a CUDA device and there is none."""
    if torch.cuda.is_available():
        return False
    print(f"benchmarks.{name} needs a CUDA device, and PyTorch sees none.", file=sys.stderr)
    return True


def environment() -> dict[str, Any]:
    """What the numbers depend on: versions, processor, threads."""
    return {
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "lightning", "accelerate", "timm")},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} logical CPUs",
        "threads": torch.get_num_threads(),
    }


def installed(package: str) -> str | None:
    """Version of a package, ``None`` where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_json(name: str, record: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Write a benchmark's record beside the others."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **record}, indent=1, ensure_ascii=False) + "\n")
    return path


def read_json(name: str, folder: Path | None = None) -> dict[str, Any]:
    """A record that was written before."""
    record: dict[str, Any] = json.loads(((folder or RESULTS) / f"{name}.json").read_text())
    return record


def empty_table(texts: Iterable[str], numbers: Iterable[str]) -> Table:
    """A table with columns of text, then of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for titles, side in ((texts, "left"), (numbers, "right")):
        for title in titles:
            table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    return table


def as_text(table: Table, caption: str = "") -> str:
    """A table as it looks in a terminal of 80 columns, and what is to be said below it."""
    console = Console(width=WIDTH, highlight=False, color_system=None, file=io.StringIO())
    console.print(table)
    below = [part for line in caption.splitlines() for part in textwrap.wrap(line, WIDTH)]
    lines = console.file.getvalue().splitlines() + below  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def error(value: float | None) -> str:
    """A relative error in a few characters: a percentage where it is no rounding.

    Examples:
        >>> error(0.5), error(0.0097), error(1.234e-16), error(None)
        ('50 %', '0.97 %', '1e-16', 'n/a')
    """
    if value is None:
        return "n/a"
    if value < 0.005:
        return f"{value:.0e}"
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:#.2g} %"
