"""One page for a run, a sweep, or several runs: a single file made of ``templates``, without scripts or network."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from jinja2 import Environment, PackageLoader
from omegaconf import OmegaConf

from lightning_ga.app.plots import as_svg, confusion_figure, curves_figure, measure_of, probe_figure, sweep_figure
from lightning_ga.app.run_files import CONFIG, RunFiles, read_run, read_sweep, write_text
from lightning_ga.app.settings import walk
from lightning_ga.app.terminal import number
from lightning_ga.errors import printable
from lightning_ga.plan.exactness import Exactness, warning
from lightning_ga.plan.records import probe_or_none
from lightning_ga.plan.units import counted

PAGE = "report.html"
FOLDERS = ("output_dir", "default_root_dir", "dirpath", "save_dir")  # keys: every run has its own
TEMPLATES = Environment(loader=PackageLoader("lightning_ga.app"), autoescape=True, trim_blocks=True)
BETTER = {"max": "larger is better", "min": "smaller is better"}
SIGNS = {"max": 1, "min": -1}
MOST_COMPARED = 3  # runs in the command that compares the best of a sweep
STAGES = ("test/", "val/", "")  # beginnings of metrics, in the order in which these are shown


def write_page(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the page of one run or sweep, by default into its folder, or of all of several folders that contain one."""
    if len(folders) == 1 and read_sweep(folders[0]):
        page = path or folders[0] / PAGE
        write_text(page, sweep_page(folders[0]))
        return page
    runs = [read_run(folder) for folder in folders if (folder / CONFIG).is_file()] or [read_run(folders[0])]
    page = Path(PAGE)
    if len(folders) == 1:
        page = runs[0].folder / PAGE
    write_text(path or page, run_page(runs[0]) if len(runs) == 1 else comparison_page(runs))
    return path or page


