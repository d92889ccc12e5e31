import json
import random

import pytest
from sklearn.metrics import classification_report

from lightning_ga.app.scores import class_scores, save_scores, scores_text


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
