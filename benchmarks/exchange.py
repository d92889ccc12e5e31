"""How long does a window take on several ranks? ``python -m benchmarks.exchange``.

Ten layers of 1024², whose 40 MiB of gradients gloo ranks of this machine exchange. Stock Lightning under DDP, stock
Lightning again (the control) and ``AutoAccumulate`` take turns, a window each, in several bouts of fresh models. With
as many ranks as cores, messages overlap with no backward pass, and all that shows is what is done in addition.
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
from benchmarks.turns import Clocks, RanksStopwatch, Stopwatch, fit, in_bouts, pooled_median, ratio

LAYERS, WIDTH, MICRO = 10, 1024, 32
LEARNING = 8  # micro-batches in which AutoAccumulate compares all weights to learn what a step changes; not counted
BOUTS = 4  # of fresh models
ALLOWED = 1.02
STOCK, AGAIN, OURS = "stock", "again", "ours"
# As it returns memory to the system or not, by chance, a window of either program takes 500 page faults more or less.
KEEPS_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def train(watch: Stopwatch, ours: Mapping[str, Any] | None, factor: int, windows: int) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    data = TensorDataset(torch.randn(MICRO * factor * windows * int(os.environ["WORLD_SIZE"]), WIDTH))
    fit(watch, Module(layers, partial(torch.optim.SGD, lr=1e-3), mean_square), data, MICRO, factor, ours)


def of_all_ranks(factor: int, windows: int) -> list[dict[str, Clocks]]:
    """Seconds of every window, bout by bout: by the clock of this rank, and on the processors of all."""
    warm_up = 1 + ceil(LEARNING / factor)
    given: dict[str, Any] = {"factor": factor, "windows": windows // BOUTS + warm_up}
    programs = {STOCK: None, AGAIN: None, OURS: {"verify": False}}
    fits = {name: partial(train, ours=ours, **given) for name, ours in programs.items()}
    bouts = [*in_bouts(fits, BOUTS, warm_up, watch=RanksStopwatch)]
    for clocks in (clocks for one in bouts for clocks in one.values()):
        seconds = torch.tensor(clocks["cpu"], dtype=torch.float64)
        torch.distributed.all_reduce(seconds)
        clocks["cpu"] = seconds.tolist()
    return bouts


def measured(ranks: int, factor: int, windows: int) -> dict[str, Any]:
    rounds = round(windows * 22 / (ranks * (factor + 1.5)))  # as much time as four ranks at factor 4 take for them
    bouts = apart(of_all_ranks, factor, rounds, ranks=ranks, env=KEEPS_MEMORY)
    cell: dict[str, Any] = {"ranks": ranks, "factor": factor, "windows": sum(len(one[STOCK]["wall"]) for one in bouts)}
    cell["stock_seconds"] = pooled_median(one[STOCK]["wall"] for one in bouts)
    for name in (AGAIN, OURS):
        cell |= ratio(bouts, name, STOCK, "wall", name) | ratio(bouts, name, STOCK, "cpu", f"{name}_cpu")
    return cell


def text(record: Record) -> str:
    rows = []
    for cell in record["cells"]:
        ratios = []
        for key in (AGAIN, OURS, "ours_cpu"):
            low, high = cell[f"{key}_95"]
            ratios.append(f"{cell[key]:.3f} ± {max(high - cell[key], cell[key] - low):.3f}")
        ratios[1] += "" if cell[OURS] <= ALLOWED else " NO"
        rows.append((str(cell["ranks"]), str(cell["factor"]), f"{1e3 * cell['stock_seconds']:.0f}", *ratios))
    windows = [cell["windows"] for cell in record["cells"]]
    return shown(
        (),
        ("ranks", "factor", "stock, ms", "stock again", "AutoAccumulate", "processor"),
        rows,
        f"Time of a window of {LAYERS} layers of {WIDTH}² under DDP (gloo, one thread a rank), and medians of "
        f"the ratios to stock Lightning's window of the same round, with 95 % confidence, over "
        f"{min(windows)} to {max(windows)} rounds after the first {LEARNING} micro-batches; processor: "
        f"AutoAccumulate's time on it, of all threads of all ranks. "
        f"{os.cpu_count()} cores; load average {record['load_average']:.1f}.",
    )


def measure(windows: int = 36, ranks: Sequence[int] = (2, 4), factors: Sequence[int] = (1, 4)) -> dict[str, Any]:
    cells = [measured(n, factor, windows) for n in ranks for factor in factors]
    missed = [f"{cell['ranks']} ranks, factor {cell['factor']}" for cell in cells if cell[OURS] > ALLOWED]
    return {"cells": cells, "windows": windows, "missed": missed}


main = benchmark("exchange", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
