"""The pictures that a run leaves: its loss, and what the probe found."""

from collections.abc import Mapping
from io import StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_ga.app.run_files import Curve
from lightning_ga.plan.records import Method, ProbeResult
from lightning_ga.plan.units import counted, format_bytes

METHODS: dict[Method, str] = {  # what found a limit
    "replay": "predicted and verified",
    "prediction": "not tried",
    "below": "never near the budget",
    "phases": "tried at the limit",
    "bracket": "tried at the limit",
}
STEPPED = ("effective batch", "factor")  # they hold until they change
PREDICTED, FITS, REFUSED = "C0", "C2", "C3"
SVG_WIDTH = 5.2  # inches: text is read on a narrow screen too
SVG_METADATA = ("Creator", "Date", "Format", "Type")  # left out: they differ from run to run, or say what is seen
WIDE = 2.5  # times all that is drawn: a budget above is told, not drawn


def loss_figure(runs: Mapping[str, Mapping[str, Curve]]) -> Figure | None:
    """Training and validation loss by optimizer step, each run in its colour; nothing where none has any."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    title = "Loss"
    for number, (name, curves) in enumerate(runs.items()):
        shown = " " * name.startswith("_") + name  # a legend leaves out what begins with an underscore
        of_run, colour = f"{shown}, " if len(runs) > 1 else "", f"C{number % 10}"
        train, validation = curves.get("train/loss", []), curves.get("val/loss", [])
        smooth = moving_mean(train)
        if smooth != train:  # a short curve is its own mean
            draw_curve(axes, train, color=colour, linewidth=1, alpha=0.35)
            title = "Loss; thick lines are moving means"
        draw_curve(axes, smooth, color=colour, linewidth=2, label=f"{of_run}training")
        draw_curve(axes, validation, color=colour, linestyle="--", marker="o", label=f"{of_run}validation")
    if not axes.lines:
        return None
    axes.set(xlabel="optimizer step", ylabel="loss", title=title)
    axes.set_ylim(bottom=0)
    tidy(axes)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)  # a run's name may hold a $
    return figure


def step_figure(curves: Mapping[str, Curve], batch: int = 0) -> Figure | None:
    """What changes by optimizer step, each unit in axes of its own: batch and noise scale, factor, learning rates.

    The ``batch`` is that of the plan, which is logged only where it changes. Nothing where nothing changes.
    """
    noise, errors = curves.get("noise_scale", []), dict(curves.get("noise_scale_error", []))
    batches = curves.get("effective_batch_size") or [(step, batch) for step, _ in noise if batch]
    rates = {name: curve for name, curve in curves.items() if name.startswith("learning_rate")}
    rates = rates or {name: curve for name, curve in curves.items() if name.startswith("lr-")}
    alike = {name: next(other for other in rates if rates[other] == rates[name]) for name in rates}  # of several groups
    panels: dict[str, dict[str, Curve]] = {
        "samples": {"effective batch": batches, "noise scale": noise},
        "factor": {"factor": curves.get("accumulate_grad_batches", [])},
        "learning rate": {name: rates[name] for name in alike.values()},
    }
    panels = {
        unit: lines for unit, lines in panels.items() if any(len({y for _, y in line}) > 1 for line in lines.values())
    }
    if not panels:
        return None
    figure = Figure(figsize=(7, 1 + 1.8 * len(panels)), layout="constrained")
    for axes, (unit, lines) in zip(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], panels.items()):
        for name, line in lines.items():
            draw_curve(axes, line, linewidth=2, label=name, drawstyle="steps-post" if name in STEPPED else "default")
        if unit == "samples" and noise:
            low, high = zip(*((y - errors.get(step, 0), y + errors.get(step, 0)) for step, y in noise))
            axes.fill_between([step for step, _ in noise], low, high, color="C1", alpha=0.25, linewidth=0)
        axes.set(ylabel=unit, ylim=(0, None))
        if unit != "learning rate":
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
    figure.axes[0].set_title("What changes while training goes on")
    figure.axes[-1].set_xlabel("optimizer step")
    return figure


def draw_curve(axes: Axes, curve: Curve, **style: Any) -> None:
    """A curve; nothing where it has no points."""
    if curve:
        axes.plot(*zip(*curve), **style)


def moving_mean(curve: Curve, share: float = 0.1) -> Curve:
    """Mean over a share of the curve, as many points before as after each one, so that it does not lag behind.

    Examples:
        >>> moving_mean([(0, 1.0), (1, 2.0), (2, 3.0), (3, 10.0)], share=0.75)
        [(0, 1.0), (1, 2.0), (2, 5.0), (3, 10.0)]
    """
    half = int(share * len(curve) / 2)
    smooth = []
    for place, (step, _) in enumerate(curve):
        reach = min(half, place, len(curve) - 1 - place)
        values = [value for _, value in curve[place - reach : place + reach + 1]]
        smooth.append((step, sum(values) / len(values)))
    return smooth


def describe_search(probe: ProbeResult) -> str:
    """How a limit was found, with the method by its name and in words."""
    seconds = f"{probe.seconds:.1f} s"
    if probe.source == "checkpoint":
        return "found before and kept in the checkpoint (checkpoint)"
    if probe.source == "cache":
        return f"remembered, verified by one step, {seconds} (cache)"
    if probe.source == "estimate":
        return f"{probe.steps} steps worked out, {seconds} (estimate)"
    tried = f"{counted(len(probe.trials), 'trial')}, {counted(probe.steps, 'step')}"
    return f"{tried}, {seconds} ({probe.method}: {METHODS[probe.method]})"


def probe_figure(probe: ProbeResult) -> Figure:
    """What a probe found: memory by micro-batch, and seconds of a window where these were timed."""
    timed = bool(probe.timings)
    figure = Figure(figsize=(7, 6 if timed else 4.2), layout="constrained")
    axes = figure.subplots(1 + timed, 1, sharex=True, squeeze=False, height_ratios=(2, 1)[: 1 + timed])[:, 0]
    axes[0].set_title(f"Limit of the micro-batch: {counted(probe.limit, 'sample')}", pad=22)
    axes[0].text(0.5, 1.03, describe_search(probe), transform=axes[0].transAxes, ha="center", color="dimgray")
    draw_memory(axes[0], probe)
    if timed:
        draw_timings(axes[1], probe)
    axes[-1].set_xlabel("micro-batch, samples")
    return figure


def as_svg(figure: Figure, title: str) -> str:
    """A figure as SVG for a page; names inside are made from the title, as a page may hold several."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(SVG_WIDTH, SVG_WIDTH * height / width)
    file = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(SVG_METADATA))
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def draw_memory(axes: Axes, probe: ProbeResult) -> None:
    """Predicted and measured peaks, the budget and the limit."""
    top = max([probe.peak_bytes, *(size for _, size in probe.curve), *(trial.peak_bytes for trial in probe.trials)])
    shown = probe.budget_bytes <= WIDE * top
    scale, unit = (2**30, "GiB") if max(top, shown * probe.budget_bytes) >= 2**30 else (2**20, "MiB")
    if probe.curve:
        samples, sizes = zip(*probe.curve)
        axes.plot(samples, [size / scale for size in sizes], color=PREDICTED, linewidth=2, label="predicted peak")
    names = ("worked out", "too large") if probe.source == "estimate" else ("measured, fits", "does not fit")
    for fits, color, marker, label in ((True, FITS, "o", names[0]), (False, REFUSED, "X", names[1])):
        points = [(trial.micro_batch_size, trial.peak_bytes / scale) for trial in probe.trials if trial.fits is fits]
        if points:
            sizes, peaks = zip(*points)
            axes.scatter(sizes, peaks, s=45, zorder=3, color=color, marker=marker, label=label)
    budget = f"budget {format_bytes(probe.budget_bytes)}"
    if shown:
        height = probe.budget_bytes / scale
        axes.axhline(height, color="dimgray", linewidth=1, linestyle="--")
        axes.text(0.01, height, budget, transform=axes.get_yaxis_transform(), va="bottom", color="dimgray")
    else:
        axes.text(0.01, 0.97, f"{budget}, far above", transform=axes.transAxes, va="top", color="dimgray")
    ring(axes, probe.limit, probe.peak_bytes / scale, f"limit: {probe.limit}, {format_bytes(probe.peak_bytes)}")
    axes.set_ylabel(f"peak memory, {unit}")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.15 * max(top, shown * probe.budget_bytes) / scale)
    tidy(axes)
    axes.legend(frameon=False, loc="lower right")


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


def ring(axes: Axes, x: float, y: float, label: str) -> None:
    """A black ring around the one point that counts."""
    axes.scatter([x], [y], s=170, facecolors="none", edgecolors="black", linewidths=1.5, zorder=4, label=label)


def tidy(axes: Axes) -> None:
    """Whole numbers below, a faint grid, and no frame."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
