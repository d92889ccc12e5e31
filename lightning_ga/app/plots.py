"""The pictures that a run leaves: its curves, its confusion matrix, and what the probe found; those of a sweep.

Tested in tests/app/test_page.py.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from io import StringIO
from operator import itemgetter
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from sklearn.metrics import ConfusionMatrixDisplay

from lightning_ga.app.run_files import OF_VALIDATION, Curve
from lightning_ga.app.terminal import number
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.units import counted, format_bytes

SVG_WIDTH = 5.2  # inches: text is read on a narrow screen too
SVG_METADATA = ("Creator", "Date", "Format", "Type")  # left out: they differ from run to run, or repeat what is seen


STYLES = {  # words, colour, line and mark of a stage's curves, by a pattern of the beginning of their names
    "train(ing)?[/_.-]": ("training, ", "C0", "-", "o"),
    OF_VALIDATION: ("validation, ", "C1", "--", "s"),
    "test[/_.-]": ("test, ", "C2", ":", "*"),
    "": ("", "C3", "-.", "d"),
}
NAME = re.compile(
    r"^(?:train|training|val|valid|validation|test)[/_.-](?=.)|_(?:step|epoch)(?=$|/dataloader_idx)|/dataloader_idx_\d+$"
)
MOST_MARKS = 40  # about so many points of a curve are marked
MOST_CLASSES = 20  # of a confusion matrix with numbers
RING: Mapping[str, Any] = {"s": 170, "facecolors": "none", "edgecolors": "black", "linewidths": 1.5, "zorder": 4}
WIDE_RANGE = 10  # times the lowest value of a sweep: the axis is logarithmic
WIDE = 2  # times the highest value are shown: a budget above is seen in the legend alone
MIB = 2**20


def measure_of(name: str) -> str:
    """What a logged value measures, without its stage: ``loss`` of ``train/loss_step``, ``val_loss`` and ``loss``."""
    return NAME.sub("", name) or name


def brief(name: str) -> str:
    """A name as matplotlib shows it, with at most 25 signs: the beginning and the end of a longer one."""
    if len(name) > 25:
        name = f"{name[:12]}…{name[-12:]}"
    return name.replace("$", r"\$")  # no formula


def curves_figure(
    runs: Mapping[str, Mapping[str, Curve]], measure: str, optimized: str = "", direction: str = ""
) -> Figure:
    """One measure by optimizer step: every stage that logs it, of each run; the best value of the optimized is ringed.

    Args:
        runs: Curves by name, of each run.
        measure: What :func:`measure_of` says of the curves to draw.
        optimized: Name of the optimized metric.
        direction: ``max`` or ``min``, which is better; empty if that is not known.
    """
    several = len(runs) > 1
    figure, axes = framed(4 + several * len(runs) / 3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    best = {"max": max, "min": min}.get(direction)
    for number_of_run, (run, curves) in enumerate(runs.items()):
        for name, curve in curves.items():
            if measure_of(name) != measure:
                continue
            (line,) = axes.plot(*np.array(curve).T, markersize=5)
            set_style(line, name, len(curve))
            if several:
                line.set_color(f"C{number_of_run % 10}")
                line.set_label(f"run {brief(run)}, {line.get_label()}")
            if name == optimized and best:
                step, value = best(curve, key=itemgetter(1))
                axes.scatter([step], [value], label=f"best: {number(value)} at step {step:,}", **RING)
    axes.set(xlabel="optimizer step", ylabel=brief(measure))
    if several:
        figure.legend(frameon=False, fontsize="small", ncols=2, loc="outside lower center")
    else:
        axes.legend(frameon=False)
    return figure


def set_style(line: Line2D, name: str, points: int) -> None:
    """Give a curve the colour, line, marks and label of its stage."""
    words, color, dashes, mark = STYLES[next(stage for stage in STYLES if re.match(stage, name))]
    line.set(color=color, linestyle=dashes, marker=mark, markevery=1 + points // MOST_MARKS, label=words + brief(name))


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


def sweep_figure(settings: Sequence[str], values: Sequence[float], key: str, metric: str) -> Figure:
    """The metric of every job of a sweep by one of its settings; the first job, the best, is ringed."""
    figure, axes = framed(4)
    places: Sequence[Any] = [*map(brief, settings)]
    with suppress(ValueError):  # of words, which stand side by side
        places = [*map(float, settings)]
        if 0 < WIDE_RANGE * min(places) <= max(places):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.scatter(places, values, s=40)
    axes.scatter(places[:1], values[:1], label=f"best: {number(values[0])}", **RING)
    axes.legend(frameon=False)
    axes.set(xlabel=brief(key), ylabel=brief(metric))
    axes.margins(0.1)
    return figure


def probe_figure(probe: ProbeResult) -> Figure:
    """Memory by micro-batch: predicted and measured peaks, the budget and the limit."""
    points = {"predicted peak": [*probe.curve], "measured, fits": [], "does not fit": []}
    for trial in probe.trials:
        label = "measured, fits" if trial.fits else "does not fit"
        points[label].append((trial.micro_batch_size, trial.peak_bytes))
    if probe.recomputed is not None:
        points["without computing again"] = [(0, 0), (probe.recomputed.samples, probe.recomputed.plain_bytes)]
    figure, axes = framed(4.2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for (label, pairs), style in zip(points.items(), ("C0-", "C2o", "C3X", "kx:")):
        if pairs:
            sizes, peaks = np.array(pairs).T
            axes.plot(sizes, peaks / MIB, style, linewidth=2, label=label)
    label = f"limit: {probe.limit}, {format_bytes(probe.peak_bytes)}"
    axes.scatter([probe.limit], [probe.peak_bytes / MIB], label=label, **RING)
    highest = axes.dataLim.ymax
    budget = probe.budget_bytes / MIB
    axes.axhline(budget, color="dimgray", linestyle="--", label=f"budget {format_bytes(probe.budget_bytes)}")
    axes.legend(frameon=False, loc="lower right")
    axes.set(xlabel="micro-batch, samples", ylabel="peak memory, MiB", xlim=(0, None))
    axes.set_ylim(0, 1.15 * max(highest, min(budget, WIDE * highest)))  # a budget far above is in the legend alone
    axes.set_title(f"Limit of the micro-batch: {counted(probe.limit, 'sample')}")
    return figure


def framed(height: float) -> tuple[Figure, Axes]:
    """A figure of so many inches, and its axes with a faint grid and no lines above and at the right."""
    figure = Figure(figsize=(7, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def as_svg(figure: Figure, title: str) -> str:
    """A figure as SVG for a page; names inside are made from the title, as a page may contain several."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(SVG_WIDTH, SVG_WIDTH * height / width)
    file = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(SVG_METADATA))
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
