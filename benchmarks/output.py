"""What every benchmark has: options, a table of 80 columns, targets, and JSON with every number."""

import argparse
import io
import json
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.trainers import quiet

RESULTS = Path(__file__).parent / "results"
WIDTH = 80
MET = {True: "yes", False: "NO", None: "–"}  # a target, or none
Record = Mapping[str, Any]
Measure, Text = Callable[..., dict[str, Any]], Callable[[Record], str]
Main = Callable[[Sequence[str] | None], int]


def parsed(
    name: str,
    doc: str | None,
    function: Callable[..., Any],
    arguments: Sequence[str] | None,
    quick: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read the options of ``python -m benchmarks.NAME``: the parameters of a function, and ``--quick``."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc, formatter_class=raw)
    if quick:
        small = ", ".join(f"{parameter}={value}" for parameter, value in quick.items())
        parser.add_argument("--quick", action="store_true", help=f"{small}; writes no results")
    for parameter, default in ((each.name, each.default) for each in signature(function).parameters.values()):
        kind: dict[str, Any] = {"type": type(default)}
        if isinstance(default, tuple):
            kind = {"type": type(default[0]) if default else int, "nargs": "*"}
        if default is False:
            kind = {"action": "store_true"}
        parser.add_argument(f"--{parameter.replace('_', '-')}", default=default, help=f"default: {default}", **kind)
    return vars(parser.parse_args(arguments))


def benchmark(name: str, doc: str | None, measure: Measure, text: Text, quick: Mapping[str, Any]) -> Main:
    """Make the ``main`` of a benchmark: it measures, prints, writes JSON, and returns 1 if a target is missed."""

    def main(arguments: Sequence[str] | None = None) -> int:
        options = parsed(name, doc, measure, arguments, quick)
        is_quick = options.pop("quick")
        quiet()
        start = time.perf_counter()
        record = measure(**{**options, **(quick if is_quick else {})})
        record |= {"load_average": os.getloadavg()[1], "seconds": round(time.perf_counter() - start, 1)}
        print(f"\r{text(record)}\n{record['seconds']} s")
        if not is_quick:
            print(f"{write_json(name, record).name}; its page: python -m benchmarks.quote")
        missed = record.get("missed", ())
        print(*(f"MISSED {each}\n" for each in missed), sep="", end="")
        return judged(record.get("targets", ())) or int(bool(missed))

    return main


@dataclass(frozen=True, slots=True)
class Target:  # what must hold of ours
    what: str
    value: float
    met: bool
    asked: str


def at_most(what: str, value: float, limit: float) -> Target:
    """Return a target that NaN misses, too."""
    return Target(what, value, value <= limit, f"at most {limit:.3g}" if limit else "none")


def at_least(what: str, value: float, limit: float) -> Target:
    return Target(what, value, value >= limit, f"at least {limit:.3g}")


def plain(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """Return targets as they are written to JSON."""
    return [asdict(target) for target in targets]


def judged(targets: Iterable[Record]) -> int:
    """Print each target in a line, and return 1 if one is missed."""
    met = []
    for target in targets:
        met.append(target["met"])
        print(f"{'met   ' if target['met'] else 'MISSED'} {target['what']}: {target['value']:.3g}, {target['asked']}")
    return int(not all(met))


def lacks_cuda(name: str) -> bool:
    """Tell whether there is no CUDA device, and print it."""
    if torch.cuda.is_available():
        return False
    print(f"benchmarks.{name} needs a CUDA device, and PyTorch sees none.", file=sys.stderr)
    return True


def environment() -> dict[str, Any]:
    """Return what the numbers depend on: versions, processor, threads."""
    return {
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "lightning", "accelerate", "timm")},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} logical CPUs",
        "threads": torch.get_num_threads(),
    }


def installed(package: str) -> str | None:
    """Return the version of a package, ``None`` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_json(name: str, record: Record, folder: Path | None = None) -> Path:
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **record}, indent=1, ensure_ascii=False) + "\n")
    return path


def read_json(name: str, folder: Path | None = None) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(((folder or RESULTS) / f"{name}.json").read_text())
    return record


def shown(texts: Iterable[str], numbers: Iterable[str], rows: Iterable[Iterable[str]], caption: str = "") -> str:
    """Return a table with columns of text, then of numbers, and a caption below."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for titles, side in ((texts, "left"), (numbers, "right")):
        for title in titles:
            table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return as_text(table, caption)


def as_text(table: Table, caption: str = "") -> str:
    console = Console(width=WIDTH, highlight=False, color_system=None, file=io.StringIO())
    console.print(table)
    below = [part for line in caption.splitlines() for part in textwrap.wrap(line, WIDTH)]
    lines = console.file.getvalue().splitlines() + below  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def error(value: float | None) -> str:
    """Return a relative error in a few characters: a percentage if it is larger than rounding.

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