def run_page(run: RunFiles) -> str:
    """The page of one run."""
    memory = ""
    probe = probe_or_none(run.plan.get("probe"))
    if probe is not None:
        memory = as_svg(probe_figure(probe), "Memory by micro-batch")
    confusion = ""
    if run.confusion:
        figure = confusion_figure(run.confusion["counts"], run.confusion["classes"])
        confusion = as_svg(figure, "Confusion matrix of the test")
    settings = dict(walk(run.config))
    model = str(settings.get("model._target_", "?")).rpartition(".")[2]
    data = str(settings.get("data._target_", "?")).rpartition(".")[2]
    return TEMPLATES.get_template("run.html").render(
        title=f"{settings.get('model.name') or model} on {data}: {run.name}",
        run=run,
        facts=facts(run),
        optimized=optimized_metric(run),
        is_better=BETTER.get(str(run.result.get("optimized_direction")), ""),
        warning=verdict_warning(run),
        curves=curves_of([run]),
        memory=memory,
        confusion=confusion,
        config=OmegaConf.to_yaml(OmegaConf.create(dict(run.config))),
    )


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Several runs side by side: a table of differing settings and results, and their curves."""
    settings = []
    for run in runs:
        settings.append({key: str(value) for key, value in walk(run.config) if not key.endswith(FOLDERS)})
    return TEMPLATES.get_template("comparison.html").render(
        title=f"{len(runs)} runs side by side",
        names=[run.name for run in runs],
        results=beside_each_other([*map(facts, runs)]),
        plans=beside_each_other([run.plan.get("table") or {} for run in runs]),
        differing=differing(settings),
        curves=curves_of(runs),
    )


def sweep_page(folder: Path) -> str:
    """The jobs of a sweep, the best first, the metric by every setting that differs, and how to compare the best."""
    jobs = read_sweep(folder)
    metric = "metric"
    direction = "min"
    for job in jobs:
        metric = job.result.get("optimized_metric") or metric
        direction = job.result.get("optimized_direction") or direction
    done = [job for job in jobs if job.result.get(metric) is not None]
    done.sort(key=lambda job: job.result[metric], reverse=direction == "max")
    keys = [row[0] for row in differing([job.settings for job in jobs])]
    pictures = []
    for key in keys if done else ():
        settings = [job.settings.get(key, "–") for job in done]
        figure = sweep_figure(settings, [job.result[metric] for job in done], key, metric, best=0)
        pictures.append(as_svg(figure, f"{metric} by {key}"))
    command = shlex.join(
        ["python", "-m", "lightning_ga.report", *(str(folder / job.name) for job in done[:MOST_COMPARED])]
    )
    return TEMPLATES.get_template("sweep.html").render(
        title=f"Sweep {'/'.join(folder.resolve().parts[-2:])}: {counted(len(jobs), 'job')}",
        metric=metric,
        is_better=BETTER[direction],
        keys=keys,
        jobs=jobs,
        done=done,
        number=number,
        pictures=pictures,
        command=printable(command) if len(done) > 1 else "",
    )


def optimized_metric(run: RunFiles) -> str:
    """The metric that the run optimized; of a run that was killed, the one that its configuration names, if any."""
    return str(run.result.get("optimized_metric") or run.config.get("optimized_metric") or "val/loss")


def measures(runs: Sequence[RunFiles]) -> list[str]:
    """What the runs log, that of the optimized metric first."""
    logged = dict.fromkeys(measure_of(name) for run in runs for name in run.curves)
    return sorted(logged, key=lambda measure: measure != measure_of(optimized_metric(runs[0])))


def curves_of(runs: Sequence[RunFiles]) -> dict[str, str]:
    """A picture for each measure that the runs log."""
    optimized = optimized_metric(runs[0])
    direction = str(runs[0].result.get("optimized_direction"))
    curves = {run.name: run.curves for run in runs}
    pictures = {}
    for measure in measures(runs):
        figure = curves_figure(curves, measure, optimized, SIGNS.get(direction, 0))
        pictures[measure] = as_svg(figure, f"Curves of {measure}")
    return pictures


def verdict_warning(run: RunFiles) -> str | None:
    """What a reader of the run has to know first: that its gradients were not exact, or that this is not known."""
    verdict = run.plan.get("exactness")
    plan = run.plan.get("plan") or {}
    accumulate = run.config.get("accumulate") or {}
    if not verdict or plan.get("factor", 1) == 1:
        return None
    with suppress(TypeError):  # of another version
        return warning(Exactness(**verdict), batch_norm=accumulate.get("batch_norm", "warn"))
    return None


def facts(run: RunFiles) -> dict[str, str]:
    """The most important facts that are known: the optimized metric, labels, then the other results."""
    optimized = optimized_metric(run)
    texts = {}
    for metric, value in run.result.items():
        if metric not in ("seconds", "oom_events") and not metric.startswith("optimized_"):
            texts[metric] = "not finite" if value is None else number(value)
    known: dict[str, str] = {}
    if optimized in texts:
        known[optimized] = texts[optimized]
    name = dict(walk(run.config)).get("run.name")
    if name is not None:
        known["name"] = str(name)
    if run.config.get("tags"):
        known["tags"] = ", ".join(map(str, run.config["tags"]))
    for stage in STAGES:
        known |= {metric: text for metric, text in texts.items() if metric.startswith(stage) and metric not in known}
    if run.result.get("seconds") is not None:
        known["seconds"] = f"{run.result['seconds']:,.0f}"
    if run.result.get("oom_events"):
        known["out-of-memory errors"] = str(run.result["oom_events"])
    return known


def beside_each_other(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Rows of a name and its text in every column; a dash if a column lacks it."""
    rows = []
    for name in dict.fromkeys(chain.from_iterable(columns)):
        rows.append([name, *(column.get(name, "–") for column in columns)])
    return rows


def differing(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """The rows whose texts are not all the same."""
    return [row for row in beside_each_other(columns) if len({*row[1:]}) > 1]
