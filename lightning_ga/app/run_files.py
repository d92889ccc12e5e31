"""Write and read the files of runs: texts, JSON, configurations and curves; tasks write predictions themselves.

Tested in tests/app/test_folders.py.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_ga.errors import UserError, printable

Curve = list[tuple[int, float]]
OF_VALIDATION = "val(id|idation)?[/_.-]"  # pattern of the beginning of names of metrics
CONFIG = "config.yaml"
RESULT = "result.json"
PLAN = "plan.json"
PROBE = "probe.svg"
SCORES = "classification_report.json"
CONFUSION = "confusion_matrix.json"
SWEEP = "multirun.yaml"  # which Hydra writes into the folder of a sweep
WEIGHTS = "weights.pt"  # of task=export
LOADING = "load_weights.py"  # beside them


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run; those that are missing are empty."""

    name: str
    config: str  # the text of the configuration
    settings: Mapping[str, Any]  # the configuration by full keys
    result: Mapping[str, Any]
    plan: Mapping[str, Any]
    probe: str  # a picture of the memory by micro-batch, as SVG
    scores: Mapping[str, Any]
    confusion: Mapping[str, Any]  # names of ``classes``, and ``counts`` by class and prediction
    loading: str  # code that loads exported weights
    curves: Mapping[str, Curve]


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder, as far as it can be read: its run may have been killed at any time."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{str(folder)!r} contains no config.yaml of a run: give a folder such as outputs/DATE/TIME.")
    return RunFiles(
        name=short_name(folder),
        config=text_of(folder / CONFIG),
        settings=dict(walk(read_config(folder))),
        result=read_json(folder / RESULT),
        plan=read_json(folder / PLAN),
        probe=text_of(folder / PROBE),
        scores=read_json(folder / SCORES),
        confusion=read_json(folder / CONFUSION),
        loading=text_of(folder / LOADING),
        curves=read_curves(folder / "csv"),
    )


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a sweep."""

    name: str  # its folder in that of the sweep
    result: Mapping[str, Any]  # empty if it has failed
    settings: Mapping[str, str]  # by key, as they were typed or drawn
    overrides: str  # all of them on one line, as they were typed

    @property
    def outcome(self) -> str:
        """Whether the job has left a result, in a word."""
        return "done" if self.result else "failed"


@dataclass(frozen=True, slots=True)
class Sweep:
    """The jobs of a sweep, the best first, then those without a value."""

    name: str
    jobs: Sequence[Job]
    metric: str
    direction: str


def read_sweep(folder: Path) -> Sweep | None:
    """Read the jobs of a sweep; ``None`` for another folder."""
    if not (folder / SWEEP).is_file():
        return None
    jobs = []
    metric = "metric"  # by its name in the last result, and so the direction
    direction = "min"
    for path in sorted(folder.glob("**/.hydra/overrides.yaml")):
        settings = {}
        words = [*map(str, read_yaml(path))]
        for word in words:
            key, _, value = word.partition("=")
            settings[key.lstrip("+~")] = value
        result = read_json(path.parents[1] / RESULT)
        metric = result.get("optimized_metric", metric)
        direction = result.get("optimized_direction", direction)
        jobs.append(Job(str(path.parents[1].relative_to(folder)), result, settings, " ".join(words)))
    sign = -1 if direction == "max" else 1
    values: dict[str, Any] = {job.name: job.result.get(metric) for job in jobs}
    jobs.sort(key=lambda job: math.inf if values[job.name] is None else sign * values[job.name])
    return Sweep(short_name(folder), jobs, metric, direction)


def short_name(folder: Path) -> str:
    """The last two parts of a folder: the date and the time, or the sweep and the job."""
    return printable("/".join(folder.resolve().parts[-2:]))


def walk(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by their full keys; a list is one value."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from walk(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def text_of(path: Path) -> str:
    """The text of a file, with signs in place of bytes that are not UTF-8; empty if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none, or only half of one."""
    with suppress(ValueError):
        content: dict[str, Any] = json.loads(text_of(path))
        return content
    return {}


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run, with its interpolations as they are written; empty if there is none."""
    content: Any = OmegaConf.to_container(read_yaml(folder / CONFIG))
    return dict(content)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; empty if there is none, or only half of one."""
    with suppress(Exception):  # of YAML, or of OmegaConf
        return OmegaConf.create(text_of(path) or "{}")
    return OmegaConf.create()


def read_curves(folder: Path) -> dict[str, Curve]:
    """Every logged number by optimizer step: name to ``[(step, value), …]``; those before a resume come first."""
    curves: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("metrics*.csv")):
        for row in csv.DictReader(text_of(path).splitlines()):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    with suppress(LookupError, TypeError, ValueError):  # half a row, if its run was killed
                        curves.setdefault(name, {})[int(row["step"])] = float(value)
    return {name: sorted(curve.items()) for name, curve in curves.items()}


def put_aside(path: Path, place: Path, *, before: int | None) -> None:
    """Move the curves of a run that is resumed, without the rows of steps that, if known, will be done again."""
    rows = csv.DictReader(text_of(path).splitlines())
    with place.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows.fieldnames or ())
        writer.writeheader()
        for row in rows:
            is_whole = str(row.get("step")).isdigit() and None not in row
            if is_whole and (before is None or int(row["step"]) < before):
                writer.writerow(row)
    path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text; bytes of names that are not UTF-8 become question marks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace", newline="")


def write_json(path: Path, content: Any) -> None:
    """Write plain values and dataclasses as indented JSON, with null for numbers that are not finite."""
    finite = json.loads(json.dumps(content, default=asdict), parse_constant=lambda _: None)
    write_text(path, json.dumps(finite, indent=2, ensure_ascii=False) + "\n")
