import random

import numpy as np
import torch
from command_lines import TINY
from sklearn.metrics import classification_report

from lightning_ga.app.tasks import class_report, save_predictions


def test_secrets_of_the_environment_are_nowhere_in_a_run(command, monkeypatch):
    """Their names are: in the configuration and on the page."""
    secret = "correct-horse-battery"
    monkeypatch.setenv("TOKEN", secret)
    line = (*TINY, "data.root=https://me:${oc.env:TOKEN}@host")
    run = command(*line)
    assert run.code == 0, run.err
    for path in run.folder.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    assert secret not in run.out + run.err
    assert "root: https://me:${oc.env:TOKEN}@host" in (run.folder / "config.yaml").read_text()


def test_predictions_of_any_kind_are_kept(tmp_path):
    """Arrays where tensors can be joined, batches as they are where not."""
    path, part = tmp_path / "p", torch.ones(2, 3, dtype=torch.bfloat16)
    save_predictions(path, [part, part[:1]])
    assert np.load(tmp_path / "p.npy").shape == (3, 3)
    save_predictions(path, [{"a": part, "b": part[:, 0]}, {"a": part, "b": part[:, 0]}])
    with np.load(tmp_path / "p.npz") as arrays:
        assert {name: arrays[name].shape for name in arrays} == {"a": (4, 3), "b": (4,)}
    for batches in (
        [{"file": part}],
        [part, part[:, :1]],
        [torch.tensor(1.0)],
        [[part], [part]],
        [{"a": part}, {"b": part}],
        [],
    ):
        (tmp_path / "p.pt").unlink(missing_ok=True)
        save_predictions(path, batches)
        assert len(torch.load(tmp_path / "p.pt", weights_only=True)) == len(batches)


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
    assert class_report(confusion)[1] == expected
    assert "cat     0.6667    1.0000    0.8000         2" in class_report([[2, 0], [1, 1]], ["cat", "dog"])[0]
    assert "0     0.6667    1.0000    0.8000         2" in class_report([[2, 0], [1, 1]], ["cat"])[0]
