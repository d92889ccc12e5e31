"""The jobs of a sweep: what each gave, a table at the end, and jobs that are already done."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from lightning_ga.app.values import direction

Outcome = Literal["done", "done before", "failed"]
WIDTH = 80
TABLE = "sweep.csv"


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a sweep; its value is the optimized metric, where it measured one."""

    number: int
    overrides: tuple[str, ...]
    value: float | None
    outcome: Outcome


def done_before(folder: Path, config: Mapping[str, Any]) -> float | None:
    """The optimized metric of a job that an earlier start of the same sweep has completed; nothing if none has."""
    result, saved = folder / "result.json", folder / "config.yaml"
    if not (result.is_file() and saved.is_file()):
        return None
    before = OmegaConf.to_container(OmegaConf.load(saved))
    if not agrees(before, config):
        return None
    value = json.loads(result.read_text(encoding="utf-8")).get(config["optimized_metric"])
    return math.nan if value is None else float(value)


def agrees(saved: Any, now: Any) -> bool:
    """Whether a saved configuration is that of now, in which what is counted in the data may be null still."""
    if isinstance(saved, dict) and isinstance(now, dict):
        saved, now = ({str(key): value for key, value in content.items()} for content in (saved, now))
        return saved.keys() == now.keys() and all(agrees(saved[key], now[key]) for key in now)
    return now is None or saved == now


def table(jobs: Sequence[Job], metric: str) -> list[str]:
    """The jobs in lines of 80 columns, the best first.

    Examples:
        >>> given = (("model=mlp", f"seed={seed}") for seed in (1, 2, 3))
        >>> values = (0.5, "done"), (0.75, "done"), (None, "failed")
        >>> jobs = [Job(number, overrides, *value) for number, (overrides, value) in enumerate(zip(given, values))]
        >>> for line in table(jobs, "val/acc"):
        ...     print(line)
        job  val/acc      overrides
          1  0.7500       seed=2
          0  0.5000       seed=1
          2  failed       seed=3
    """
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    lines = [f"job  {metric:12} overrides"]
    for job in ranked(jobs, metric):
        value = "failed" if job.outcome == "failed" else "-" if job.value is None else f"{job.value:.4f}"
        given = " ".join(override for override in job.overrides if override not in shared)
        line = f"{job.number:3}  {value:12} {given}"
        lines.append(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…")
    return lines


def ranked(jobs: Sequence[Job], metric: str) -> list[Job]:
    """The best first, then those without a value."""
    sign = -1 if direction(metric) == "max" else 1

    def place(job: Job) -> float:
        return math.inf if job.value is None or math.isnan(job.value) else sign * job.value

    return sorted(jobs, key=place)


def report_sweep(jobs: Sequence[Job], folder: Path, metric: str) -> None:
    """Print the table and keep it in the sweep's folder, with the way to run again what is missing.

    Args:
        jobs: In the order in which they ran.
        folder: The sweep's folder.
        metric: The optimized metric.
    """
    print("\n" + "\n".join(table(jobs, metric)))
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["job", metric, "outcome", "overrides"])
        for job in ranked(jobs, metric):
            writer.writerow([job.number, job.value, job.outcome, *job.overrides])
    print(f"Files: {folder}")
    if any(job.outcome == "failed" for job in jobs):
        print(f"To run again what is missing, add hydra.sweep.dir={folder} to the same command line.")
