"""What does exactness cost? ``python -m benchmarks.overhead``.

A resnet34d on 32×32 images in windows of 4 micro-batches of 8, on one CPU thread: stock Lightning,
stock Lightning again (the control: what it differs from itself is the noise of the measurement),
``AutoAccumulate`` with equal weights, and with token weights. The four take turns, a window each,
in bouts of fresh models. Exits with 1 if a median ratio is above its target.

A busy machine hides what is small. So the parts are measured as well, where they stand out: what a
window takes longer on a model of one tiny layer (hooks, weights, sampler), and what scaling the
gradients of the real model takes, which token weights do once a window.
"""

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import timm
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.output import MET, as_text, conclude, empty_table, options
from benchmarks.trainers import quiet, quiet_trainer
from benchmarks.turns import Clocks, Stopwatch, bouts, interval, pooled_median, ratios
from lightning_ga import AutoAccumulate
from lightning_ga.fit.window_gradients import scale_gradients

MICRO, FACTOR = 8, 4
WARM_UP = 2  # windows of each bout that are not counted
STOCK = "stock Lightning"
TINY = "tiny"
TINY_ROUNDS = 300
TARGETS = {"stock Lightning again": None, "ours, equal weights": 1.01, "ours, token weights": 1.02}


class Images(pl.LightningModule):
    """A bare classifier: the less it does itself, the more an addition shows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = tiny() if name == TINY else timm.create_model(name, num_classes=10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def tiny() -> nn.Module:
    """A model that takes next to no time."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))


def count_labels(batch: Any) -> int:
    """What ``normalize=`` is given: a count that reads the batch."""
    return int((batch[1] >= 0).sum())


def fit(watch: Stopwatch, *, name: str, model: str, windows: int) -> None:
    """Train a fresh model for some windows."""
    samples = MICRO * FACTOR * windows
    data = TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,)))
    settings: dict[str, Any] = {"callbacks": [watch], "accumulate_grad_batches": FACTOR}
    if name.startswith("ours"):
        normalize: Any = count_labels if "token" in name else "samples"
        ours = AutoAccumulate(MICRO * FACTOR, micro_batch_size=MICRO, normalize=normalize)
        settings = {"callbacks": [ours, watch]}
    trainer = quiet_trainer(max_epochs=1, **settings)
    trainer.fit(Images(model), DataLoader(data, batch_size=MICRO))


def programs(model: str, windows: int) -> dict[str, Any]:
    """All programs on fresh models, with the micro-batches of a window."""
    return {n: (partial(fit, name=n, model=model, windows=windows + WARM_UP), FACTOR) for n in (STOCK, *TARGETS)}


def added_seconds() -> dict[str, float]:
    """What a window of each program takes longer than stock Lightning's, whatever the model is."""
    (times,) = bouts(programs(TINY, TINY_ROUNDS), 1, WARM_UP)
    stock = times[STOCK]["wall"]
    return {name: statistics.median(a - b for a, b in zip(times[name]["wall"], stock)) for name in TARGETS}


def scaling_seconds(model: str, repeats: int = 30) -> float:
    """What scaling all gradients of a model takes."""
    net = timm.create_model(model, num_classes=10)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(net.parameters())
    times = []
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


def summarize(bouts: Sequence[Mapping[str, Clocks]], parts: Mapping[str, float]) -> list[dict[str, Any]]:
    """Median ratios, their confidence intervals, what the parts add up to, and whether targets are met."""
    rows = []
    for name, target in TARGETS.items():
        row: dict[str, Any] = {"name": name, "target": target, "by_parts": parts[name]}
        for clock in ("wall", "cpu"):
            found = ratios(bouts, name, clock, STOCK)
            row |= {clock: pooled_median(found), f"{clock}_95": interval(found), "pairs": sum(map(len, found))}
        rows.append({**row, "met": None if target is None else row["wall"] <= target})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = empty_table(("÷ Lightning",), ("wall clock (95 %)", "processor (95 %)", "parts", "target", "met"))
    for row in rows:
        target = "–" if row["target"] is None else f"{row['target']}"
        clocks = [_with_interval(row, clock) for clock in ("wall", "cpu")]
        name = row["name"].removeprefix("stock ").removesuffix(" weights")
        shown.add_row(name, *clocks, f"{row['by_parts']:.4f}", target, MET[row["met"]])
    return shown


def _with_interval(row: dict[str, Any], clock: str) -> str:
    low, high = row[f"{clock}_95"]
    return f"{row[clock]:.3f} ({low:.2f}–{high:.2f})"


def text(record: Mapping[str, Any]) -> str:
    factor, micro, pairs = record["factor"], record["micro_batch"], record["rows"][0]["pairs"]
    window, scaling = record["window_seconds"], 1e3 * record["scaling_seconds"]
    added = 1e6 * record["added_seconds"]["ours, equal weights"] / factor
    return as_text(
        table(record["rows"]),
        f"{record['model']} at 32×32, windows of {factor} micro-batches of {micro}, one thread. Medians of\n"
        f"{pairs} windows, each beside one of stock Lightning ({window:.2f} s). Stock Lightning\n"
        f"again is what the measurement makes of no difference; load average {record['load_average']:.1f}.\n"
        f"Parts: {added:.0f} µs a micro-step, as measured on a tiny model; with tokens,\n"
        f"{scaling:.1f} ms a window to scale the gradients.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("overhead", __doc__)
    parser.add_argument("--bouts", type=int, default=9, help="bouts of fresh models")
    parser.add_argument("--rounds", type=int, default=10, help="windows of each program a bout")
    parser.add_argument("--model", default="resnet34d", help="a timm model")
    settings = parser.parse_args(arguments)
    quiet()
    start, measured = time.perf_counter(), []
    for one in bouts(programs(settings.model, settings.rounds), settings.bouts, WARM_UP):
        measured.append(one)
        print(f"\rbout {len(measured)} of {settings.bouts}", end="", flush=True)
    window = statistics.median(second for one in measured for second in one[STOCK]["wall"])
    added, scaling = added_seconds(), scaling_seconds(settings.model)
    record = {
        "model": settings.model,
        "micro_batch": MICRO,
        "factor": FACTOR,
        "window_seconds": window,
        "added_seconds": added,
        "scaling_seconds": scaling,
        "load_average": os.getloadavg()[1],
        "seconds": round(time.perf_counter() - start, 1),
        "rows": summarize(measured, by_parts(added, scaling, window)),
        "bouts": measured,
    }
    return conclude("overhead", record, text, (row["name"] for row in record["rows"] if row["met"] is False))


if __name__ == "__main__":
    sys.exit(main())
