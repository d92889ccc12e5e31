"""Is the limit found, and in how many steps? ``python -m benchmarks.probe``.

Six models in several budgets; in each cell ours, Lightning's tuner (power and binsearch), Accelerate's
``find_executable_batch_size`` and torch-max-mem run the same training step and look for the largest micro-batch. The
true limit comes from steps too: it passes, and one sample more fails.
"""

import gc
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.output import Record, Target, at_least, at_most, benchmark, installed, plain, shown
from benchmarks.probing.cells import Cell, chosen, measured
from benchmarks.probing.devices import TRAINER
from benchmarks.probing.programs import BINSEARCH, NEEDS, OURS, PEERS

MOST_STEPS, FEWER = 5, 5
NAMES = {OURS: "ours", "power": "Lightning power", BINSEARCH: "Lightning binsearch"}
Cells = Sequence[Mapping[str, Any]]


def targets(cells: Cells, *, found: float = 1.0, most_steps: int = MOST_STEPS, errors: int = 0) -> list[Target]:
    fitting = [cell for cell in cells if cell["limit"]]
    if not fitting:
        return [Target("cells in which the model fits", 0, False, "at least one")]
    mine = [(cell, cell["programs"][OURS]) for cell in fitting]
    shares = [one["found"] / cell["limit"] for cell, one in mine]
    worst = max(shares, key=lambda share: abs(share - 1))
    exact = worst == 1 if found == 1 else min(shares) >= found
    return [
        Target("found ÷ limit, furthest from 1", worst if found == 1 else min(shares), exact, f"{found:.2f}"),
        at_most("training steps, most", max(one["steps"] for _, one in mine), most_steps),
        at_most("out-of-memory errors of ours, most", max(one["ooms"] for _, one in mine), errors),
        at_least("times fewer steps than binsearch, median", times(fitting, BINSEARCH, "steps"), FEWER),
        at_least("times less time than binsearch, median", times(fitting, BINSEARCH, "seconds"), FEWER),
    ]


def times(cells: Cells, program: str, quantity: str) -> float:
    """Return how many times as much a program took as ours, median over cells; NaN if no cell compares."""
    pairs = [(cell["programs"].get(program, {}).get(quantity), cell["programs"][OURS][quantity]) for cell in cells]
    ratios = [theirs / mine for theirs, mine in pairs if theirs is not None and mine]
    return statistics.median(ratios) if ratios else float("nan")


def against_binsearch(cells: Cells, caption: str = "") -> str:
    """Return a table with a row for each cell: ours beside the peer that looks for the limit itself."""
    rows: list[Sequence[str]] = []
    for cell in cells:
        mine, theirs = cell["programs"].get(OURS), cell["programs"].get(BINSEARCH)
        if not cell["limit"]:
            rows.append((_name(cell), f"{cell['gib']:g}", "does not fit"))
            continue
        left = (_share(mine, cell), str(mine["steps"]), _seconds(mine["seconds"]))
        right: tuple[str, ...] = ("n/a",)
        if theirs is not None:
            right = (_share(theirs, cell), str(theirs["steps"]), str(theirs["ooms"]), _seconds(theirs["seconds"]))
        rows.append((_name(cell), f"{cell['gib']:g}", f"{cell['limit']:,}", *left, *right))
    titles = ("GiB", "limit", "ours", "steps", "s", "binsearch", "steps", "OOMs", "s")
    return shown(("model",), titles, rows, caption)


def summary(cells: Cells, caption: str = "") -> str:
    rows: list[Sequence[str]] = []
    for name in (OURS, *PEERS):
        ran = [(cell, cell["programs"][name]) for cell in cells if cell["limit"] and name in cell["programs"]]
        if not ran:
            rows.append((NAMES.get(name, name), "n/a"))
            continue
        shares = [one["found"] / cell["limit"] for cell, one in ran]
        steps = [one["steps"] for _, one in ran]
        found = f"{statistics.median(shares):.2f} ({min(shares):.2f}–{max(shares):.2f})"
        counts = f"{statistics.median(steps):g}", str(max(steps)), str(sum(one["ooms"] for _, one in ran))
        ratios = (f"{times([cell for cell, _ in ran], name, quantity):.1f}" for quantity in ("steps", "seconds"))
        rows.append((NAMES.get(name, name), found, *counts, f"{sum(x['seconds'] or 0 for _, x in ran):.0f}", *ratios))
    titles = ("found ÷ limit", "steps", "most", "OOMs", "s", "× steps", "× s")
    return shown(("program",), titles, rows, caption)


def _name(cell: Mapping[str, Any]) -> str:
    return f"{cell['model']}{' *' if cell['kind'] == TRAINER else ''}"


def _share(one: Mapping[str, Any], cell: Mapping[str, Any]) -> str:
    return f"{one['found'] / cell['limit']:.2f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


THREADS = 2


def prepare() -> None:
    """Set the threads that the targets are for, and let collections of garbage skip what is loaded."""
    torch.set_num_threads(THREADS)
    gc.collect()
    gc.freeze()


def peers() -> dict[str, str | None]:
    return {name: installed(name) for name in ("lightning", *NEEDS.values())}


def run(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    records = []
    for number, cell in enumerate(cells, 1):
        print(f"\r\x1b[K{number} of {len(cells)}: {cell.model}, {cell.gib:g} GiB", end="", file=sys.stderr, flush=True)
        records.append(measured(cell))
    print("\r\x1b[K", end="", file=sys.stderr)
    return records


def text(record: Record) -> str:
    cells = record["cells"]
    peers = ", ".join(f"{name} {version or 'n/a'}" for name, version in record["peers"].items())
    above = summary(
        cells,
        "steps: median and most of a cell. seconds: sum over the cells that are timed. ×: how many times what ours "
        f"took, median over cells. Peers: {peers}.",
    )
    below = against_binsearch(
        cells,
        "From 16 GiB on tensors have no values and ours runs on them. There, and where steps take seconds, peers "
        "learn from an oracle what fits: their steps are counted, not timed.\n"
        "*: AutoAccumulate in a Trainer, in which no peer can search.",
    )
    return f"{above}\n\n{below}"


def measure(one_budget: bool = False) -> dict[str, Any]:
    prepare()
    cells = run(chosen(cuda=torch.cuda.is_available(), quick=one_budget))
    return {"peers": peers(), "targets": plain(targets(cells)), "cells": cells}


main = benchmark("probe", __doc__, measure, text, quick={"one_budget": True})

if __name__ == "__main__":
    raise SystemExit(main())
