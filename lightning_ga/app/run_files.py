"""What a run leaves in its folder: how it is written, and read back."""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_ga.errors import UserError
from lightning_ga.plan.attribution import read_attribution
from lightning_ga.plan.records import ProbeResult, Timing, Trial

Curve = list[tuple[int, float]]
OOM = "Memory ran out in"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run by what it has left; what is not there is empty.

    Attributes:
        folder: Where it lies.
        config: The resolved configuration.
        config_text: The same as it was written.
        plan: ``plan.json``.
        result: ``result.json``.
        versions: ``versions.json``.
        epochs: ``epochs.json``: one record an epoch.
        curves: Logged values by optimizer step.
        scores: ``classification_report.json``.
        confusion: ``confusion_matrix.json``.
        events: What was printed of out-of-memory errors.
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
    events: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The last two parts of the folder: the date and the time, or the sweep and the job."""
        return "/".join(self.folder.resolve().parts[-2:])

    @property
    def probe(self) -> ProbeResult | None:
        """What the probe found, if one ran."""
        return read_probe(self.plan.get("probe"))

    @property
    def samples_per_second(self) -> float | None:
        """Training samples a second in the fastest epoch, its validation included."""
        speeds = [epoch["samples"] / epoch["seconds"] for epoch in self.epochs if epoch["seconds"]]
        return max(speeds, default=None)


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder.

    Raises:
        UserError: If no run has been there.
    """
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


def read_probe(saved: Mapping[str, Any] | None) -> ProbeResult | None:
    """The record of a probe from its JSON; fields of other versions are left out."""
    if not saved:
        return None
    known = {field.name for field in fields(ProbeResult)}
    values = {name: value for name, value in saved.items() if name in known}
    values["trials"] = tuple(Trial(**trial) for trial in saved.get("trials", ()))
    values["timings"] = tuple(Timing(**timing) for timing in saved.get("timings", ()))
    values["holders"] = read_attribution(saved.get("holders"))
    values["curve"] = tuple((samples, peak) for samples, peak in saved.get("curve", ()))
    return ProbeResult(**values)


def read_curves(path: Path) -> dict[str, Curve]:
    """Every logged value of a ``metrics.csv`` by optimizer step: name to ``[(step, value), …]``."""
    curves: dict[str, Curve] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    curves.setdefault(name, []).append((int(row["step"]), float(value)))
    return curves
