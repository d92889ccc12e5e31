"""One page for a run, or for several side by side: a single file made of ``templates``, without scripts or network."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader
from omegaconf import OmegaConf

from lightning_ga.app.plots import as_svg, loss_figure, probe_figure
from lightning_ga.app.run_files import CONFIG, RunFiles, read_run, write_text
from lightning_ga.app.settings import walk
from lightning_ga.plan.records import probe_or_none

PAGE = "report.html"
FOLDERS = ("output_dir", "default_root_dir", "dirpath", "save_dir")  # keys: every run has its own
TEMPLATES = Environment(loader=PackageLoader("lightning_ga.app"), autoescape=True, trim_blocks=True)
STAGES = ("test/", "val/", "")  # beginnings of metrics, in the order in which these are shown


def write_page(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the page of one run, by default into its folder, or of all of several folders that contain one."""
    runs = [read_run(folder) for folder in folders if (folder / CONFIG).is_file()] or [read_run(folders[0])]
    page = path or (runs[0].folder / PAGE if len(folders) == 1 else Path(PAGE))
    write_text(page, run_page(runs[0]) if len(runs) == 1 else comparison_page(runs))
    return page


def run_page(run: RunFiles) -> str:
    """The page of one run."""
    probe = probe_or_none(run.plan.get("probe"))
    figures = {
        "Memory by micro-batch": probe_figure(probe) if probe is not None else None,
        "Losses by optimizer step": loss_figure({run.name: run.curves}),
    }
    model, data = run.config.get("model") or {}, run.config.get("data") or {}
    names = [str(section.get("_target_", "?")).rpartition(".")[2] for section in (model, data)]
    kinds = ("precision", "recall", "f1-score")
    return TEMPLATES.get_template("run.html").render(
        title=f"{model.get('name') or names[0]} on {names[1]}: {run.name}",
        run=run,
        facts=facts(run),
        pictures=[as_svg(figure, title) for title, figure in figures.items() if figure is not None],
        scores=[
            [name, *(f"{score[kind]:.4f}" for kind in kinds), f"{score['support']:,.0f}"]
            for name, score in run.scores.items()
            if isinstance(score, dict)  # the accuracy is a number
        ],
        config=OmegaConf.to_yaml(OmegaConf.create(dict(run.config))),
    )


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Several runs side by side: a table of differing settings and results, and their curves."""
    figure, tables = loss_figure({run.name: run.curves for run in runs}), [run.plan.get("table") or {} for run in runs]
    configs = [{key: str(one) for key, one in walk(run.config) if not key.endswith(FOLDERS)} for run in runs]
    return TEMPLATES.get_template("comparison.html").render(
        title=f"{len(runs)} runs side by side",
        names=[run.name for run in runs],
        results=[row for parts in (map(facts, runs), tables) for row in beside_each_other([*parts])],
        differing=[row for row in beside_each_other(configs) if len({*row[1:]}) > 1],
        picture=as_svg(figure, "Losses of the runs") if figure is not None else "",
    )


def facts(run: RunFiles) -> dict[str, str]:
    """The most important facts that are known: labels, then the result."""
    name, tags, result = dict(walk(run.config)).get("run.name"), run.config.get("tags"), dict(run.result)
    found = {"name": str(name)} if name is not None else {}
    found |= {"tags": ", ".join(map(str, tags))} if tags else {}
    seconds, errors = result.pop("seconds", None), result.pop("oom_events", 0)
    metrics = {name: value for name, value in result.items() if not name.startswith("optimized_")}
    for stage in STAGES:
        of_stage = {name: value for name, value in metrics.items() if name not in found and name.startswith(stage)}
        found |= {name: "not finite" if value is None else f"{value:.4f}" for name, value in of_stage.items()}
    found |= {"seconds": f"{seconds:,.0f}"} if seconds is not None else {}
    return found | ({"out-of-memory errors": str(errors)} if errors else {})


def beside_each_other(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Rows of a name and its text in every column; a dash if a column lacks it."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "–") for column in columns)] for name in names]
