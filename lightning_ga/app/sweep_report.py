"""The end of a sweep: a table on the screen and a page in its folder, the best job first."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ga.app.mistakes import one_line
from lightning_ga.app.page import PAGE, TEMPLATES
from lightning_ga.app.run_files import Sweep, read_sweep, write_text
from lightning_ga.app.terminal import columns, number
from lightning_ga.errors import printable
from lightning_ga.plan.units import counted


def sweep_page(folder: Path, sweep: Sweep) -> str:
    """The jobs, with the settings that differ."""
    name = "/".join(folder.resolve().parts[-2:])
    return TEMPLATES.get_template("sweep.html").render(
        title=f"Sweep {name}: {counted(len(sweep.jobs), 'job')}",
        keys=differing_keys(sweep),
        sweep=sweep,
    )


def differing_keys(sweep: Sweep) -> Sequence[str]:
    """The keys whose values are not the same in all jobs."""
    values: dict[str, set[str]] = {}
    for job in sweep.jobs:
        for key, value in job.settings.items():
            values.setdefault(key, set()).add(value)
    return [key for key in values if len(values[key]) > 1]


def report_sweep(folder: Path) -> None:
    """Print the jobs of a sweep and write its page; say how to run the missing ones."""
    sweep = read_sweep(folder)
    if sweep is None or len(sweep.jobs) < 2 or is_of_plans(sweep):
        return
    print(f"\njob  {sweep.metric:12} overrides")
    keys = differing_keys(sweep)
    for job in sweep.jobs:
        value = job.result.get(sweep.metric)
        outcome = "failed"
        if value is not None:
            outcome = number(value)
        elif job.result:
            outcome = "done"
        words = [f"{key}={job.settings[key]}" for key in keys if key in job.settings]
        line = f"{job.name:>3}  {outcome:12} {' '.join(words)}"
        print(printable(line)[: columns()])
    try:
        write_text(folder / PAGE, sweep_page(folder, sweep))
        print(f"Page: {printable(folder / PAGE)}")
    except Exception as error:  # it is for people only
        print(f"Warning: {PAGE} could not be written: {one_line(error)}", file=sys.stderr)
    print(f"Files: {folder}")
    if not all(job.result for job in sweep.jobs):
        print(f"To run again what is missing, add hydra.sweep.dir={folder} to the same command line.")


def is_of_plans(sweep: Sweep) -> bool:
    """Whether its jobs only show plans, which nothing orders."""
    return sweep.jobs[0].settings.get("dry_run", "").lower() == "true"
