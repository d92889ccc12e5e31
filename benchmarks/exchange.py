"""How long does a window take on several ranks? ``python -m benchmarks.exchange``.

Ten layers of 1024², whose 40 MiB of gradients gloo ranks of this machine exchange. Stock Lightning under
``DistributedDataParallel``, stock Lightning again (the control) and ``AutoAccumulate`` take turns, a window each, in
an order that is drawn for every round, in several bouts of fresh models. The first eight micro-batches of each do not
count: in them a retry's snapshot learns what a step changes. A window is timed from the moment that all
ranks begin to the moment that all are done. Exits with 1 if a median ratio to stock Lightning is above 1.02. Messages
overlap with a backward pass only where cores are left to both: with as many ranks as cores, all that shows is what is
done in addition. Processor time of all threads of all ranks tells that on a busy machine too.
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
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
from benchmarks.turns import Clocks, RanksStopwatch, Stopwatch, interval, pooled_median, ratios, take_turns
from lightning_ga import AutoAccumulate

LAYERS, WIDTH, MICRO = 10, 1024, 32
LEARNING = 8  # micro-batches in which AutoAccumulate compares all weights to learn what a step changes
BOUTS = 4  # of fresh models
ALLOWED = 1.02
STOCK, OURS = "stock", "ours"
PROGRAMS = (STOCK, "again", OURS)
Bout = Mapping[str, Clocks]  # by program
RANKS, FACTORS = (2, 4), (1, 4)
# As it returns memory to the system or not, by chance, a window of either program takes 500 page faults more or less.
KEEPS_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)}


class Layers(pl.LightningModule):
    """A chain of wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(watch: Stopwatch, *, name: str, factor: int, windows: int) -> None:
    """Train a fresh model for some windows, on this rank of all."""
    ranks = int(os.environ["WORLD_SIZE"])
    data = TensorDataset(torch.randn(MICRO * factor * windows * ranks, WIDTH))
    program: dict[str, Any] = {"callbacks": [watch], "accumulate_grad_batches": factor}
    if name == OURS:
        ours = AutoAccumulate(MICRO * factor * ranks, micro_batch_size=MICRO, verify=False)
        program = {"callbacks": [ours, watch]}
    trainer = quiet_trainer(max_epochs=1, devices=ranks, strategy=DDPStrategy(process_group_backend="gloo"), **program)
    trainer.fit(Layers(), DataLoader(data, batch_size=MICRO))


