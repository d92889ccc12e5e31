"""The pictures that a run leaves: its loss, and what the probe found."""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_ga.app.report import counted, describe_search, format_bytes
from lightning_ga.plan.records import ProbeResult, Trial

Curve = list[tuple[int, float]]
PREDICTED, FITS, REFUSED = "C0", "C2", "C3"
WIDE = 2.5  # times all that is drawn: a budget above is told, not drawn


def read_curves(path: Path) -> dict[str, Curve]:
    """Every logged value of a ``metrics.csv`` by optimizer step: name to ``[(step, value), …]``."""
    curves: dict[str, Curve] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    curves.setdefault(name, []).append((int(row["step"]), float(value)))
    return curves


def plot_losses(path: Path, curves: Mapping[str, Curve]) -> bool:
    """Training and validation loss by optimizer step, as a PNG; nothing without either.

    Returns:
        Whether there was anything to draw.
    """
    train, validation = curves.get("train/loss", []), curves.get("val/loss", [])
    if not train and not validation:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if train:
        axes.plot(*zip(*train), color="C0", linewidth=1, alpha=0.35, label="training, each window")
        axes.plot(*zip(*running_mean(train)), color="C0", linewidth=2, label="training, running mean")
    if validation:
        axes.plot(*zip(*validation), color="C1", linewidth=2, marker="o", label="validation")
    axes.set(xlabel="optimizer step", ylabel="loss", title="Loss")
    finite = [value for curve in (train, validation) for _, value in curve if math.isfinite(value)]
    axes.set_ylim(bottom=0, top=1.05 * (max(finite, default=0.0) or 1.0))
    tidy(axes)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return True


def running_mean(curve: Curve, decay: float = 0.8) -> Curve:
    """Exponential mean of a curve, without the bias towards its start.

    Examples:
        >>> running_mean([(0, 2.0), (5, 2.0)])
        [(0, 2.0), (5, 2.0)]
    """
    smooth, total, weight = [], 0.0, 0.0
    for step, value in curve:
        total, weight = decay * total + value, decay * weight + 1
        smooth.append((step, total / weight))
    return smooth


def plot_probe(path: Path, probe: ProbeResult) -> None:
    """What a probe found, as a PNG: memory by micro-batch, and seconds of a window where these were timed."""
    timed = bool(probe.timings)
    figure = Figure(figsize=(7, 6 if timed else 4.2), layout="constrained")
    axes = figure.subplots(1 + timed, 1, sharex=True, squeeze=False, height_ratios=(2, 1)[: 1 + timed])[:, 0]
    axes[0].set_title(f"Limit of the micro-batch: {counted(probe.limit, 'sample')}", pad=22)
    axes[0].text(0.5, 1.03, describe_search(probe), transform=axes[0].transAxes, ha="center", color="dimgray")
    draw_memory(axes[0], probe)
    if timed:
        draw_timings(axes[1], probe)
    axes[-1].set_xlabel("micro-batch, samples")
    figure.savefig(path, dpi=150)


def draw_memory(axes: Axes, probe: ProbeResult) -> None:
    """Predicted and measured peaks, the budget and the limit."""
    worked_out = probe.source == "estimate"
    fitting = [trial for trial in probe.trials if trial.fits]
    refused = [trial for trial in probe.trials if not trial.fits]
    top = max([probe.peak_bytes, *(size for _, size in probe.curve), *(trial.peak_bytes for trial in probe.trials)])
    shown = probe.budget_bytes <= WIDE * top
    scale, unit = (2**30, "GiB") if max(top, shown * probe.budget_bytes) >= 2**30 else (2**20, "MiB")
    if probe.curve:
        samples, sizes = zip(*probe.curve)
        axes.plot(samples, [size / scale for size in sizes], color=PREDICTED, linewidth=2, label="predicted peak")
    scatter(axes, fitting, scale, color=FITS, marker="o", label="worked out" if worked_out else "measured, fits")
    scatter(axes, refused, scale, color=REFUSED, marker="X", label="too large" if worked_out else "does not fit")
    draw_budget(axes, probe.budget_bytes, scale, shown=shown)
    ring(axes, probe.limit, probe.peak_bytes / scale, f"limit: {probe.limit}, {format_bytes(probe.peak_bytes)}")
    axes.set_ylabel(f"peak memory, {unit}")
    axes.set_xlim(
        0, 1.05 * max([probe.limit, *(x for x, _ in probe.curve), *(t.micro_batch_size for t in probe.trials)])
    )
    axes.set_ylim(0, 1.15 * max(top, shown * probe.budget_bytes) / scale)
    tidy(axes)
    axes.legend(frameon=False, loc="lower right")


def draw_budget(axes: Axes, budget: int, scale: int, *, shown: bool) -> None:
    """A line at the budget; words alone where it is far above all else."""
    text = f"budget {format_bytes(budget)}"
    if not shown:
        axes.text(0.01, 0.97, f"{text}, far above", transform=axes.transAxes, va="top", color="dimgray")
        return
    axes.axhline(budget / scale, color="dimgray", linewidth=1, linestyle="--")
    axes.annotate(
        text,
        (0.01, budget / scale),
        (0, 4),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        color="dimgray",
    )


def draw_timings(axes: Axes, probe: ProbeResult) -> None:
    """Seconds of a window by micro-batch, and the size that was chosen."""
    seconds = {timing.micro_batch_size: timing.seconds for timing in probe.timings}
    axes.plot(list(seconds), list(seconds.values()), color=PREDICTED, linewidth=2, marker="o", markersize=5)
    if probe.fastest is not None and probe.fastest in seconds:
        ring(axes, probe.fastest, seconds[probe.fastest], f"chosen: {probe.fastest}")
        axes.legend(frameon=False)
    axes.set_ylabel("seconds per window")
    axes.set_ylim(0, 1.15 * max(seconds.values()))
    tidy(axes)


def scatter(axes: Axes, trials: Iterable[Trial], scale: int, **style: Any) -> None:
    """Trials as points, under one name; nothing where there are none."""
    points = [(trial.micro_batch_size, trial.peak_bytes / scale) for trial in trials]
    if points:
        sizes, peaks = zip(*points)
        axes.scatter(sizes, peaks, s=45, zorder=3, **style)


def ring(axes: Axes, x: float, y: float, label: str) -> None:
    """A black ring around the one point that counts."""
    axes.scatter([x], [y], s=170, facecolors="none", edgecolors="black", linewidths=1.5, zorder=4, label=label)


def tidy(axes: Axes) -> None:
    """Whole numbers below, a faint grid, and no frame."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
