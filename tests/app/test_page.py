import json
import re
import shlex
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from browser import WIDTHS, look_at, needs_chromium
from omegaconf import OmegaConf

from lightning_ga import AutoAccumulate
from lightning_ga.app.page import comparison_page, curves, run_page
from lightning_ga.app.plan_report import records_of, save_plan
from lightning_ga.app.plots import as_svg, confusion_figure, curves_figure, measure_of, probe_figure, sweep_figure
from lightning_ga.app.run_files import read_run
from lightning_ga.plan.accumulation import plan_accumulation
from lightning_ga.plan.exactness_verdicts import Exactness
from lightning_ga.plan.records import ProbeResult, Trial
from lightning_ga.report import main, write_page

MIB = 2**20
PROBE = ProbeResult(
    30, 90 * MIB, 85 * MIB, (Trial(4, 16 * MIB, True, 0.1),), 4, 0.5, "replay", curve=((1, 16 * MIB), (30, 85 * MIB))
)
PLAN = {"effective_batch_size": 64, "micro_batch_size": 22, "factor": 3, "world_size": 1, "chunks": [[22, 21, 21]]}


def leave_run(folder: Path, **changes: object) -> Path:
    """What a run leaves, in small."""
    config = {"model": {"_target_": "lightning_ga.models.MLPClassifier", "name": "<b>"}, "data": {"batch_size": 64}}
    for key, value in changes.items():
        config["data"][key] = value
    (folder / "csv").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    (folder / "csv" / "metrics.csv").write_text(
        "epoch,step,train/loss,val/loss,train/r2,val/r2,lr-Adam\n0,4,1.5,,0.1,,0.1\n0,9,0.5,1.0,,0.2,0.2\n"
    )
    written = {
        "plan": {"plan": PLAN, "table": {"effective batch": "64 = 22 + 21 + 21"}},
        "result": {
            **{"test/iou": 0.75, "val/mse": None, "val/r2": 1.5e-4, "optimized_metric": "val/r2"},
            **{"optimized_direction": "max", "oom_events": 2, "seconds": 3.0},
        },
        "confusion_matrix": {"classes": ["cat", "$dog$ of a long, long name"], "counts": [[3, 1], [0, 2]]},
        "classification_report": {
            "cat": {"precision": 1.0, "recall": 0.5, "f1-score": 0.6667, "support": 4},
            "accuracy": 0.5,
        },
    }
    for name, content in written.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "probe.svg").write_text(as_svg(probe_figure(PROBE), "Memory by micro-batch"))
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
    assert not re.search(r"<(script|link|iframe|object)\b", page)
    addresses = re.findall(r'\b(?:src|href)="([^"]*)"', page)
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in addresses)
    assert not re.search(r"url\((?!#)|@import", page)
    assert "color-scheme:light dark" in page
    assert "@media(prefers-color-scheme:dark){svg{filter:invert(1) hue-rotate(180deg)}}" in page, "black on a dark page"


def test_the_optimized_metric_stands_first(tmp_path):
    """Marked, with its direction; its curves of training and validation come first, and any other can be chosen.

    Stages of one value each are two marks that look different.
    """
    run = read_run(leave_run(tmp_path / "run"))
    page = run_page(run)
    cards = re.findall(r'<div class="card([^"]*)"><b>([^<]*)</b><span>([^<]*)</span>', page)
    assert cards[0] == (" optimized", "1.5e-4", "val/r2")
    assert ("optimized, larger is better" in page, page.count("optimized, ")) == (True, 1)
    assert re.findall(r"<label[^>]*>([^<]*)</label>", page) == ["r2", "loss", "lr-Adam"]
    assert page.count(" checked>") == 1
    (axes,) = curves_figure({"": run.curves}, "r2", "val/r2", "max").axes
    assert [line.get_label() for line in axes.lines] == ["training, train/r2", "validation, val/r2"]
    assert len({(line.get_marker(), line.get_color()) for line in axes.lines}) == 2
    assert axes.get_legend_handles_labels()[1][-1] == "best: 0.2000 at step 9"


def test_the_best_value_is_that_of_the_direction():
    """Larger or smaller; without a direction none is marked."""
    curve = {"val/x": [(1, 0.5), (2, 0.1), (3, 0.3)]}
    for direction, expected in (("max", ["best: 0.5000 at step 1"]), ("min", ["best: 0.1000 at step 2"]), ("", [])):
        (axes,) = curves_figure({"": curve}, "x", "val/x", direction).axes
        assert axes.get_legend_handles_labels()[1][1:] == expected


