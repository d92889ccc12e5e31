"""The jobs of a sweep, read from their folders."""

import json
from pathlib import Path

from lightning_ga.app.sweep import read_jobs


def test_jobs_without_a_number_come_last(tmp_path: Path) -> None:
    """A failed one, and one that diverged, which has no order among numbers; the best first, up or down."""
    for name, value in {"0": 0.5, "1": float("nan"), "2": 0.75, "3": None, "4": 0.25}.items():
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(f"- seed={name}\n")
        if value is not None:
            (tmp_path / name / "result.json").write_text(json.dumps({"val/acc": value, "val/loss": value}))
    assert [job.name for job in read_jobs(tmp_path, "val/acc")] == ["2", "0", "4", "1", "3"]
    assert [job.name for job in read_jobs(tmp_path, "val/loss")] == ["4", "0", "2", "1", "3"]
