"""How long does a window take on several ranks? ``python -m benchmarks.exchange``.

Ten layers of 1024², whose 40 MiB of gradients gloo ranks of this machine exchange. Stock Lightning under DDP, stock
Lightning again (the control) and ``AutoAccumulate`` take turns, a window each, in several bouts of fresh models. With
as many ranks as cores no message overlaps with a backward pass, so all additional work shows.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.output import Record, benchmark, shown
from benchmarks.processes import apart
from benchmarks.trainers import Module, mean_square
from benchmarks.turns import Clocks, RanksStopwatch, Stopwatch, fit, in_bouts, pooled_median, ratio, with_interval

LAYERS, WIDTH, MICRO = 10, 1024, 32
WARM_UP = 8  # micro-batches of each bout that are not counted
ALLOWED = 1.02
STOCK, AGAIN, OURS = "stock", "again", "ours"
# If memory goes back to the system or not, by chance, a window of either program takes 500 page faults more or less.
KEEPS_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def train(watch: Stopwatch, ours: Mapping[str, Any] | None, factor: int, windows: int) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    data = TensorDataset(torch.randn(MICRO * factor * windows * int(os.environ["WORLD_SIZE"]), WIDTH))
    fit(watch, Module(layers, partial(torch.optim.SGD, lr=1e-3), mean_square), data, MICRO, factor, ours)


def of_all_ranks(factor: int, windows: int, number: int) -> list[dict[str, Clocks]]:
    """Return the seconds of every window, bout by bout: by the clock of this rank, and on the processors of all."""
    warm_up = 1 + ceil(WARM_UP / factor)
    given: dict[str, Any] = {"factor": factor, "windows": ceil(windows / number) + warm_up}
    programs = {STOCK: None, AGAIN: None, OURS: {"verify": False}}
    fits = {name: partial(train, ours=ours, **given) for name, ours in programs.items()}
    bouts = [*in_bouts(fits, number, warm_up, watch=RanksStopwatch)]
    for clocks in (clocks for one in bouts for clocks in one.values()):
        seconds = torch.tensor(clocks["cpu"], dtype=torch.float64)
        torch.distributed.all_reduce(seconds)
        clocks["cpu"] = seconds.tolist()
    return bouts


def measured(ranks: int, factor: int, windows: int, number: int) -> dict[str, Any]:
    rounds = round(windows * 22 / (ranks * (factor + 1.5)))  # every cell takes about the same time
    bouts = apart(of_all_ranks, factor, rounds, number, ranks=ranks, env=KEEPS_MEMORY)
    cell: dict[str, Any] = {"ranks": ranks, "factor": factor, "windows": sum(len(one[STOCK]["wall"]) for one in bouts)}
    cell["stock_seconds"] = pooled_median(one[STOCK]["wall"] for one in bouts)
    for name in (AGAIN, OURS):
        cell |= ratio(bouts, name, STOCK, "wall", name) | ratio(bouts, name, STOCK, "cpu", f"{name}_cpu")
    return cell


def text(record: Record) -> str:
    rows = []
    for cell in record["cells"]:
        ratios = (with_interval(cell, AGAIN), with_interval(cell, OURS, ALLOWED), with_interval(cell, f"{OURS}_cpu"))
        rows.append((f"{cell['ranks']}, {cell['factor']}", f"{1e3 * cell['stock_seconds']:.0f}", *ratios))
    windows = [cell["windows"] for cell in record["cells"]]
    return shown(
        ("n, k",),
        ("ms", "stock again", "AutoAccumulate", "processor"),
        rows,
        f"Milliseconds of a window of k micro-batches on n ranks in stock Lightning under DDP (gloo, one thread a "
        f"rank), for {LAYERS} layers of {WIDTH}², and medians of the ratios to stock Lightning's window of the same "
        f"round, with 95 % confidence, over {min(windows)} to {max(windows)} rounds; at most {ALLOWED} is allowed. "
        f"Processor: AutoAccumulate's time of all threads of all ranks, as a ratio too; load average "
        f"{record['load_average']:.1f}.",
    )


def measure(
    windows: int = 36, bouts: int = 4, ranks: Sequence[int] = (2, 4), factors: Sequence[int] = (1, 4)
) -> dict[str, Any]:
    cells = [measured(n, factor, windows, bouts) for n in ranks for factor in factors]
    missed = [f"{cell['ranks']} ranks, factor {cell['factor']}" for cell in cells if cell[OURS] > ALLOWED]
    return {"cells": cells, "windows": windows, "missed": missed}


main = benchmark("exchange", __doc__, measure, text, quick={"windows": 1, "bouts": 1, "ranks": (2,), "factors": (4,)})

if __name__ == "__main__":
    raise SystemExit(main())
