"""What a run leaves in its folder: how it is written, and read back."""

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ga.app.reading import read_json, read_yaml, text_of
from lightning_ga.errors import UserError, printable
from lightning_ga.plan.checkpoint import probe_or_none
from lightning_ga.plan.records import ProbeResult

Curve = list[tuple[int, float]]
OOM = "Memory ran out in"
CONFIG, EPOCHS, CURVES = "config.yaml", "epochs.json", "csv/metrics.csv"
PARTS = ("result.json", "plan.json", EPOCHS, "versions.json", "classification_report.json", "confusion_matrix.json")
FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^}]*\}")  # it may be a secret, and a page is sent to others
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run by the files that it has left; what is not there is empty. Events are out-of-memory errors.

    Files that cannot be read, or are not there though every training writes them, are ``missing``.
    """

    folder: Path
    config: Mapping[str, Any]
    config_text: str
    plan: Mapping[str, Any]
    result: Mapping[str, Any]
    versions: Mapping[str, Any]
    epochs: list[dict[str, Any]]
    curves: Mapping[str, Curve]
    scores: Mapping[str, Any]
    confusion: Mapping[str, Any]
    events: list[str]
    missing: list[str]

    @property
    def name(self) -> str:
        """The last two parts of the folder: the date and the time, or the sweep and the job."""
        return printable("/".join(self.folder.resolve().parts[-2:]))

    @property
    def probe(self) -> ProbeResult | None:
        """What the probe found; ``None`` where none ran, or one of another version."""
        return probe_or_none(self.plan.get("probe"))

    @property
    def samples_per_second(self) -> float | None:
        """Training samples a second in the fastest epoch, its validation included."""
        speeds = [epoch["samples"] / epoch["seconds"] for epoch in self.epochs if epoch["seconds"]]
        return max(speeds, default=None)


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder, as far as it can be read: its run may have been killed at any time."""
    if not any((folder / name).is_file() for name in (CONFIG, *PARTS)):
        raise UserError(
            f"{str(folder)!r} is no folder of a run: it holds no config.yaml. Give one such as outputs/DATE/TIME."
        )
    missing = [name for name in (CONFIG, *PARTS[:2]) if not (folder / name).is_file()]
    result, plan, epochs, versions, scores, confusion = (
        read_json(folder / name, [] if name == EPOCHS else {}, missing) for name in PARTS
    )
    try:
        content = {} if CONFIG in missing else read_yaml(folder / CONFIG)
    except UserError:
        missing, content = [*missing, CONFIG], {}
    return RunFiles(
        folder=folder,
        config=content if isinstance(content, dict) else {},
        config_text=FROM_ENVIRONMENT.sub("***", text_of(folder / CONFIG)),
        plan=plan,
        result=result,
        versions=versions,
        epochs=epochs,
        curves=read_curves(folder / CURVES),
        scores=scores,
        confusion=confusion,
        events=[line[line.index(OOM) :] for line in text_of(folder / "train.log").splitlines() if OOM in line],
        missing=missing,
    )


def write_text(path: Path, text: str) -> None:
    """Write a text; the folder is made if needed, and bytes of names that are not UTF-8 become question marks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON, with null for numbers that are not finite, which JSON lacks."""
    write_text(path, json.dumps(finite(content), indent=2, ensure_ascii=False) + "\n")


def write_table(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write CSV in which a spreadsheet finds nothing to run, and a terminal nothing to obey."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([as_cell(value) for value in row] for row in rows)


def as_cell(value: Any) -> Any:
    """A cell; a text that a spreadsheet would take for a formula begins with a quote.

    Examples:
        >>> as_cell("=1+1"), as_cell("-1.5"), as_cell(-1.5), as_cell("cat")
        ("'=1+1", '-1.5', -1.5, 'cat')
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    is_formula = text.lstrip().startswith(("=", "+", "-", "@")) and not NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text


def finite(content: Any) -> Any:
    """The content with null for numbers that are not finite."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_curves(path: Path) -> dict[str, Curve]:
    """Every logged number of a ``metrics.csv`` by optimizer step: name to ``[(step, value), …]``."""
    curves: dict[str, Curve] = {}
    for row in csv.DictReader(text_of(path).splitlines()):
        for name, value in row.items():
            if value and name not in ("step", "epoch"):
                with suppress(TypeError, ValueError):  # half a row, where its run was killed
                    point = int(row["step"]), float(value)
                    curves.setdefault(name, []).append(point)
    return curves
