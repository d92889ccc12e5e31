"""The jobs of a sweep, as their folders tell: those that are already done, and a table at the end."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_ga.app.reading import read_json, read_yaml
from lightning_ga.app.run_files import write_table
from lightning_ga.app.terminal import columns
from lightning_ga.app.values import direction
from lightning_ga.errors import printable

TABLE = "sweep.csv"
RESULT = "result.json"


class Job(NamedTuple):
    """One job of a sweep, by the name of its folder; its value is the optimized metric, where it measured one."""

    name: str
    overrides: list[str]
    value: float | None
    outcome: str


def done_before(folder: Path, config: Mapping[str, Any]) -> float | None:
    """The optimized metric of a job that an earlier start of the same sweep has completed; nothing if none has."""
    saved = folder / "config.yaml"
    result = read_json(folder / RESULT, None)
    if result is None or not saved.is_file() or not agrees(read_yaml(saved), config):
        (folder / RESULT).unlink(missing_ok=True)  # of another configuration
        return None
    value = result.get(config["optimized_metric"])
    return math.nan if value is None else float(value)


def agrees(saved: Any, now: Any) -> bool:
    """Whether a saved configuration is that of now, in which what is counted in the data may be null still."""
    if isinstance(saved, dict) and isinstance(now, dict):
        saved, now = ({str(key): value for key, value in content.items()} for content in (saved, now))
        return saved.keys() == now.keys() and all(agrees(saved[key], now[key]) for key in now)
    return now is None or saved == now


def read_jobs(folder: Path, metric: str) -> list[Job]:
    """The jobs below a sweep's folder, the best first, then those without a value."""
    jobs = []
    for path in sorted(folder.glob("**/.hydra/overrides.yaml")):
        job = path.parent.parent
        result = read_json(job / RESULT, None)
        overrides = [str(override) for override in read_yaml(path)]
        outcome = "failed" if result is None else "done"
        jobs.append(Job(str(job.relative_to(folder)), overrides, (result or {}).get(metric), outcome))
    sign = -1 if direction(metric) == "max" else 1

    def place(job: Job) -> float:
        return math.inf if job.value is None or math.isnan(job.value) else sign * job.value

    return sorted(jobs, key=place)


def report_sweep(folder: Path, metric: str) -> None:
    """Print the jobs in lines of the terminal and keep them as CSV, with the way to run again what is missing."""
    jobs = read_jobs(folder, metric)
    if len(jobs) < 2:
        return
    shared = set.intersection(*(set(job.overrides) for job in jobs))
    print(f"\njob  {metric:12} overrides")
    for job in jobs:
        value = f"{job.value:.4f}" if job.value is not None else "-" if job.outcome == "done" else job.outcome
        line = f"{job.name:>3}  {value:12} {' '.join(given for given in job.overrides if given not in shared)}"
        print(printable(line if len(line) <= columns() else f"{line[: columns() - 1]}…"))
    head = ["job", metric, "outcome", "overrides"]
    write_table(folder / TABLE, [head, *([job.name, job.value, job.outcome, *job.overrides] for job in jobs)])
    print(f"Files: {folder}")
    if any(job.outcome == "failed" for job in jobs):
        print(f"To run again what is missing, add hydra.sweep.dir={folder} to the same command line.")
