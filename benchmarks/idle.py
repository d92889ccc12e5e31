"""What does the callback cost while nothing happens? ``python -m benchmarks.idle``.

Processor time per micro-batch of models whose step costs nothing: on a GPU the host limits the step of a small model.
Stock Lightning, stock Lightning again (the control), loader mode without and with survival, and step mode take turns, a
window each; on one rank, and on two under DDP, of which the first is timed.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.output import Record, benchmark, shown
from benchmarks.processes import apart
from benchmarks.trainers import Module, mean_square
from benchmarks.turns import AGAIN, STOCK, Stopwatch, fit, in_bouts, pooled_median

MICRO, FACTOR, WIDTH = 2, 4, 4
WARM_UP = 4  # windows of each bout that are not counted
ALLOWED, ALLOWED_SURVIVAL = 0.10, 0.04  # shares of stock Lightning's time that loader mode may add on one rank
RAISE, LOADER, STEP = 'loader mode, on_oom="raise"', "loader mode", "step mode"
OURS: dict[str, Any] = {"batch_norm": "ignore", "verify": False}
PROGRAMS: Mapping[str, dict[str, Any] | None] = {
    STOCK: None,
    AGAIN: None,
    RAISE: {**OURS, "on_oom": "raise"},
    LOADER: OURS,
    STEP: {**OURS, "micro_batching": "step"},
}
SGD = partial(torch.optim.SGD, lr=1e-3)
KINDS: Mapping[str, tuple[type[nn.Module], Any]] = {
    "layer, SGD": (nn.LayerNorm, SGD),
    "batch, SGD": (nn.BatchNorm1d, SGD),
    "layer, AdamW": (nn.LayerNorm, torch.optim.AdamW),
}


def train(watch: Stopwatch, name: str, modules: int, kind: str, windows: int) -> None:
    """Train a chain of small layers for some windows, on this rank of all."""
    norm, optimizer = KINDS[kind]
    layers = (norm(WIDTH) if number % 2 else nn.Linear(WIDTH, WIDTH) for number in range(modules))
    module = Module(nn.Sequential(*layers), optimizer, mean_square)
    data = TensorDataset(torch.randn(MICRO * FACTOR * windows * int(os.environ.get("WORLD_SIZE", "1")), WIDTH))
    fit(watch, module, data, MICRO, FACTOR, PROGRAMS[name])


def bouts_of(modules: int, kind: str, bouts: int, windows: int) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"modules": modules, "kind": kind, "windows": windows + WARM_UP}
    fits = {name: partial(train, name=name, **given) for name in PROGRAMS}
    return [{name: one[name]["cpu"] for name in fits} for one in in_bouts(fits, bouts, WARM_UP)]


def summarize(bouts: Sequence[Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Return seconds per micro-batch that each program adds to stock Lightning in the same round, as medians.

    Examples:
        >>> summarize([{STOCK: [4.0], AGAIN: [4.4], RAISE: [4.4], LOADER: [4.8], STEP: [4.0]}])[2]
        {'name': 'loader mode', 'added_seconds': 0.2, 'survival_seconds': 0.1}
    """
    rows = [{"name": name, "added_seconds": _added(bouts, name, STOCK)} for name in PROGRAMS if name != STOCK]
    for row in rows:
        if row["name"] == LOADER:
            row["survival_seconds"] = _added(bouts, LOADER, RAISE)
    return rows


def _added(bouts: Sequence[Mapping[str, Sequence[float]]], name: str, beside: str) -> float:
    differences = (a - b for one in bouts for a, b in zip(one[name], one[beside]))
    return round(statistics.median(differences) / FACTOR, 9)


def shares(cell: Record) -> dict[str, float]:
    """Return the seconds that each program adds, and survival, as shares of stock Lightning's time in the same run."""
    found = {row["name"]: row["added_seconds"] for row in cell["rows"]}
    (found["survival"],) = (row["survival_seconds"] for row in cell["rows"] if row["name"] == LOADER)
    return {name: seconds / cell["stock_seconds"] for name, seconds in found.items()}


def within(cell: Record) -> bool:
    found = shares(cell)
    return cell["ranks"] > 1 or (found[LOADER] <= ALLOWED and found["survival"] <= ALLOWED_SURVIVAL)


def text(record: Record) -> str:
    rows = []
    for cell in record["cells"]:
        found = shares(cell)
        added = [f"{found[name]:+.3f}" for name in (AGAIN, RAISE, LOADER, STEP, "survival")]
        added[2] += "" if within(cell) else " NO"
        names = str(cell["ranks"]), f"{cell['modules']} {cell['kind']}", f"{1e6 * cell['stock_seconds']:,.0f}"
        rows.append((*names, *added))
    return shown(
        ("n", "modules"),
        ("stock, µs", "again", "raise", "loader", "step", "survival"),
        rows,
        f"Processor time per micro-batch on n ranks: stock Lightning's in µs, and shares of it that are added by stock "
        f"Lightning once more and by AutoAccumulate: in the loader with on_oom='raise', in the loader, and in the "
        f"step. On one rank the loader may add {ALLOWED:.2f}, of which survival (the difference of loader and raise) "
        f"{ALLOWED_SURVIVAL:.2f}. Medians of {record['windows']} windows of {FACTOR} micro-batches, each beside one of "
        f"the other program; one thread; load average {record['load_average']:.1f}.",
    )


def measured(ranks: int, modules: int, kind: str, bouts: int, windows: int) -> dict[str, Any]:
    given = modules, kind, bouts, windows
    found = bouts_of(*given) if ranks == 1 else apart(bouts_of, *given, ranks=ranks)
    stock = pooled_median(one[STOCK] for one in found) / FACTOR
    return {"ranks": ranks, "modules": modules, "kind": kind, "stock_seconds": stock, "rows": summarize(found)}


def measure(
    bouts: int = 5, windows: int = 40, ranks: Sequence[int] = (1, 2), modules: Sequence[int] = (10, 100, 600)
) -> dict[str, Any]:
    cells = [measured(n, size, kind, bouts, windows) for n in ranks for size in modules for kind in KINDS]
    missed = [f"{one['modules']} {one['kind']}" for one in cells if not within(one)]
    return {"cells": cells, "windows": bouts * windows, "missed": missed}


main = benchmark("idle", __doc__, measure, text, quick={"bouts": 1, "windows": 4, "ranks": (1,), "modules": (10,)})

if __name__ == "__main__":
    raise SystemExit(main())
