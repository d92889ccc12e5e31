import json
import random

import pytest
from rich.console import Console
from sklearn.metrics import classification_report

from lightning_ga.exactness import Exactness
from lightning_ga.plan import plan_accumulation
from lightning_ga.report import (
    class_scores,
    plan_table,
    plot_losses,
    read_curves,
    save_plan,
    save_scores,
    scores_text,
)
from lightning_ga.search import ProbeResult, Trial

PROBE = ProbeResult(48, 2**31, 2_040_109_466, (Trial(48, 2_040_109_466, True, 0.2),), 4, 1.25, "replay")


def printed(table) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_table_says_how_a_window_is_cut_and_what_the_probe_found():
    """Effective batch, peak and budget, limit, trials and seconds, in 80 columns."""
    text = printed(plan_table(plan_accumulation(256, micro_batch=48, world_size=2), PROBE, setting="a model"))
    for part in (
        "256 = (43 + 43 + 42) × 2 ranks",
        "peak 1.9 GiB at the limit, of a budget of 2.0 GiB",
        "48 samples",
        "1 trial, 4 steps, 1.2 s",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_table_without_a_plan():
    """A loader that sets its own batches leaves nothing to say."""
    assert "set by the loader" in printed(plan_table(None))


def test_a_plan_is_saved_whole(tmp_path):
    """Every field of the records, and null for what did not run."""
    save_plan(
        tmp_path / "new" / "plan.json", plan_accumulation(10, micro_batch=4), PROBE, Exactness(1e-7, 1e-3, "exact")
    )
    content = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert content["plan"]["chunks"] == [[4, 3, 3]]
    assert content["probe"]["trials"][0]["fits"] is True
    assert content["exactness"]["relative_error"] == 1e-7
    save_plan(tmp_path / "plan.json", None, None)
    assert json.loads((tmp_path / "plan.json").read_text()) == {"plan": None, "probe": None, "exactness": None}


@pytest.mark.parametrize(("micro_batch", "says"), [(10, "nothing is accumulated"), (4, "relative error 1.0e-07")])
def test_the_table_says_whether_accumulation_is_exact(micro_batch, says):
    """A number where there is accumulation."""
    plan = plan_accumulation(10, micro_batch=micro_batch)
    assert says in printed(plan_table(plan, None, Exactness(1e-7, 1e-3, "exact")))


def test_scores_are_those_of_scikit_learn():
    """Per class, macro and weighted, with a class that is never predicted and one without samples."""
    draw = random.Random(0)
    targets = [draw.choice([0, 1, 2]) for _ in range(200)]
    predictions = [draw.choice([target, 1, 3]) for target in targets]
    predictions = [3 if prediction == 2 else prediction for prediction in predictions]
    confusion = [[0] * 4 for _ in range(4)]
    for target, prediction in zip(targets, predictions):
        confusion[target][prediction] += 1
    expected = classification_report(targets, predictions, labels=[0, 1, 2, 3], output_dict=True, zero_division=0)
    names = {"macro average": "macro avg", "weighted average": "weighted avg"}
    for score in class_scores(confusion):
        row = expected[names.get(score.name, score.name)]
        assert score.precision == pytest.approx(row["precision"])
        assert score.recall == pytest.approx(row["recall"])
        assert score.f1 == pytest.approx(row["f1-score"])
        assert score.support == row["support"]


def test_scores_are_written_as_text_and_json(tmp_path):
    """Aligned lines for eyes, every number for programs."""
    scores = class_scores([[2, 0], [1, 1]], ["cat", "dog"])
    save_scores(tmp_path, scores)
    assert (tmp_path / "classification_report.txt").read_text() == scores_text(scores) + "\n"
    assert json.loads((tmp_path / "classification_report.json").read_text())[0]["name"] == "cat"
    assert len({len(line) for line in scores_text(scores).splitlines() if line}) == 1


def test_curves_are_read_by_step_and_drawn(tmp_path):
    """Empty cells are skipped; a log without losses draws nothing."""
    log = tmp_path / "metrics.csv"
    log.write_text("epoch,step,train/loss,val/loss\n0,4,1.5,\n0,9,,1.0\n1,14,0.5,\n")
    curves = read_curves(log)
    assert curves == {"train/loss": [(4, 1.5), (14, 0.5)], "val/loss": [(9, 1.0)]}
    assert plot_losses(tmp_path / "loss.png", curves)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not plot_losses(tmp_path / "none.png", {})
