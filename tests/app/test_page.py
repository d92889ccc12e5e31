import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_ga.app.page import comparison_page, run_page
from lightning_ga.app.plots import probe_figure
from lightning_ga.app.run_files import read_run
from lightning_ga.plan.records import ProbeResult, Trial
from lightning_ga.report import main

MIB = 2**20
PROBE = {
    "limit": 30, "budget_bytes": 90 * 2**20, "peak_bytes": 85 * 2**20, "steps": 4, "seconds": 0.5, "method": "bracket",
    "trials": [{"micro_batch_size": 4, "peak_bytes": 2**24, "fits": True, "seconds": 0.1}],
    "curve": [[1, 2**24], [30, 85 * 2**20]], "timings": [], "fastest": None,
}  # fmt: skip
PLAN = {"effective_batch_size": 64, "micro_batch_size": 22, "factor": 3, "world_size": 1, "chunks": [[22, 21, 21]]}


def leave_run(folder: Path, **changes: object) -> Path:
    """What a run leaves, in small."""
    config = {"model": {"_target_": "lightning_ga.models.MLPClassifier", "name": "<b>"}, "data": {"batch_size": 64}}
    for key, value in changes.items():
        config["data"][key] = value
    (folder / "csv").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    (folder / "csv" / "metrics.csv").write_text("epoch,step,train/loss,val/loss\n0,4,1.5,\n0,9,0.5,1.0\n")
    written = {
        "plan": {"plan": PLAN, "probe": PROBE, "table": {"effective batch": "64 = 22 + 21 + 21"}},
        "result": {"test/iou": 0.75, "val/mse": None, "optimized_metric": "val/mse", "oom_events": 2, "seconds": 3.0},
        "classification_report": {
            "cat": {"precision": 1.0, "recall": 0.5, "f1-score": 0.6667, "support": 4},
            "accuracy": 0.5,
        },
    }
    for name, content in written.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_page_of_a_run_shows_all_that_it_has_left(tmp_path):
    """Plan, probe, curves, errors, classes, configuration; it needs nothing but itself: no script, no network.

    Colours follow the reader's choice of light or dark.
    """
    page = run_page(read_run(leave_run(tmp_path / "run")))
    for part in (
        *("64 = 22 + 21 + 21", "Limit of the micro-batch: 30 samples", "optimizer step", "limit: 30, 85.0 MiB"),
        *("0.6667", "batch_size: 64", "not finite", "&lt;b&gt; on", "<span>test/iou</span>", "<span>val/mse</span>"),
    ):
        assert part in page, part
    assert not re.search(r"<(script|link|iframe|img|object)\b", page)
    assert all(address.startswith("#") for address in re.findall(r'\b(?:src|href)="([^"]*)"', page))
    assert not re.search(r"url\((?!#)|@import", page)
    assert "color-scheme:light dark" in page
    assert "@media(prefers-color-scheme:dark){svg{filter:invert(1) hue-rotate(180deg)}}" in page, "black on a dark page"


def test_several_runs_are_shown_side_by_side(tmp_path, monkeypatch, capsys):
    """What differs, what came of it, and their curves in one picture."""
    one, other = leave_run(tmp_path / "x" / "one"), leave_run(tmp_path / "x" / "other", batch_size=32)
    page = comparison_page([read_run(one), read_run(other)])
    assert "<td>data.batch_size</td><td>64</td><td>32</td>" in page
    assert "x/one, training" in page
    monkeypatch.chdir(tmp_path)
    (tmp_path / "killed").mkdir()  # before it has written anything
    main([str(one), str(other), "killed"])
    assert capsys.readouterr().out == "report.html\n"
    assert Path("report.html").read_text(encoding="utf-8") == page
    main([str(one)])
    assert (one / "report.html").is_file()


def test_what_a_killed_run_has_left_is_shown(tmp_path, capsys):
    """Half a file is left out, and half a row; values of the environment stay names."""
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "contains no config.yaml of a run" in capsys.readouterr().err
    OmegaConf.save(OmegaConf.create({"data": {"root": "${oc.env:TOKEN}/x"}}), tmp_path / "config.yaml")
    (tmp_path / "result.json").write_text('{"test/acc": 0.')
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "metrics.csv").write_bytes(b"step,train/loss\n0,1.5\n1,0.5,9,9\nx,1\n2,\xff\n3,0.2\n4")
    run = read_run(tmp_path)
    assert run.curves == {"train/loss": [(0, 1.5), (1, 0.5), (3, 0.2)]}
    assert run.result == {}
    assert "${oc.env:TOKEN}/x" in run_page(run)


def test_the_picture_of_a_probe_shows_curve_trials_budget_and_limit():
    """By name; a budget far above all else is told, not drawn."""
    trials = (Trial(4, 20 * MIB, True, 0.1), Trial(31, 90 * MIB, False, 0.1))
    curve = ((1, 12 * MIB), (30, 85 * MIB), (37, 103 * MIB))
    found = ProbeResult(30, 86 * MIB, 85 * MIB, trials, 4, 0.5, "replay", curve=curve)
    (axes,) = probe_figure(found).axes
    names = ["predicted peak", "measured, fits", "does not fit", "limit: 30, 85.0 MiB"]
    assert axes.get_legend_handles_labels()[1] == names
    assert [text.get_text() for text in axes.texts] == ["budget 86.0 MiB"]
    (axes,) = probe_figure(replace(found, budget_bytes=80 * 2**30, curve=(), trials=())).axes
    assert [text.get_text() for text in axes.texts] == ["budget 80.0 GiB, far above"]
    assert axes.get_ylim()[1] < 200
