"""Losses of rows by optimizer step, as they are drawn in every recipe."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from examples.reproduce.recipe import Result
from lightning_ga.app.plots import moving_mean


def losses(
    axes: Axes,
    result: Result,
    colours: Mapping[str, str],
    title: str,
    *,
    labels: Mapping[str, str] | None = None,
    logged: str | None = None,
) -> None:
    """Draw training loss (thin: each window; thick: moving mean) and validation loss (dots) of rows.

    Args:
        axes: Where to draw.
        result: The rows.
        colours: A colour by row name.
        title: Above the axes.
        labels: What rows are called in the legend, where that is not their name.
        logged: Colour of a curve ``logged``, drawn if given.
    """
    for number, (name, colour) in enumerate(colours.items()):
        curves = result.row(name).curves
        style = ("-", "--", ":")[number]
        axes.plot(*zip(*curves["train"]), color=colour, linewidth=0.8, alpha=0.3)
        label = (labels or {}).get(name, name) + (": training" if "val" in curves else "")
        axes.plot(*zip(*moving_mean(curves["train"])), style, color=colour, label=label)
        if "val" in curves:
            axes.plot(*zip(*curves["val"]), style, color=colour, marker="o", markersize=4, label="validation")
        if logged and "logged" in curves:
            axes.plot(*zip(*curves["logged"]), ":", color=logged, marker="x", label="validation, as it logs it")
    axes.set(xlabel="optimizer step", title=title)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
