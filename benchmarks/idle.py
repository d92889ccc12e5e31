"""What does survival cost while nothing happens? ``python -m benchmarks.idle``.

Host time per micro-batch beside stock Lightning, for models of 10, 100 and 600 modules whose step costs
nothing: on a GPU the step of a small model is bound by the host, so this is what its users wait for. Stock
Lightning, stock Lightning again (the control), stock Lightning with a callback that does nothing, the loader mode
without and with survival, and the step mode take turns, a window of 4 micro-batches each; on one rank, and on two under
``DistributedDataParallel`` (gloo), of which the first is timed. On one rank loader mode may add 75 µs at 10 modules, 90
at 100, 250 at 600 (350 with BatchNorm), and survival 35 of them. Exits with 1 if a median is above that.
"""

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.output import as_text, conclude, empty_table, options
from benchmarks.processes import run_on_ranks, write_as_first_rank
from benchmarks.trainers import quiet, quiet_trainer
from benchmarks.turns import Stopwatch, bouts
from lightning_ga import AutoAccumulate

MICRO, FACTOR, WIDTH = 2, 4, 4
WARM_UP = 4  # windows of each bout that are not counted
ALLOWED = {10: 75e-6, 100: 90e-6, 600: 250e-6}  # seconds that loader mode may add on one rank, by modules
ALLOWED_WITH_BATCH_NORM = {600: 350e-6}
ALLOWED_SURVIVAL = 35e-6  # of these, what loader mode adds to itself with on_oom="raise"
STOCK = "stock Lightning"
AGAIN, EMPTY = "stock Lightning again", "an empty callback"
KINDS = {
    "layer, SGD": {"batch_norm": False},
    "batch, SGD": {"batch_norm": True},
    "layer, AdamW": {"batch_norm": False, "adam": True},
}
RAISE = 'loader mode, on_oom="raise"'
STEP = "step mode"
MODES = {RAISE: "loader", "loader mode": "loader", STEP: "step"}
PROGRAMS = (STOCK, AGAIN, EMPTY, *MODES)


class Layers(pl.LightningModule):
    """A chain of layers that take next to no time."""

    def __init__(self, modules: int, *, batch_norm: bool, adam: bool) -> None:
        super().__init__()
        self.adam = adam
        other = (lambda: nn.BatchNorm1d(WIDTH)) if batch_norm else (lambda: nn.LayerNorm(WIDTH))
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) if i % 2 == 0 else other() for i in range(modules)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters()) if self.adam else torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(watch: Stopwatch, *, name: str, modules: int, windows: int, batch_norm: bool, adam: bool = False) -> None:
    """Train a fresh model for some windows, on this rank of all."""
    ranks, settings = int(os.environ.get("WORLD_SIZE", "1")), dict[str, Any]()
    if ranks > 1:
        settings = {"devices": ranks, "strategy": DDPStrategy(process_group_backend="gloo")}
    data = TensorDataset(torch.randn(MICRO * FACTOR * windows * ranks, WIDTH))
    batch, program = MICRO, {"callbacks": [watch], "accumulate_grad_batches": FACTOR}
    if name == EMPTY:
        program["callbacks"] = [pl.Callback(), watch]
    if name in MODES:
        ours = AutoAccumulate(
            MICRO * FACTOR * ranks,
            micro_batch_size=MICRO,
            micro_batching=MODES[name],
            batch_norm="ignore",
            on_oom="raise" if name == RAISE else "split",
            verify=False,
        )
        program = {"callbacks": [ours, watch]}
        batch = MICRO * FACTOR if name == STEP else MICRO
    trainer = quiet_trainer(max_epochs=1, **settings, **program)
    trainer.fit(Layers(modules, batch_norm=batch_norm, adam=adam), DataLoader(data, batch_size=batch))


def bouts_of(modules: int, kind: str, number: int, windows: int) -> list[dict[str, Any]]:
    """Processor seconds of each window of each program, bout by bout."""
    given: dict[str, Any] = {"modules": modules, "windows": windows + WARM_UP, **KINDS[kind]}
    programs = {n: (partial(fit, name=n, **given), 1 if n == STEP else FACTOR) for n in PROGRAMS}
    return [{n: one[n]["cpu"] for n in programs} for one in bouts(programs, number, WARM_UP, seed=modules)]


def allowed_seconds(ranks: int, modules: int, kind: str) -> float | None:
    """Return what loader mode may add; ``None`` where nothing is asked."""
    if ranks != 1:
        return None
    return (ALLOWED_WITH_BATCH_NORM if KINDS[kind]["batch_norm"] else {}).get(modules, ALLOWED.get(modules))


