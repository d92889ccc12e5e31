import csv
import json

import pytest

from lightning_ga.app.sweep_report import report_sweep


def test_a_sweep_ends_with_a_table(tmp_path, capsys):
    """The best first, up or down, then those without a number; only settings that differ are named."""
    (tmp_path / "multirun.yaml").touch()
    results = {"0": 0.5, "1": None, "2": 0.75, "3": "failed", "4": 0.25}
    for direction, order in (("max", "20413"), ("min", "40213")):
        for name, value in results.items():
            (tmp_path / name / ".hydra").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / ".hydra" / "overrides.yaml").write_text(f"- seed={name}\n- same=1\n")
            if value != "failed":
                optimized = {"optimized_metric": "val/x", "optimized_direction": direction}
                (tmp_path / name / "result.json").write_text(json.dumps({"val/x": value, **optimized}))
        report_sweep(tmp_path)
        lines = capsys.readouterr().out.strip().splitlines()
        assert "".join(line.split()[0] for line in lines[1:6]) == order
        assert [line.split()[1] for line in lines[4:6]] == ["done", "failed"]
        assert lines[1].split()[1:] == [f"{results[order[0]]:.4f}", f"seed={order[0]}"]
        assert lines[-1].startswith("To run again what is missing")
    assert (tmp_path / "report.html").is_file()
    with (tmp_path / "sweep.csv").open() as file:
        lengths = {len(row) for row in csv.reader(file)}
        file.seek(0)
        assert lengths == {4}
        assert [row["outcome"] for row in csv.DictReader(file)] == ["done", "done", "done", "done", "failed"]


@pytest.mark.parametrize("value", ["true", "1", "'yes'"])
def test_a_sweep_of_plans_has_no_table(tmp_path, capsys, value):
    """Its jobs have no result, and have not failed, however it was typed or in whichever file it stands."""
    (tmp_path / "multirun.yaml").touch()
    for name in ("0", "1"):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(f"- seed={name}\n")
        (tmp_path / name / "config.yaml").write_text(f"dry_run: {value}\n")
    report_sweep(tmp_path)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "sweep.csv").exists()
