"""What do the probe and the measurement of exactness cost at the start? ``python -m benchmarks.startup``.

Processor seconds of two epochs of a small model. Each process is a fork of one that has imported PyTorch and Lightning.
Stock Lightning, stock Lightning again (the control) and ``AutoAccumulate`` with and without its parts take turns.
"""

import gc
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.output import Record, benchmark, shown
from benchmarks.processes import forked
from benchmarks.trainers import Module, quiet_trainer

MICRO, FACTOR, SAMPLES = 64, 4, 1000
BUDGET = "500KiB"  # what a micro-batch of 64 fits in
STOCK, AGAIN, CALLBACK, PROBE, CHECK, BOTH = "stock", "again", "callback", "probe", "measurement", "both"
OURS: Mapping[str, dict[str, Any]] = {
    CALLBACK: {"micro_batch_size": MICRO, "verify": False},
    PROBE: {"memory_budget": BUDGET, "verify": False},
    CHECK: {"micro_batch_size": MICRO},
    BOTH: {"memory_budget": BUDGET},
}
# What is compared: a program, the program that it is compared with, and the most seconds that it may add.
ROWS: Mapping[str, tuple[str, str, float | None]] = {
    "stock Lightning again": (AGAIN, STOCK, None),
    "AutoAccumulate without both": (CALLBACK, STOCK, None),
    "the probe": (PROBE, CALLBACK, None),
    "the measurement": (CHECK, CALLBACK, 0.30),
    "AutoAccumulate": (BOTH, STOCK, 1.0),
}


def train(name: str, folder: Path) -> None:
    """Train by one program; everything that it imports or writes on the way is part of its cost."""
    os.environ |= {"XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)  # as installed packages, compiled once
    settings: dict[str, Any] = {"accumulate_grad_batches": FACTOR}
    if name in OURS:
        from lightning_ga import AutoAccumulate

        settings = {"callbacks": [AutoAccumulate(MICRO * FACTOR, cache=False, **OURS[name])]}
    layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    module = Module(layers, partial(torch.optim.Adam, lr=1e-3), lambda net, x, y: (net(x) - y).square().mean())
    inputs = torch.randn(SAMPLES, 64)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=MICRO, shuffle=True)
    quiet_trainer(max_epochs=2, **settings).fit(module, loader)


def seconds(name: str, folder: Path) -> float:
    output = folder / "output.txt"
    code, used = forked(partial(train, name, folder), output)
    if code:
        raise RuntimeError(f"A fit ended with {code}: {output.read_text()[-3000:]}")
    return used


def summarize(rounds: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return quartiles of the seconds that each program adds to another one's of the same round.

    Examples:
        >>> rounds = [{STOCK: 1, AGAIN: 1, CALLBACK: 2, PROBE: 3, CHECK: 4 + more, BOTH: 5} for more in (0, 0.1, 0.3)]
        >>> summarize(rounds)[3]
        {'name': 'the measurement', 'added': [2.0, 2.1, 2.3], 'allowed': 0.3, 'met': False}
    """
    rows = []
    for name, (program, beside, allowed) in ROWS.items():
        added = [one[program] - one[beside] for one in rounds]
        quartiles = [round(second, 3) for second in (statistics.quantiles(added, n=4) if added[1:] else added * 3)]
        met = allowed is None or quartiles[1] <= allowed
        rows.append({"name": name, "added": quartiles, "allowed": allowed, "met": met})
    return rows


def text(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        low, median, high = row["added"]
        allowed = "–" if row["allowed"] is None else f"{row['allowed']:.2f}"
        rows.append((row["name"], f"{median:+.2f} ({low:+.2f} to {high:+.2f}){'' if row['met'] else ' NO'}", allowed))
    return shown(
        ("",),
        ("seconds added", "at most"),
        rows,
        f"Processor seconds of two epochs of a small model, whose {FACTOR} micro-batches of {MICRO} make a step, once "
        f"PyTorch and Lightning are imported: stock Lightning takes {record['stock_seconds']:.2f} s. The probe and the "
        f"measurement are compared with AutoAccumulate without both, the other rows with stock Lightning. Medians and "
        f"quartiles of {record['rounds']} rounds; one thread; load average {record['load_average']:.1f}.",
    )


def measure(rounds: int = 9) -> dict[str, Any]:
    rng, names, found = random.Random(0), [STOCK, AGAIN, *OURS], []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:  # once without counting: writes byte code
            seconds(name, Path(folder))
        for _ in range(rounds):
            gc.collect()
            found.append({name: seconds(name, Path(folder)) for name in rng.sample(names, len(names))})
    rows = summarize(found)
    stock = round(statistics.median(one[STOCK] for one in found), 3)
    return {"stock_seconds": stock, "rows": rows, "rounds": rounds, "missed": [x["name"] for x in rows if not x["met"]]}


main = benchmark("startup", __doc__, measure, text, quick={"rounds": 1})

if __name__ == "__main__":
    raise SystemExit(main())
