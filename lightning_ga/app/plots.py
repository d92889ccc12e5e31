"""The pictures that a run leaves: its curves, its confusion matrix, and what the probe found.

Tested in tests/app/test_page.py.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.metrics import ConfusionMatrixDisplay

from lightning_ga.app.run_files import Curve
from lightning_ga.app.terminal import number
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.units import counted, format_bytes

MIB = 2**20  # bytes
SVG_WIDTH = 5.2  # inches: text is read on a narrow screen too
SVG_METADATA = ("Creator", "Date", "Format", "Type")  # left out: they differ from run to run, or repeat what is seen


STYLES = {"train": "C0o-", "val": "C1s--", "test": "C2*:", "": "C3d-."}  # colours, marks, lines, by beginnings of names
NAME = re.compile(
    r"^(?:train|training|val|valid|validation|test)[/_.-](?=.)|_(?:step|epoch)(?=$|/dataloader_idx)|/dataloader_idx_\d+$"
)
MOST_MARKS = 40  # points of a curve that are marked
MOST_CLASSES = 20  # of a confusion matrix with numbers
RING: Mapping[str, Any] = {"s": 170, "facecolors": "none", "edgecolors": "black", "linewidths": 1.5, "zorder": 4}
WIDE = 2.5  # times the highest peak: a budget above is not drawn


def measure_of(name: str) -> str:
    """What a logged value measures, without its stage: ``loss`` of ``train/loss_step``, ``val_loss`` and ``loss``."""
    return NAME.sub("", name) or name


def brief(name: str) -> str:
    """A name as matplotlib shows it, with at most 25 signs: the beginning and the end of a longer one."""
    short = name if len(name) <= 25 else f"{name[:12]}…{name[-12:]}"
    return short.replace("$", r"\$")  # no formula


def curves_figure(curves: Mapping[str, Curve], measure: str, optimized: str = "", direction: str = "") -> Figure:
    """One measure by optimizer step: every stage that logs it; the best value of the optimized metric is ringed.

    Args:
        curves: Curves by name.
        measure: What :func:`measure_of` says of the curves to draw.
        optimized: Name of the optimized metric.
        direction: ``max`` or ``min``, which is better.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    best = {"max": max, "min": min}.get(direction)
    for name, curve in curves.items():
        if measure_of(name) != measure:
            continue
        beginning = next(filter(name.startswith, STYLES))
        lines = axes.plot(*np.array(curve).T, STYLES[beginning], markersize=5, label=brief(name))
        if len(curve) > MOST_MARKS:
            lines[0].set_marker("")
        if name == optimized and best:
            step, value = best(curve, key=itemgetter(1))
            axes.scatter([step], [value], label=f"best: {number(value)} at step {step:,}", **RING)
    axes.set(xlabel="optimizer step", ylabel=brief(measure))
    tidy(axes)
    axes.legend(frameon=False)
    return figure


def confusion_figure(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Figure:
    """Test samples by class and prediction, with numbers and names if the classes are few."""
    few = len(counts) <= MOST_CLASSES
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    picture = ConfusionMatrixDisplay(np.asarray(counts))
    if len(names) == len(counts):
        picture.display_labels = [*map(brief, names)]
    picture.plot(ax=axes, cmap="Blues", colorbar=not few, include_values=few, values_format="d", xticks_rotation=90)
    if not few:
        axes.set(xticks=[], yticks=[])
    axes.set(xlabel="predicted class", ylabel="class")
    return figure


def probe_figure(probe: ProbeResult) -> Figure:
    """Memory by micro-batch: predicted and measured peaks, the budget and the limit."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    points = {"predicted peak": [*probe.curve], "measured, fits": [], "does not fit": []}
    for trial in probe.trials:
        label = "measured, fits" if trial.fits else "does not fit"
        points[label].append((trial.micro_batch_size, trial.peak_bytes))
    if probe.recomputed is not None:
        points["without computing again"] = [(0, 0), (probe.recomputed.samples, probe.recomputed.plain_bytes)]
    limit = (probe.limit, probe.peak_bytes)
    top = max(peak for _, peak in [limit, *chain.from_iterable(points.values())])
    if probe.budget_bytes <= WIDE * top:
        top = max(top, probe.budget_bytes)
    for (label, pairs), style in zip(points.items(), ("C0-", "C2o", "C3X", "kx:")):
        if pairs:
            sizes, peaks = np.array(pairs).T
            axes.plot(sizes, peaks / MIB, style, linewidth=2, label=label)
    budget = f"budget {format_bytes(probe.budget_bytes)}"
    axes.axhline(probe.budget_bytes / MIB, color="dimgray", linewidth=1, linestyle="--", label=budget)
    label = f"limit: {probe.limit}, {format_bytes(probe.peak_bytes)}"
    axes.scatter([probe.limit], [probe.peak_bytes / MIB], label=label, **RING)
    axes.legend(frameon=False, loc="lower right")
    axes.set(xlabel="micro-batch, samples", ylabel="peak memory, MiB", xlim=(0, None), ylim=(0, 1.15 * top / MIB))
    axes.set_title(f"Limit of the micro-batch: {counted(probe.limit, 'sample')}")
    tidy(axes)
    return figure


def tidy(axes: Axes) -> None:
    """Whole numbers below, a faint grid, and no frame."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def as_svg(figure: Figure, title: str) -> str:
    """A figure as SVG for a page; names inside are made from the title, as a page may contain several."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(SVG_WIDTH, SVG_WIDTH * height / width)
    file = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(SVG_METADATA))
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