def summarize(bouts: Sequence[Mapping[str, Sequence[float]]], allowed: float | None) -> list[dict[str, Any]]:
    """Medians per micro-batch, and what each program takes more than stock Lightning in the same round.

    Examples:
        >>> bouts = [{STOCK: [4.0], AGAIN: [4.4], EMPTY: [4.4], RAISE: [4.4], "loader mode": [4.8], "step mode": [4.0]}]
        >>> summarize(bouts, allowed=0.1)[3]
        {'name': 'loader mode', 'seconds': 1.2, 'added_seconds': 0.2, 'survival_seconds': 0.1, 'met': False}
    """
    rows = []
    for name in PROGRAMS[1:]:
        seconds = statistics.median(second for one in bouts for second in one[name]) / FACTOR
        row = {"name": name, "seconds": seconds, "added_seconds": _added(bouts, name, STOCK)}
        if name == "loader mode":
            row["survival_seconds"] = _added(bouts, name, RAISE)
        rows.append({key: round(value, 9) if isinstance(value, float) else value for key, value in row.items()})
        asked = name == "loader mode" and allowed is not None
        over = asked and (row["added_seconds"] > (allowed or 0.0) or row["survival_seconds"] > ALLOWED_SURVIVAL)
        rows[-1]["met"] = not over if asked else None
    return rows


def _added(bouts: Sequence[Mapping[str, Sequence[float]]], name: str, beside: str) -> float:
    return statistics.median(a - b for one in bouts for a, b in zip(one[name], one[beside])) / FACTOR


def table(cells: Sequence[dict[str, Any]]) -> Table:
    shown = empty_table(("n", "modules"), ("stock", "again", "empty", "raise", "loader", "step", "surv.", "most"))
    for cell in cells:
        added = [f"{_us(row['added_seconds'])}{' NO' if row['met'] is False else ''}" for row in cell["rows"]]
        (survival,) = (row["survival_seconds"] for row in cell["rows"] if "survival_seconds" in row)
        allowed = "–" if cell["allowed_seconds"] is None else f"{1e6 * cell['allowed_seconds']:.0f}"
        stock = f"{1e6 * cell['stock_seconds']:,.0f}"
        shown.add_row(str(cell["ranks"]), f"{cell['modules']} {cell['kind']}", stock, *added, _us(survival), allowed)
    return shown


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:+.0f}"


def text(record: Mapping[str, Any]) -> str:
    return as_text(
        table(record["cells"]),
        f"Processor time per micro-batch in µs on n ranks: stock Lightning's, and what is added to it by stock "
        f"Lightning once more, by a callback that does nothing, and by AutoAccumulate: cutting in the loader with "
        f"on_oom='raise', in the loader, and in the step; of loader mode, what survival takes (surv., at most "
        f"{1e6 * ALLOWED_SURVIVAL:.0f}); and the most that loader mode may add. Medians of {record['windows']} windows "
        f"of {FACTOR} micro-batches, each beside one of the other program; one thread; load average "
        f"{record['load_average']:.1f}.",
    )


def measure(ranks: int, modules: int, kind: str, *, number: int, windows: int) -> dict[str, Any]:
    """One cell of the table."""
    given = modules, kind, number, windows
    found = bouts_of(*given) if ranks == 1 else run_on_ranks(ranks, "benchmarks.idle", "--on-rank", *given)
    stock = statistics.median(second for one in found for second in one[STOCK]) / FACTOR
    allowed = allowed_seconds(ranks, modules, kind)
    cell = {"ranks": ranks, "modules": modules, "kind": kind, "stock_seconds": stock, "allowed_seconds": allowed}
    return {**cell, "rows": summarize(found, allowed)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("idle", __doc__)
    parser.add_argument("--bouts", type=int, default=5, help="bouts of fresh models")
    parser.add_argument("--windows", type=int, default=40, help="windows of each program a bout")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="ranks")
    parser.add_argument("--on-rank", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--modules", type=int, nargs="*", default=[10, 100, 600], help="sizes")
    settings = parser.parse_args(arguments)
    quiet()
    if settings.on_rank:
        modules, kind, number, windows, written = settings.on_rank
        write_as_first_rank(partial(bouts_of, int(modules), kind, int(number), int(windows)), Path(written))
    start = time.perf_counter()
    cells = [
        measure(ranks, modules, kind, number=settings.bouts, windows=settings.windows)
        for ranks in settings.ranks
        for modules in settings.modules
        for kind in KINDS
    ]
    record = {
        "cells": cells,
        "windows": settings.bouts * settings.windows,
        "load_average": os.getloadavg()[1],
        "seconds": round(time.perf_counter() - start, 1),
    }
    missed = [f"{cell['modules']} {cell['kind']}" for cell in cells if any(row["met"] is False for row in cell["rows"])]
    return conclude("idle", record, text, missed)


if __name__ == "__main__":
    raise SystemExit(main())
