"""One page for a run, or for several side by side: a single file made of ``templates``, without scripts or network."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, Template

from lightning_ga.app.plots import as_svg, loss_figure, probe_figure, step_figure
from lightning_ga.app.run_files import RunFiles, read_run, write_text
from lightning_ga.app.terminal import warn
from lightning_ga.app.values import settings, shown
from lightning_ga.errors import UserError
from lightning_ga.plan.units import format_bytes

PAGE = "report.html"
FOLDERS = ("output_dir", "default_root_dir", "dirpath", "save_dir")  # keys: every run has its own
METRICS = ("test/acc", "test/top5", "test/loss", "test/perplexity", "val/acc", "val/loss", "train/loss")
MOST_CLASSES = 40  # of a confusion matrix that can be read


def write_page(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the page of one run, by default into its folder, or of several, by default into the current one."""
    runs = [*readable(folders)]
    page = path or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    write_text(page, run_page(runs[0]) if len(runs) == 1 else comparison_page(runs))
    return page


def readable(folders: Sequence[Path]) -> Iterator[RunFiles]:
    """The runs in some folders; of several, those that hold none are told and left out."""
    found = 0
    for folder in folders:
        try:
            run = read_run(folder)
            run_page(run)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = "" if isinstance(error, UserError) else f"{str(folder)!r} holds something else than a run writes: "
            if folder == folders[-1] and not found:
                raise UserError(f"{kind}{error}") from error
            warn(f"{kind}{error}")
        else:
            found += 1
            yield run


@cache
def template(name: str) -> Template:
    """A template, which escapes what it is given."""
    return Environment(loader=PackageLoader(__package__), autoescape=True, trim_blocks=True).get_template(name)


def run_page(run: RunFiles) -> str:
    """The page of one run."""
    figures = {
        "Memory by micro-batch": probe_figure(run.probe) if run.probe is not None else None,
        "Losses by optimizer step": loss_figure({run.name: run.curves}),
        "What changes by optimizer step": step_figure(
            run.curves, (run.plan.get("plan") or {}).get("effective_batch_size", 0)
        ),
    }
    return template("run.html").render(
        title=f"{described(run)}: {run.name}",
        run=run,
        facts=facts(run),
        pictures=[as_svg(figure, title) for title, figure in figures.items() if figure is not None],
        epochs=epoch_rows(run.epochs),
        scores=score_rows(run),
        confusion=confusion(run),
        missing=run.missing,
    )


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Several runs side by side: a table of what differs and what came of it, and their curves."""
    figure = loss_figure({run.name: run.curves for run in runs})
    return template("comparison.html").render(
        title=f"{len(runs)} runs side by side",
        names=[run.name for run in runs],
        missing=[f"{name} of {run.name}" for run in runs for name in run.missing],
        results=beside_each_other([facts(run) for run in runs]),
        differing=differing(runs),
        picture=as_svg(figure, "Losses of the runs") if figure is not None else "",
    )


def described(run: RunFiles) -> str:
    """Model and data in a few words."""
    model, data = run.config.get("model") or {}, run.config.get("data") or {}
    name = model.get("name") or str(model.get("_target_", "model")).rpartition(".")[2]
    return f"{name} on {str(data.get('_target_', 'data')).rpartition('.')[2]}"


def facts(run: RunFiles) -> dict[str, str]:
    """What one looks at first, as far as it is known: results, the plan, memory, speed."""
    plan, probe, speed = run.plan.get("plan"), run.probe, run.samples_per_second
    labels = run.config.get("run") or {}
    found = {"name": str(labels["name"])} if labels.get("name") is not None else {}
    found |= {"tags": ", ".join(map(str, labels["tags"]))} if labels.get("tags") else {}
    found |= {name: number(run.result[name], "not finite") for name in METRICS if name in run.result}
    if plan:
        found["effective batch"] = str(plan["effective_batch_size"])
        at_most = "≤ " if plan.get("size_budget") else ""
        found["micro-batch × factor"] = f"{at_most}{plan['micro_batch_size']} × {plan['factor']}"
        found["ranks"] = str(plan["world_size"])
    if probe is not None:
        found["peak of the budget"] = f"{format_bytes(probe.peak_bytes)} of {format_bytes(probe.budget_bytes)}"
    if speed is not None:
        found["samples a second"] = f"{speed:,.0f}"
    if "seconds" in run.result:
        found["seconds"] = f"{run.result['seconds']:,.0f}"
    return {**found, "out-of-memory errors": str(run.result.get("oom_events", 0))}


def epoch_rows(epochs: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Heads of columns, then one row an epoch with samples a second and memory; nothing without an epoch."""
    if not epochs:
        return []
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch if "/" in name))
    memory = "peak memory" if "peak_bytes" in epochs[0] else "memory of the process"
    rows = [
        [
            str(epoch["epoch"]),
            f"{epoch['steps']:,}",
            *(number(epoch.get(name)) for name in names),
            f"{epoch['seconds']:.1f}",
            f"{epoch['samples'] / epoch['seconds']:,.0f}" if epoch["seconds"] else "–",
            format_bytes(epoch.get("peak_bytes", epoch.get("process_bytes", 0))),
        ]
        for epoch in epochs
    ]
    return [["epoch", "steps", *names, "seconds", "samples a second", memory], *rows]


def score_rows(run: RunFiles) -> list[list[str]]:
    """Precision, recall, F1 and samples of every class."""
    return [
        [name, *(f"{score[kind]:.4f}" for kind in ("precision", "recall", "f1-score")), f"{score['support']:,.0f}"]
        for name, score in run.scores.items()
        if isinstance(score, dict)  # the accuracy is a number
    ]


def confusion(run: RunFiles) -> dict[str, Sequence[int]]:
    """Counts of predictions by class; nothing where there are too many classes to read."""
    counts: Sequence[Sequence[int]] = run.confusion.get("counts") or []
    names = run.confusion.get("classes") or range(len(counts))
    return dict(zip(map(str, names), counts)) if len(counts) <= MOST_CLASSES else {}


def differing(runs: Sequence[RunFiles]) -> list[list[str]]:
    """The keys of the configurations in which runs differ, with their values."""
    columns = [
        {key: shown(value) for key, value in settings(run.config).items() if not key.endswith(FOLDERS)} for run in runs
    ]
    return [row for row in beside_each_other(columns) if len({*row[1:]}) > 1]


def beside_each_other(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Rows of a name and its text in every column; a dash where a column lacks it."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "–") for column in columns)] for name in names]


def number(value: float | None, missing: str = "–") -> str:
    """A metric with four digits."""
    return missing if value is None else f"{value:.4f}"