def of_all_ranks(factor: int, windows: int) -> list[list[Bout]]:
    """Seconds of every window, bout by bout, of each rank."""
    quiet()
    warm_up = 1 + ceil(LEARNING / factor)  # windows of a bout that are not counted
    fits = [partial(fit, name=name, factor=factor, windows=windows // BOUTS + warm_up) for name in PROGRAMS]
    bouts = []
    for seed in range(BOUTS):
        watches = take_turns(fits, [factor] * len(fits), watch=RanksStopwatch, seed=seed)
        bouts.append({n: {"wall": w.wall[warm_up:], "cpu": w.cpu[warm_up:]} for n, w in zip(PROGRAMS, watches)})
    found: list[list[Bout]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, bouts)
    return found


def joined(ranks: Sequence[Sequence[Bout]]) -> list[Bout]:
    """Bouts of all ranks as one: the first one's clock, and the processor time of all.

    Examples:
        >>> joined([[{"ours": {"wall": [3.0], "cpu": [1.0]}}], [{"ours": {"wall": [3.1], "cpu": [2.0]}}]])
        [{'ours': {'wall': [3.0], 'cpu': [3.0]}}]
    """
    return [
        {n: {"wall": one[0][n]["wall"], "cpu": list(map(sum, zip(*(rank[n]["cpu"] for rank in one))))} for n in one[0]}
        for one in zip(*ranks)
    ]


def summarize(bouts: Sequence[Bout]) -> dict[str, Any]:
    """Median of a stock window, and median ratios to the stock window of the same round, with 95 % intervals.

    Examples:
        >>> window = {"wall": [1.0, 2.0], "cpu": [2.0, 4.0]}
        >>> found = summarize([{"stock": window, "again": window, "ours": {"wall": [1.0, 1.8], "cpu": [3.0, 6.0]}}])
        >>> found["stock_seconds"], found["again"], found["ours"], found["ours_95"], found["ours_cpu"]
        (1.5, 1.0, 0.95, (0.95, 0.95), 1.5)
    """
    found: dict[str, Any] = {"stock_seconds": pooled_median([one[STOCK]["wall"] for one in bouts])}
    for name in PROGRAMS[1:]:
        for clock, key in (("wall", name), ("cpu", f"{name}_cpu")):
            found_ratios = ratios(bouts, name, clock, STOCK)
            low, high = interval(found_ratios)
            found |= {key: round(pooled_median(found_ratios), 4), f"{key}_95": (round(low, 4), round(high, 4))}
    return found


def rounds_of(ranks: int, factor: int, windows: int) -> int:
    """Windows of each program for as much time as that many of four ranks at factor 4 take.

    Examples:
        >>> rounds_of(4, 4, 40), rounds_of(2, 1, 40)
        (40, 176)
    """
    return round(windows * 22 / (ranks * (factor + 1.5)))


def table(cells: Sequence[Mapping[str, Any]]) -> Table:
    shown = empty_table((), ("ranks", "factor", "stock, ms", "stock again", "AutoAccumulate", "processor"))
    for cell in cells:
        ratios = [_with_interval(cell, key) for key in ("again", "ours", "ours_cpu")]
        ratios[1] += "" if cell["ours"] <= ALLOWED else " NO"
        shown.add_row(str(cell["ranks"]), str(cell["factor"]), f"{1e3 * cell['stock_seconds']:.0f}", *ratios)
    return shown


def _with_interval(cell: Mapping[str, Any], key: str) -> str:
    low, high = cell[f"{key}_95"]
    return f"{cell[key]:.3f} ± {max(high - cell[key], cell[key] - low):.3f}"


def text(record: Mapping[str, Any]) -> str:
    windows = [cell["windows"] for cell in record["cells"]]
    return as_text(
        table(record["cells"]),
        f"Time of a window of {LAYERS} layers of {WIDTH}² under DDP (gloo, one thread a rank), and medians of "
        f"the ratios to stock Lightning's window of the same round, with 95 % confidence, over "
        f"{min(windows)} to {max(windows)} rounds after the first {LEARNING} micro-batches; processor: "
        f"AutoAccumulate's time on it, of all threads of all ranks. "
        f"{os.cpu_count()} cores; load average {record['load_average']:.1f}.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("exchange", __doc__)
    parser.add_argument("--windows", type=int, default=36, help="windows of each program, more of short ones")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="ranks")
    parser.add_argument("--factors", type=int, nargs="*", default=FACTORS, help="factors")
    parser.add_argument("--on-rank", nargs=3, help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    if settings.on_rank:
        factor, windows, written = settings.on_rank
        write_as_first_rank(partial(of_all_ranks, int(factor), int(windows)), Path(written))
    start, cells = time.perf_counter(), []
    for ranks in settings.ranks:
        for factor in settings.factors:
            given = "--on-rank", factor, rounds_of(ranks, factor, settings.windows)
            bouts = joined(run_on_ranks(ranks, "benchmarks.exchange", *given, env=KEEPS_MEMORY))
            windows = sum(len(one[STOCK]["wall"]) for one in bouts)
            cells.append({"ranks": ranks, "factor": factor, "windows": windows, **summarize(bouts)})
    load, seconds = os.getloadavg()[1], round(time.perf_counter() - start, 1)
    record = {"cells": cells, "windows": settings.windows, "load_average": load, "seconds": seconds}
    missed = (f"{cell['ranks']} ranks, factor {cell['factor']}" for cell in cells if cell["ours"] > ALLOWED)
    return conclude("exchange", record, text, missed)


if __name__ == "__main__":
    raise SystemExit(main())
