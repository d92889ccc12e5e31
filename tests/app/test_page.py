import json
import re
from pathlib import Path

import pytest
from command_lines import TINY
from omegaconf import OmegaConf

from lightning_ga.app.page import comparison_page, run_page
from lightning_ga.app.run_files import read_run
from lightning_ga.report import main

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
        "plan": {"plan": PLAN, "probe": PROBE, "told": {"effective batch": "64 = 22 + 21 + 21"}},
        "result": {"test/acc": 0.75, "val/loss": None, "oom_events": 2, "seconds": 3.0},
        "versions": {"torch": "9.9"},
        "epochs": [{"epoch": 1, "steps": 5, "seconds": 2.0, "samples": 300, "process_bytes": 2**30, "train/loss": 0.5}],
        "classification_report": {
            "cat": {"precision": 1.0, "recall": 0.5, "f1-score": 0.6667, "support": 4},
            "accuracy": 0.5,
        },
        "confusion_matrix": {"classes": ["cat", "dog"], "counts": [[2, 2], [0, 3]]},
    }
    for name, content in written.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "train.log").write_text("Plan\nwarning: Memory ran out in training with 30 samples.\n")
    return folder


def test_the_page_of_a_run_shows_all_that_it_has_left(tmp_path):
    """Plan, probe, curves, speed, memory, errors, classes, configuration, versions."""
    page = run_page(read_run(leave_run(tmp_path / "run")))
    for part in (
        *("64 = 22 + 21 + 21", "Limit of the micro-batch: 30 samples", "optimizer step", "samples a second", ">150<"),
        *("85.0 MiB of 90.0 MiB", "1.0 GiB", "Memory ran out in training with 30 samples.", "0.6667", ">dog<"),
        *("batch_size: 64", "9.9", "not finite", "&lt;b&gt; on"),
    ):
        assert part in page, part


def test_the_page_needs_nothing_but_itself(tmp_path):
    """No script, no network, one file; colours follow the reader's choice of light or dark."""
    page = run_page(read_run(leave_run(tmp_path / "run")))
    assert not re.search(r"<(script|link|iframe|img|object)\b", page)
    assert all(address.startswith("#") for address in re.findall(r'\b(?:src|href)="([^"]*)"', page))
    assert not re.search(r"url\((?!#)|@import", page)
    assert "color-scheme:light dark" in page
    assert "@media(prefers-color-scheme:dark){svg{filter:invert(1) hue-rotate(180deg)}}" in page, "black on a dark page"


def test_the_page_shows_a_batch_that_changes_by_step(command):
    """With its learning rate, from what the callback logs; nothing of the kind where all stays as it is."""
    grows = "accumulate.effective_batch_size={_target_: lightning_ga.schedule.by_step, counts: {0: 32, 2: 64}}"
    for line, shown in (((grows, "accumulate.scale_lr=sqrt"), True), (("lr_scheduler=none",), False)):
        run = command(*TINY, "data.batch_size=32", *line, folder=str(shown))
        assert run.code == 0, run.err
        page = (run.folder / "report.html").read_text()
        for part in ("What changes by optimizer step", ">factor<", ">learning rate<"):
            assert (part in page) is shown, part


def test_several_runs_are_shown_side_by_side(tmp_path, monkeypatch, capsys):
    """What differs, what came of it, and their curves in one picture."""
    one, other = leave_run(tmp_path / "x" / "one"), leave_run(tmp_path / "x" / "other", batch_size=32)
    page = comparison_page([read_run(one), read_run(other)])
    assert "<td>data.batch_size</td><td>64</td><td>32</td>" in page
    assert "x/one, training" in page
    monkeypatch.chdir(tmp_path)
    main([str(one), str(other)])
    assert capsys.readouterr().out == "report.html\n"
    assert Path("report.html").read_text(encoding="utf-8") == page
    main([str(one)])
    assert (one / "report.html").is_file()


def test_the_page_of_a_killed_run_says_what_is_missing(tmp_path, capsys):
    """What there is is shown; of what holds something else altogether, one sentence is left."""
    folder = leave_run(tmp_path / "run")
    (folder / "result.json").write_text('{"test/acc": 0.')
    (folder / "plan.json").unlink()
    (folder / "csv" / "metrics.csv").write_text("step,train/loss\n0,1.5\n4")
    main([str(folder)])
    page = (folder / "report.html").read_text()
    assert "Missing, or not whole: plan.json, result.json." in page
    assert "Losses by optimizer step" in page
    assert "out-of-memory errors" in page
    (folder / "result.json").write_text('{"test/acc": "abc"}')
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([str(folder)])
    assert capsys.readouterr().err.startswith(f"Error: {str(folder)!r} holds something else")


NOT_UTF8 = b"caf\xe9".decode("utf-8", "surrogateescape")


@pytest.mark.parametrize("name", ["_$\\frac{", "x\x1b[2Jy<b>&", NOT_UTF8])
def test_a_run_may_have_any_name(tmp_path, name, capsys):
    folders = [leave_run(tmp_path / name / run) for run in ("one", "two")]
    main([str(folders[0])])
    main([*map(str, folders), "--output", str(tmp_path / "both.html")])
    page = (tmp_path / "both.html").read_text()
    assert "\x1b" not in page + capsys.readouterr().out
    assert len(re.findall(r"one, training", page)) == 1


def test_a_folder_without_a_run_is_told_and_the_others_are_shown(command, shared, capsys):
    """``outputs/*/*`` may hold folders of runs that were killed, or whose files somebody changed."""
    runs = [shared(*TINY, folder=name).folder for name in ("first", "changed", "second")]
    Path("outputs/killed/.hydra").mkdir(parents=True)
    (runs[1] / "epochs.json").write_text("[{}]")
    (runs[0] / "csv" / "metrics.csv").write_text(f"step,train/loss\n1,{'9' * 200_000}")
    main([str(path) for path in sorted(Path("outputs").iterdir())])
    told = capsys.readouterr()
    assert told.out == "report.html\n"
    assert "'outputs/killed' is no folder of a run" in told.err
    assert "'outputs/changed' holds something else than a run writes" in told.err
    assert len(told.err.splitlines()) == 2
    page = Path("report.html").read_text()
    assert "first" in page
    assert "second" in page
    with pytest.raises(SystemExit):
        main(["outputs/killed", "outputs/changed"])
    assert capsys.readouterr().err.splitlines()[-1].startswith("Error: 'outputs/changed' holds something else")
