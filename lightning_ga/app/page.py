"""The page of a run, and that of several: a single file made of ``templates``, without scripts or network."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from jinja2 import Environment, PackageLoader

from lightning_ga.app.plots import as_svg, confusion_figure, curves_figure, measure_of
from lightning_ga.app.run_files import RunFiles
from lightning_ga.app.settings import BETTER
from lightning_ga.app.terminal import number
from lightning_ga.plan.units import counted

PAGE = "report.html"
TEMPLATES = Environment(loader=PackageLoader("lightning_ga.app"), autoescape=True, trim_blocks=True)
TEMPLATES.globals.update(better=BETTER, number=number, counted=counted)
FOLDERS = ("output_dir", "default_root_dir", "dirpath", "save_dir")  # ends of keys: every run has its own
NO_METRICS = ("seconds", "oom_events", "optimized_metric", "optimized_direction")  # keys of result.json


def run_page(run: RunFiles) -> str:
    """The page of one run."""
    return TEMPLATES.get_template("run.html").render(
        run=run,
        facts=facts(run),
        optimized_metric=optimized_metric(run),
        curves=curves(run),
        confusion=confusion(run),
    )


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Several runs side by side: a table of differing settings and results, and their curves."""
    settings = differing([run.settings for run in runs])
    return TEMPLATES.get_template("comparison.html").render(
        runs=runs,
        results=beside_each_other([*map(facts, runs)]),
        plans=beside_each_other([run.plan.get("table", {}) for run in runs]),
        differing=[row for row in settings if not row[0].endswith(FOLDERS)],
        curves=curves(*runs),
    )


def beside_each_other(columns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of a name and its text in every column; a dash if a column lacks it."""
    return [
        [name, *(str(column.get(name, "–")) for column in columns)]
        for name in dict.fromkeys(chain.from_iterable(columns))
    ]


def differing(columns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows whose texts are not all the same."""
    return [row for row in beside_each_other(columns) if len({*row[1:]}) > 1]


def confusion(run: RunFiles) -> str:
    """A picture of the classes of the test; empty if there are none."""
    if not run.confusion:
        return ""
    return as_svg(confusion_figure(run.confusion["counts"], run.confusion["classes"]), "Confusion matrix of the test")


def optimized_metric(run: RunFiles) -> str:
    """The metric that the run optimized; of a run that was killed, the one that its configuration names, if any."""
    return str(run.result.get("optimized_metric") or run.settings.get("optimized_metric") or "val/loss")


def curves(*runs: RunFiles) -> dict[str, str]:
    """A picture for each measure that the runs log, that of the optimized metric first."""
    optimized = optimized_metric(runs[0])
    direction = str(runs[0].result.get("optimized_direction"))
    by_run = {f"{place}: {run.name}": run.curves for place, run in enumerate(runs, 1)}  # names may be alike
    pictures = {}
    for measure in measures(*runs):
        figure = curves_figure(by_run, measure, optimized, direction)
        pictures[measure] = as_svg(figure, f"Curves of {measure}")
    return pictures


def measures(*runs: RunFiles) -> list[str]:
    """What the runs log, that of the optimized metric first."""
    names = chain.from_iterable(run.curves for run in runs)
    first = measure_of(optimized_metric(runs[0]))
    return sorted(dict.fromkeys(map(measure_of, names)), key=lambda measure: measure != first)


def facts(run: RunFiles) -> dict[str, str]:
    """What is known of a run: the optimized metric, then the others, those of the test first, then its labels."""
    known: dict[str, str] = {}
    for beginning in (optimized_metric(run), "test/", "val/", ""):
        for metric, value in run.result.items():
            if metric.startswith(beginning) and metric not in NO_METRICS:
                known.setdefault(metric, "not finite" if value is None else number(value))
    labels = {
        "seconds": run.result.get("seconds"),
        "out-of-memory errors": run.result.get("oom_events"),
        "name": run.settings.get("run.name"),
        "tags": ", ".join(map(str, run.settings.get("tags") or ())),
    }
    for label, value in labels.items():
        if value:
            known[label] = str(value)
    return known
