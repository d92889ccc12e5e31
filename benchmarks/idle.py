"""What does survival cost while nothing happens? ``python -m benchmarks.idle``.

Host time per micro-batch for models whose step costs nothing: on a GPU the step of a small model is bound by the host.
Stock Lightning, stock Lightning again (the control) and with a callback that does nothing, loader mode without and with
survival, and step mode take turns, a window each; on one rank, and on two under DDP, of which the first is timed.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.output import Record, benchmark, shown
from benchmarks.processes import apart
from benchmarks.trainers import Module, mean_square
from benchmarks.turns import Stopwatch, fit, in_bouts, pooled_median

MICRO, FACTOR, WIDTH = 2, 4, 4
WARM_UP = 4  # windows of each bout that are not counted
# Seconds that loader mode may add on one rank, by modules, and with BatchNorm.
ALLOWED = {(10, False): 75e-6, (10, True): 75e-6, (100, False): 90e-6, (100, True): 90e-6}
ALLOWED |= {(600, False): 250e-6, (600, True): 350e-6}
ALLOWED_SURVIVAL = 35e-6  # of these, what loader mode adds to itself with on_oom="raise"
STOCK, AGAIN, EMPTY = "stock Lightning", "stock Lightning again", "an empty callback"
RAISE, LOADER, STEP = 'loader mode, on_oom="raise"', "loader mode", "step mode"
PROGRAMS = (STOCK, AGAIN, EMPTY, RAISE, LOADER, STEP)
OURS: dict[str, Any] = {"batch_norm": "ignore", "verify": False}
MODES = {RAISE: {**OURS, "on_oom": "raise"}, LOADER: OURS, STEP: {**OURS, "micro_batching": "step"}}
SGD = partial(torch.optim.SGD, lr=1e-3)
KINDS: Mapping[str, tuple[type[nn.Module], Any]] = {
    "layer, SGD": (nn.LayerNorm, SGD),
    "batch, SGD": (nn.BatchNorm1d, SGD),
    "layer, AdamW": (nn.LayerNorm, torch.optim.AdamW),
}


def train(watch: Stopwatch, name: str, modules: int, kind: str, windows: int) -> None:
    """Train a chain of layers that take next to no time for some windows, on this rank of all."""
    norm, optimizer = KINDS[kind]
    layers = (norm(WIDTH) if number % 2 else nn.Linear(WIDTH, WIDTH) for number in range(modules))
    module = Module(nn.Sequential(*layers), optimizer, mean_square)
    data = TensorDataset(torch.randn(MICRO * FACTOR * windows * int(os.environ.get("WORLD_SIZE", "1")), WIDTH))
    fit(watch, module, data, MICRO, FACTOR, MODES.get(name), callbacks=[pl.Callback()] if name == EMPTY else [])


def bouts_of(modules: int, kind: str, bouts: int, windows: int) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"modules": modules, "kind": kind, "windows": windows + WARM_UP}
    programs = {name: partial(train, name=name, **given) for name in PROGRAMS}
    return [{name: one[name]["cpu"] for name in programs} for one in in_bouts(programs, bouts, WARM_UP)]


def summarize(bouts: Sequence[Mapping[str, Sequence[float]]], allowed: float | None) -> list[dict[str, Any]]:
    """Medians per micro-batch, and what each program takes more than stock Lightning in the same round.

    Examples:
        >>> bouts = [{STOCK: [4.0], AGAIN: [4.4], EMPTY: [4.4], RAISE: [4.4], LOADER: [4.8], STEP: [4.0]}]
        >>> summarize(bouts, allowed=0.1)[3]
        {'name': 'loader mode', 'seconds': 1.2, 'added_seconds': 0.2, 'survival_seconds': 0.1, 'met': False}
    """
    rows = []
    for name in PROGRAMS[1:]:
        row: dict[str, Any] = {"name": name, "seconds": pooled_median(one[name] for one in bouts) / FACTOR}
        row["added_seconds"] = _added(bouts, name, STOCK)
        met = None
        if name == LOADER:
            row["survival_seconds"] = _added(bouts, name, RAISE)
            if allowed is not None:
                met = row["added_seconds"] <= allowed and row["survival_seconds"] <= ALLOWED_SURVIVAL
        rows.append({key: value if key == "name" else round(value, 9) for key, value in row.items()} | {"met": met})
    return rows


def _added(bouts: Sequence[Mapping[str, Sequence[float]]], name: str, beside: str) -> float:
    return statistics.median(a - b for one in bouts for a, b in zip(one[name], one[beside])) / FACTOR


def text(record: Record) -> str:
    rows = []
    for cell in record["cells"]:
        added = [f"{1e6 * row['added_seconds']:+.0f}{' NO' if row['met'] is False else ''}" for row in cell["rows"]]
        (survival,) = (row["survival_seconds"] for row in cell["rows"] if "survival_seconds" in row)
        allowed = "–" if cell["allowed_seconds"] is None else f"{1e6 * cell['allowed_seconds']:.0f}"
        names = str(cell["ranks"]), f"{cell['modules']} {cell['kind']}", f"{1e6 * cell['stock_seconds']:,.0f}"
        rows.append((*names, *added, f"{1e6 * survival:+.0f}", allowed))
    return shown(
        ("n", "modules"),
        ("stock", "again", "empty", "raise", "loader", "step", "surv.", "most"),
        rows,
        f"Processor time per micro-batch in µs on n ranks: stock Lightning's, and what is added to it by stock "
        f"Lightning once more, by a callback that does nothing, and by AutoAccumulate: cutting in the loader with "
        f"on_oom='raise', in the loader, and in the step; of loader mode, what survival takes (surv., at most "
        f"{1e6 * ALLOWED_SURVIVAL:.0f}); and the most that loader mode may add. Medians of {record['windows']} windows "
        f"of {FACTOR} micro-batches, each beside one of the other program; one thread; load average "
        f"{record['load_average']:.1f}.",
    )


def measured(ranks: int, modules: int, kind: str, bouts: int, windows: int) -> dict[str, Any]:
    given = modules, kind, bouts, windows
    found = bouts_of(*given) if ranks == 1 else apart(bouts_of, *given, ranks=ranks)
    allowed = ALLOWED.get((modules, "batch" in kind)) if ranks == 1 else None
    cell = {"ranks": ranks, "modules": modules, "kind": kind, "allowed_seconds": allowed}
    stock = pooled_median(one[STOCK] for one in found) / FACTOR
    return {**cell, "stock_seconds": stock, "rows": summarize(found, allowed)}


def measure(
    bouts: int = 5, windows: int = 40, ranks: Sequence[int] = (1, 2), modules: Sequence[int] = (10, 100, 600)
) -> dict[str, Any]:
    cells = [measured(n, size, kind, bouts, windows) for n in ranks for size in modules for kind in KINDS]
    missed = [f"{one['modules']} {one['kind']}" for one in cells if any(row["met"] is False for row in one["rows"])]
    return {"cells": cells, "windows": bouts * windows, "missed": missed}


main = benchmark("idle", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