@pytest.mark.parametrize(
    ("name", "measure"),
    [
        *(("train/loss", "loss"), ("val_loss", "loss"), ("loss", "loss"), ("train/loss_step", "loss")),
        *(("val/r2/dataloader_idx_1", "r2"), ("val/r2_epoch/dataloader_idx_0", "r2"), ("lr-Adam", "lr-Adam")),
        *(("val/epoch", "epoch"), ("val/", "val/"), ("train", "train"), ("val/mask/iou", "mask/iou")),
    ],
)
def test_stages_of_one_measure_share_a_picture(name, measure):
    assert measure_of(name) == measure


@pytest.mark.parametrize(
    ("cause", "factor", "accepted", "warned"),
    [
        *(("exact", 3, "warn", False), ("weighted", 3, "warn", True), ("weighted", 1, "warn", False)),
        *(("batch_norm", 3, "warn", True), ("batch_norm", 3, "ignore", False), ("unmeasured", 3, "warn", True)),
    ],
)
def test_a_bad_verdict_looks_like_a_warning(tmp_path, cause, factor, accepted, warned):
    """If windows take several passes, and BatchNorm is not accepted."""
    folder = leave_run(tmp_path / "run")
    found = AutoAccumulate(batch_norm=accepted)
    verdict = Exactness(0.11, 1e-4, cause, reason="why" if cause == "unmeasured" else "")
    plan = plan_accumulation(6, micro_batch=6 // factor)
    save_plan(folder / "plan.json", {**records_of(found, ""), "plan": plan, "exactness": verdict})
    page = run_page(read_run(folder))
    assert page.count('<p class="warning">⚠') == warned
    assert page.count('<div class="card warning">') == 2, "a value that is not finite, and out-of-memory errors"


@pytest.mark.parametrize(
    ("name", "stage"),
    [("val_loss", "validation, "), ("valid/x", "validation, "), ("value_loss", ""), ("trainable", "")],
)
def test_the_stage_of_a_curve_is_a_whole_word(name, stage):
    """``value_loss`` is none of validation."""
    (axes,) = curves_figure({"run": {name: [(0, 1.0)]}}, measure_of(name)).axes
    assert axes.get_lines()[0].get_label() == stage + name


def test_classes_are_shown_as_a_matrix():
    """With counts and names if they are few; all of many are one picture without numbers."""
    (axes,) = confusion_figure([[3, 1], [0, 2]], ["cat", "$dog$"]).axes
    assert [text.get_text() for text in axes.texts] == ["3", "1", "0", "2"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["cat", r"\$dog\$"], "no formula"
    many = [[int(row == column) for row in range(100)] for column in range(100)]
    axes = confusion_figure(many, []).axes[0]
    assert not axes.texts
    (axes,) = confusion_figure([[1, 0], [0, 1]], ["one name"]).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1"]
    assert 'aria-label="&lt;a title&gt;"' in as_svg(axes.figure, "<a title>")


def leave_sweep(folder: Path) -> Path:
    """A sweep of four jobs, one of which has failed."""
    for job, (rate, optimizer, value) in enumerate(
        [(0.1, "sgd", 0.5), (0.01, "adam", 0.9), (0.001, "sgd", 0.7), (1, "adam", None)]
    ):
        result = {"val/acc": value, "optimized_metric": "val/acc", "optimized_direction": "max"} if value else {}
        place = leave_run(folder / str(job))
        (place / "result.json").write_text(json.dumps(result))
        (place / ".hydra").mkdir()
        OmegaConf.save(
            ["model=mlp", f"optimizer.lr={rate}", f"+optimizer={optimizer}"], place / ".hydra" / "overrides.yaml"
        )
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    return folder


def test_a_sweep_has_a_page(tmp_path, monkeypatch, capsys):
    """Its jobs, the best first; the metric by each setting that differs; the command that compares the best works."""
    monkeypatch.chdir(tmp_path)
    leave_sweep(Path("multi run"))
    main(["multi run"])
    assert capsys.readouterr().out == "multi run/report.html\n"
    page = Path("multi run", "report.html").read_text(encoding="utf-8")
    rows = re.findall(
        r"<tr[^>]*><td>(?:<a [^>]*>)?(\d)(?:</a>)?</td><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td>", page
    )
    assert rows == [
        ("1", "0.9000", "0.01", "adam"),
        ("2", "0.7000", "0.001", "sgd"),
        ("0", "0.5000", "0.1", "sgd"),
        ("3", "failed", "1", "adam"),
    ]
    assert re.findall(r'aria-label="([^"]*)"', page) == ["val/acc by optimizer.lr", "val/acc by optimizer"]
    assert "<pre>model=mlp\n" in page
    (line,) = re.findall(r"<pre>(python -m lightning_ga.report .*)</pre>", page)
    main(shlex.split(unescape(line))[3:])
    assert "<title>3 runs side by side</title>" in Path("report.html").read_text(encoding="utf-8")


def test_the_axes_of_a_sweep_suit_its_values():
    """Logarithmic for rates, words side by side; the best is ringed."""
    (axes,) = sweep_figure(["0.01", "0.001", "0.1"], [0.9, 0.7, 0.5], "lr", "acc").axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert {"0.001", "0.01", "0.1"} <= {text.get_text() for text in axes.get_xticklabels()}
    assert axes.collections[1].get_offsets().tolist() == [[0.01, 0.9]]
    (axes,) = sweep_figure(["adam", "sgd"], [0.1, 40.0], "optimizer", "loss").axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")


@needs_chromium
def test_a_browser_shows_every_page_at_any_width(tmp_path, monkeypatch):
    """On a desktop and on a phone nothing lies outside of the window, each picture is seen, each tab shows its own.

    Nothing is fetched.
    """
    monkeypatch.chdir(tmp_path)
    one, other = leave_run(tmp_path / "x" / ("a" * 60)), leave_run(tmp_path / "x" / "other", batch_size=32)
    (one / "load_weights.py").write_text(f"import torch\nmodel = {'x' * 200}\n")
    sweep = leave_sweep(tmp_path / "sweep")
    pages = [write_page([one]), write_page([one, other], tmp_path / "two.html"), write_page([sweep])]
    for page, (tabs, pictures) in zip(pages, [(3, 2), (3, 0), (0, 2)], strict=True):
        for found, width in zip(look_at(page, tmp_path), WIDTHS, strict=True):
            assert found["width"] in range(width - 20, width + 1)
            assert found["scroll"] <= found["width"], page
            assert (found["outside"], found["fetched"]) == ([], []), page
            assert [is_right for _, is_right in found["tabs"]] == [True] * tabs
            assert found["pictures"] == [True] * pictures


def test_several_runs_are_shown_side_by_side(tmp_path, monkeypatch, capsys):
    """What differs, what came of it, and their curves in one picture."""
    one, other = leave_run(tmp_path / "x" / "one"), leave_run(tmp_path / "x" / "other", batch_size=32)
    page = comparison_page([read_run(one), read_run(other)])
    assert "<td>data.batch_size</td><td>64</td><td>32</td>" in page
    assert "x/one, training" in page
    twins = curves(read_run(one), replace(read_run(other), name="x/one"))
    assert twins["loss"].count("training, train/loss") == 2, "of folders whose last two parts are alike"
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
    whole = (tmp_path / "config.yaml").read_text()
    for length in range(len(whole)):
        (tmp_path / "config.yaml").write_text(whole[:length])
        assert run_page(read_run(tmp_path))


def test_the_picture_of_a_probe_shows_curve_trials_budget_and_limit():
    """By name; a budget far above all else is in the legend alone."""
    trials = (Trial(4, 20 * MIB, True, 0.1), Trial(31, 90 * MIB, False, 0.1))
    curve = ((1, 12 * MIB), (30, 85 * MIB), (37, 103 * MIB))
    found = ProbeResult(30, 86 * MIB, 85 * MIB, trials, 4, 0.5, "replay", curve=curve)
    (axes,) = probe_figure(found).axes
    names = ["predicted peak", "measured, fits", "does not fit", "limit: 30, 85.0 MiB", "budget 86.0 MiB"]
    assert axes.get_legend_handles_labels()[1] == names
    assert axes.get_ylim()[1] > 86
    (axes,) = probe_figure(replace(found, budget_bytes=80 * 2**30, curve=(), trials=())).axes
    assert axes.get_legend_handles_labels()[1][-1] == "budget 80.0 GiB"
    assert axes.get_ylim()[1] < 200
