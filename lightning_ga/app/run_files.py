"""What a run leaves in its folder: how it is written, and read back."""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_ga.errors import UserError
from lightning_ga.plan.checkpoint import probe_or_none
from lightning_ga.plan.records import ProbeResult

Curve = list[tuple[int, float]]
OOM = "Memory ran out in"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run by the files that it has left; what is not there is empty. Events are out-of-memory errors."""

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

    @property
    def name(self) -> str:
        """The last two parts of the folder: the date and the time, or the sweep and the job."""
        return "/".join(self.folder.resolve().parts[-2:])

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
    """Read a run's folder."""
    config = folder / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"{str(folder)!r} is no folder of a run: it holds no config.yaml. Give one such as outputs/DATE/TIME."
        )
    text = config.read_text(encoding="utf-8")
    content: Any = OmegaConf.to_container(OmegaConf.create(text))
    logs = folder / "train.log"
    printed = logs.read_text(encoding="utf-8", errors="replace").splitlines() if logs.is_file() else []
    metrics = folder / "csv" / "metrics.csv"
    return RunFiles(
        folder=folder,
        config=content,
        config_text=text,
        plan=read_json(folder / "plan.json", {}),
        result=read_json(folder / "result.json", {}),
        versions=read_json(folder / "versions.json", {}),
        epochs=read_json(folder / "epochs.json", []),
        curves=read_curves(metrics) if metrics.is_file() else {},
        scores=read_json(folder / "classification_report.json", {}),
        confusion=read_json(folder / "confusion_matrix.json", {}),
        events=[line[line.index(OOM) :] for line in printed if OOM in line],
    )


def write_json(path: Path, content: Any) -> None:
    """Indented JSON, with null for numbers that are not finite, which JSON lacks; the folder is made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(content), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def finite(content: Any) -> Any:
    """The content with null for numbers that are not finite."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_json(path: Path, default: Any) -> Any:
    """A JSON file, or a default where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default


def read_curves(path: Path) -> dict[str, Curve]:
    """Every logged value of a ``metrics.csv`` by optimizer step: name to ``[(step, value), …]``."""
    curves: dict[str, Curve] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    curves.setdefault(name, []).append((int(row["step"]), float(value)))
    return curves
