"""What does exactness cost? ``python -m benchmarks.overhead``.

A resnet34d on 32×32 images: stock Lightning, stock Lightning again (the control), ``AutoAccumulate`` with equal weights
and with token weights take turns, a window each, in bouts of fresh models. A busy machine hides what is small. So the
parts are measured as well: what a window takes longer on a model of one tiny layer, and what token weights take to
scale the gradients of the real model once a window.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import timm
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.output import MET, Record, benchmark, shown
from benchmarks.trainers import Module
from benchmarks.turns import Clocks, Stopwatch, fit, in_bouts, ratio
from lightning_ga.fit.window_gradients import scale_gradients

MICRO, FACTOR = 8, 4
WARM_UP = 2  # windows of each bout that are not counted
STOCK = "stock Lightning"
TINY = "tiny"  # a model that takes next to no time
TINY_ROUNDS = 300
TARGETS = {"stock Lightning again": None, "ours, equal weights": 1.01, "ours, token weights": 1.02}
OURS: Mapping[str, dict[str, Any]] = {
    "ours, equal weights": {},
    "ours, token weights": {"normalize": lambda batch: int((batch[1] >= 0).sum())},  # a count that reads the batch
}
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def train(watch: Stopwatch, name: str, model: str, windows: int) -> None:
    tiny = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))
    module = Module(tiny if model == TINY else timm.create_model(model, num_classes=10), SGD)
    samples = MICRO * FACTOR * windows
    data = TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,)))
    fit(watch, module, data, MICRO, FACTOR, OURS.get(name))


def programs(model: str, windows: int) -> dict[str, Any]:
    return {name: partial(train, name=name, model=model, windows=windows + WARM_UP) for name in (STOCK, *TARGETS)}


def added_seconds() -> dict[str, float]:
    """What a window of each program takes longer than stock Lightning's, whatever the model is."""
    (times,) = in_bouts(programs(TINY, TINY_ROUNDS), 1, WARM_UP)
    stock = times[STOCK]["wall"]
    return {name: statistics.median(a - b for a, b in zip(times[name]["wall"], stock)) for name in TARGETS}


def scaling_seconds(model: str, repeats: int = 30) -> float:
    """What scaling all gradients of a model takes."""
    net = timm.create_model(model, num_classes=10)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer, times = torch.optim.SGD(net.parameters()), []
    for _ in range(repeats):
        start = time.perf_counter()
        scale_gradients(optimizer, 1.0)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def by_parts(added: Mapping[str, float], scaling: float, window: float) -> dict[str, float]:
    """Ratio to stock Lightning that the parts add up to.

    Examples:
        >>> by_parts({"ours, equal weights": 0.25, "ours, token weights": 0.25}, scaling=0.5, window=1.0)
        {'ours, equal weights': 1.25, 'ours, token weights': 1.75}
    """
    return {name: 1 + (seconds + scaling * ("token" in name)) / window for name, seconds in added.items()}


def summarize(bouts: Sequence[Mapping[str, Clocks]], name: str, by_parts: float) -> dict[str, Any]:
    """Median ratios, their confidence intervals, what the parts add up to, and whether targets are met."""
    target, pairs = TARGETS[name], sum(len(one[name]["wall"]) for one in bouts)
    clocks = ratio(bouts, name, STOCK, "wall", "wall") | ratio(bouts, name, STOCK, "cpu", "cpu")
    met = None if target is None else clocks["wall"] <= target
    return {"name": name, "target": target, "by_parts": by_parts, **clocks, "pairs": pairs, "met": met}


def text(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        name = row["name"].removeprefix("stock ").removesuffix(" weights")
        ranges = {clock: "{:.2f}–{:.2f}".format(*row[f"{clock}_95"]) for clock in ("wall", "cpu")}
        clocks = (f"{row[clock]:.3f} ({ends})" for clock, ends in ranges.items())
        rows.append((name, *clocks, f"{row['by_parts']:.4f}", str(row["target"] or "–"), MET[row["met"]]))
    factor, micro = record["factor"], record["micro_batch"]
    added = 1e6 * record["added_seconds"]["ours, equal weights"] / factor
    return shown(
        ("÷ Lightning",),
        ("wall clock (95 %)", "processor (95 %)", "parts", "target", "met"),
        rows,
        f"{record['model']} at 32×32, windows of {factor} micro-batches of {micro}, one thread. Medians of\n"
        f"{record['rows'][0]['pairs']} windows, each beside one of stock Lightning "
        f"({record['window_seconds']:.2f} s). Stock Lightning\n"
        f"again is what the measurement makes of no difference; load average {record['load_average']:.1f}.\n"
        f"Parts: {added:.0f} µs a micro-step, as measured on a tiny model; with tokens,\n"
        f"{1e3 * record['scaling_seconds']:.1f} ms a window to scale the gradients.",
    )


def measure(bouts: int = 9, rounds: int = 10, model: str = "resnet34d") -> dict[str, Any]:
    measured = [*in_bouts(programs(model, rounds), bouts, WARM_UP)]
    window = statistics.median(second for one in measured for second in one[STOCK]["wall"])
    added, scaling = added_seconds(), scaling_seconds(model)
    rows = [summarize(measured, name, parts) for name, parts in by_parts(added, scaling, window).items()]
    seconds = {"window_seconds": window, "added_seconds": added, "scaling_seconds": scaling}
    cell = {"model": model, "micro_batch": MICRO, "factor": FACTOR, **seconds, "bouts": measured, "rows": rows}
    return {**cell, "missed": [row["name"] for row in rows if row["met"] is False]}


main = benchmark("overhead", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
