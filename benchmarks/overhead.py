"""What does a window of a real network cost? ``python -m benchmarks.overhead``.

A resnet34d on 32×32 images: stock Lightning, stock Lightning again (the control), and ``AutoAccumulate`` with equal
weights and with token weights take turns, a window each, in bouts of fresh models.
"""

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import timm
import torch
from torch.utils.data import TensorDataset

from benchmarks.output import Record, benchmark, shown
from benchmarks.trainers import Module
from benchmarks.turns import AGAIN, STOCK, Stopwatch, fit, in_bouts, ratio, with_interval

MICRO, FACTOR = 8, 4
WARM_UP = 2  # windows of each bout that are not counted
EQUAL, TOKENS = "ours, equal weights", "ours, token weights"
TARGETS = {AGAIN: None, EQUAL: 1.01, TOKENS: 1.02}
OURS: Mapping[str, dict[str, Any]] = {
    EQUAL: {},
    TOKENS: {"normalize": lambda batch: int((batch[1] >= 0).sum())},  # a count that reads the batch
}


def train(watch: Stopwatch, name: str, model: str, windows: int) -> None:
    module = Module(timm.create_model(model, num_classes=10), partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    samples = MICRO * FACTOR * windows
    data = TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,)))
    fit(watch, module, data, MICRO, FACTOR, OURS.get(name))


def text(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        target = row["target"]
        cells = (with_interval(row, "wall", target), with_interval(row, "cpu"), "–" if target is None else str(target))
        rows.append((row["name"], *cells))
    return shown(
        ("÷ stock Lightning",),
        ("wall clock (95 %)", "processor (95 %)", "at most"),
        rows,
        f"{record['model']} at 32×32, windows of {record['factor']} micro-batches of {record['micro_batch']}, one "
        f"thread. Medians of {record['rows'][0]['pairs']} windows, each beside one of stock Lightning "
        f"({record['window_seconds']:.2f} s). Stock Lightning again shows the error of the measurement; load average "
        f"{record['load_average']:.1f}.",
    )


def measure(bouts: int = 9, rounds: int = 10, model: str = "resnet34d") -> dict[str, Any]:
    fits = {name: partial(train, name=name, model=model, windows=rounds + WARM_UP) for name in (STOCK, *TARGETS)}
    measured, rows = [*in_bouts(fits, bouts, WARM_UP)], []
    for name, target in TARGETS.items():
        ratios = ratio(measured, name, STOCK, "wall", "wall") | ratio(measured, name, STOCK, "cpu", "cpu")
        rows.append({"name": name, "target": target, **ratios, "pairs": bouts * rounds})
    window = statistics.median(second for one in measured for second in one[STOCK]["wall"])
    cell = {"model": model, "micro_batch": MICRO, "factor": FACTOR, "window_seconds": window, "rows": rows}
    return {**cell, "missed": [row["name"] for row in rows if row["target"] and row["wall"] > row["target"]]}


main = benchmark("overhead", __doc__, measure, text, quick={"bouts": 1, "rounds": 2})

if __name__ == "__main__":
    raise SystemExit(main())
