"""The end of a sweep: a table on the screen, ``sweep.csv`` and a page in its folder, the best job first."""

import csv
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_ga.app.mistakes import one_line
from lightning_ga.app.page import PAGE, TEMPLATES, differing
from lightning_ga.app.plots import as_svg, sweep_figure
from lightning_ga.app.run_files import Job, Sweep, read_config, read_sweep, write_text
from lightning_ga.app.terminal import columns, number
from lightning_ga.errors import printable

MOST_COMPARED = 3  # runs in the command that compares the best of a sweep


def sweep_page(folder: Path, sweep: Sweep) -> str:
    """The jobs, the best first, the metric by every setting that differs, and how to compare the best."""
    done = [job for job in sweep.jobs if job.result.get(sweep.metric) is not None]
    keys = differing_keys(sweep)
    best = [str(folder / job.name) for job in done[:MOST_COMPARED]]
    command = shlex.join(["python", "-m", "lightning_ga.report", *best])
    return TEMPLATES.get_template("sweep.html").render(
        keys=keys,
        sweep=sweep,
        best=best,
        command=printable(command),
        pictures=pictures_of(done, sweep.metric, keys),
    )


def pictures_of(done: Sequence[Job], metric: str, keys: Sequence[str]) -> list[str]:
    """The metric of the jobs that have one, the best first, by each of these keys."""
    pictures: list[str] = []
    if not done:
        return pictures
    values = [job.result[metric] for job in done]
    for key in keys:
        settings = [job.settings.get(key, "–") for job in done]
        figure = sweep_figure(settings, values, key, metric)
        pictures.append(as_svg(figure, f"{metric} by {key}"))
    return pictures


def differing_keys(sweep: Sweep) -> Sequence[str]:
    """The keys whose values are not the same in all jobs."""
    return [key for key, *_ in differing([job.settings for job in sweep.jobs])]


def write_table(path: Path, sweep: Sweep) -> None:
    """Write the jobs as CSV, with all that was set in each."""
    rows: list[list[Any]] = [["job", sweep.metric, "outcome", "overrides"]]
    rows += [[job.name, job.result.get(sweep.metric), job.outcome, job.overrides] for job in sweep.jobs]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def report_sweep(folder: Path) -> None:
    """Print the jobs of a sweep and write its page; say how to run the missing ones."""
    sweep = read_sweep(folder)
    if sweep is None or len(sweep.jobs) < 2:
        return
    if str(read_config(folder / sweep.jobs[0].name).get("dry_run")).lower() in ("true", "1", "yes", "on"):
        return  # plans, which nothing orders
    print(f"\njob  {sweep.metric:12} overrides")
    keys = differing_keys(sweep)
    for job in sweep.jobs:
        value = job.result.get(sweep.metric)
        outcome = job.outcome if value is None else number(value)
        words = [f"{key}={job.settings[key]}" for key in keys if key in job.settings]
        print(printable(f"{job.name:>3}  {outcome:12} {' '.join(words)}")[: columns()])
    write_table(folder / "sweep.csv", sweep)
    try:
        write_text(folder / PAGE, sweep_page(folder, sweep))
        print(f"Page: {printable(folder / PAGE)}")
    except Exception as error:  # it is for people only
        print(f"Warning: {PAGE} could not be written: {one_line(error)}", file=sys.stderr)
    print(f"Files: {folder}")
    if not all(job.result for job in sweep.jobs):
        print(f"To run again what is missing, add hydra.sweep.dir={folder} to the same command line.")
