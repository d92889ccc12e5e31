"""The pictures that a run leaves: its loss, and what the probe found."""

from collections.abc import Mapping
from io import StringIO

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_ga.app.run_files import Curve
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.units import counted, format_bytes

SVG_WIDTH = 5.2  # inches: text is read on a narrow screen too
SVG_METADATA = ("Creator", "Date", "Format", "Type")  # left out: they differ from run to run, or repeat what is seen
WIDE = 2.5  # times the highest value: a budget above is a text, not a line


def loss_figure(runs: Mapping[str, Mapping[str, Curve]]) -> Figure | None:
    """Training and validation losses by optimizer step, else first metrics; ``None`` if no run has any."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, names = figure.subplots(), dict[str, None]()
    for number, (run, curves) in enumerate(runs.items()):
        of_run = f"run {run}, " if len(runs) > 1 else ""
        for stage, word, style in (("train", "training", "-"), ("val", "validation", "o--")):
            of_stage = [name for name in curves if name.startswith(stage)]
            for name in sorted(of_stage, key=lambda name: (not name.endswith("/loss"), "loss" not in name))[:1]:
                label, style = f"{of_run}{word}, {name}", style if len(curves[name]) > 1 else "o"
                axes.plot(*zip(*curves[name]), style, markersize=4, color=f"C{number % 10}", label=label)
                names |= {name.rpartition("/")[2]: None}
    if not axes.lines:
        return None
    axes.set(xlabel="optimizer step", ylabel=" and ".join(names), title="Training and validation")
    tidy(axes)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)  # a run's name may contain a $
    return figure


def probe_figure(probe: ProbeResult) -> Figure:
    """Memory by micro-batch: predicted and measured peaks, the budget and the limit."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    top = max([probe.peak_bytes, *(size for _, size in probe.curve), *(trial.peak_bytes for trial in probe.trials)])
    is_near = probe.budget_bytes <= WIDE * top
    top = max(top, is_near * probe.budget_bytes)
    scale, unit = (2**30, "GiB") if top >= 2**30 else (2**20, "MiB")
    if probe.curve:
        axes.plot(*zip(*((batch, size / scale) for batch, size in probe.curve)), linewidth=2, label="predicted peak")
    for fits, style, label in ((True, "C2o", "measured, fits"), (False, "C3X", "does not fit")):
        points = [(trial.micro_batch_size, trial.peak_bytes / scale) for trial in probe.trials if trial.fits is fits]
        if points:
            axes.plot(*zip(*points), style, label=label)
    height = probe.budget_bytes / scale if is_near else 1.05 * top / scale
    if is_near:
        axes.axhline(height, color="dimgray", linewidth=1, linestyle="--")
    budget = f"budget {format_bytes(probe.budget_bytes)}{', far above' * (not is_near)}"
    axes.text(0.01, height, budget, transform=axes.get_yaxis_transform(), va="bottom", color="dimgray")
    label = f"limit: {probe.limit}, {format_bytes(probe.peak_bytes)}"
    place = [probe.limit], [probe.peak_bytes / scale]
    axes.scatter(*place, s=170, facecolors="none", edgecolors="black", linewidths=1.5, zorder=4, label=label)
    axes.legend(frameon=False, loc="lower right")
    axes.set(xlabel="micro-batch, samples", ylabel=f"peak memory, {unit}", xlim=(0, None), ylim=(0, 1.15 * top / scale))
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
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
