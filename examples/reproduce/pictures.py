"""Losses of rows by optimizer step, as they are drawn in every recipe."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from examples.reproduce.recipe import Curve, Result


def moving_mean(curve: Curve, share: float = 0.1) -> Curve:
    """Mean over a share of the curve, as many points before as after each one, so that it does not lag behind.

    Examples:
        >>> moving_mean([(0, 1.0), (1, 2.0), (2, 3.0), (3, 10.0)], share=0.75)
        [(0, 1.0), (1, 2.0), (2, 5.0), (3, 10.0)]
    """
    half, smooth = int(share * len(curve) / 2), []
    for place, (step, _) in enumerate(curve):
        reach = min(half, place, len(curve) - 1 - place)
        values = [value for _, value in curve[place - reach : place + reach + 1]]
        smooth.append((step, sum(values) / len(values)))
    return smooth


def losses(
    axes: Axes,
    result: Result,
    colours: Mapping[str, str],
    title: str,
    *,
    labels: Mapping[str, str] | None = None,
    logged: str | None = None,
) -> None:
    """Draw training loss (thin: as recorded; thick: moving mean) and validation loss (dots) of rows.

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
