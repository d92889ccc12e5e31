import json
from base64 import b64decode
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_lines import TINY
from PIL import Image

from lightning_ga.app.pictures import (
    PREDICTION,
    TEST,
    TRAINING,
    Pictures,
    as_png,
    in_words,
    labels_in,
    pictures_in,
)

NAMES = ("cat", "dog", "cow")


def trainer(**changes):
    return SimpleNamespace(**{"is_global_zero": True, "datamodule": SimpleNamespace(class_names=NAMES), **changes})


def chapters(folder):
    return json.loads((folder / "pictures.json").read_text())


def pixels(png: str) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(b64decode(png))))


def test_the_worst_test_samples_come_first(tmp_path):
    """Of all batches, by the probability of their class; wrong ones are marked."""
    kept, images = Pictures(tmp_path), torch.rand(40, 1, 8, 8)
    probabilities, labels = torch.rand(40, 3).softmax(dim=1), torch.arange(40) % 3
    for start in range(0, 40, 10):
        part = slice(start, start + 10)
        outputs = {"class_probabilities": probabilities[part]}
        kept.on_test_batch_end(trainer(), None, outputs, (images[part], labels[part]), 0)
    kept.teardown(trainer(), None, "test")
    found = chapters(tmp_path)[TEST]
    order = probabilities[torch.arange(40), labels].argsort()[:24].tolist()
    for place, (png, text) in zip(order, found, strict=True):
        label, predicted = int(labels[place]), int(probabilities[place].argmax())
        share = float(probabilities[place].max())
        assert text == f"{'✗ ' * (label != predicted)}{NAMES[label]}: predicted {NAMES[predicted]} ({share:.0%})"
        grey = images[place, 0]
        expected = (grey - grey.min()) / (grey.max() - grey.min()) * 255
        assert abs(pixels(png).astype(float) - expected.numpy()).max() <= 1


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        (None, torch.tensor([0, 1])),
        ({"class_probabilities": torch.rand(2, 3)}, torch.tensor([0.5, 1.5])),
        ({"class_probabilities": torch.rand(2, 3)}, torch.tensor([0, -100])),
        ({"class_probabilities": torch.rand(2, 3)}, torch.tensor([0, 3])),
        ({"class_probabilities": torch.rand(3, 3)}, torch.tensor([0, 1])),
        ({"class_probabilities": 0.5}, torch.tensor([0, 1])),
    ],
)
def test_other_tests_show_no_samples(tmp_path, outputs, labels):
    """Nothing is shown that is not known: other outputs, labels that are no classes."""
    kept = Pictures(tmp_path)
    kept.on_test_batch_end(trainer(), None, outputs, (torch.rand(2, 3, 8, 8), labels), 0)
    kept.teardown(trainer(), None, "test")
    assert not (tmp_path / "pictures.json").exists()


def test_the_first_training_batch_is_shown_as_the_model_sees_it(tmp_path):
    """With its labels, but for mixed ones; later batches show nothing."""
    kept, images = Pictures(tmp_path), torch.rand(2, 3, 8, 12)
    kept.on_train_batch_start(trainer(), None, (images, torch.arange(2)), 0)
    kept.on_train_batch_start(trainer(), None, (images, torch.ones(2, dtype=torch.int64)), 1)
    kept.teardown(trainer(is_global_zero=False), None, "fit")
    assert not (tmp_path / "pictures.json").exists(), "of another rank"
    kept.teardown(trainer(), None, "fit")
    found = chapters(tmp_path)[TRAINING]
    assert [text for _, text in found] == ["cat", "dog"]
    assert [pixels(png).shape for png, _ in found] == [(8, 12, 3)] * 2


def test_a_prediction_is_previewed(tmp_path):
    """The first batch, with its pictures if it holds any."""
    kept = Pictures(tmp_path)
    for _ in range(2):
        kept.on_predict_batch_end(trainer(), None, torch.tensor([[0.5], [2.0]]), [torch.rand(2, 5)], 0)
    kept.teardown(trainer(), None, "predict")
    assert chapters(tmp_path) == {PREDICTION: [["", "[0.5]"], ["", "[2.]"]]}
    kept, images = Pictures(tmp_path), torch.rand(1, 1, 8, 8)
    kept.on_predict_batch_end(trainer(), None, {"class_probabilities": torch.tensor([[0.25, 0.75, 0.0]])}, images, 0)
    kept.teardown(trainer(), None, "predict")
    assert chapters(tmp_path) == {PREDICTION: [[as_png(images[0]), "dog (75%)"]]}


@pytest.mark.parametrize(
    ("outputs", "texts"),
    [
        (torch.tensor([[1, 2], [3, 4]]), ["[1. 2.]", "[3. 4.]"]),
        (torch.ones(30), ["1.0"] * 24),
        ([{"boxes": 1}, {"boxes": 2}], ["{'boxes': 1}", "{'boxes': 2}"]),
        (torch.tensor(2.0), ["tensor(2.)"]),
        (None, ["None"]),
        ({"a": torch.ones(2)}, ["{'a': tensor([1., 1.])}"]),
        (torch.ones(0, 2), []),
        (torch.ones(2, 2, dtype=torch.bfloat16), ["[1. 1.]", "[1. 1.]"]),
    ],
)
def test_any_prediction_is_put_into_words(outputs, texts):
    assert in_words(outputs) == texts


def test_pictures_are_found_by_their_shape():
    """In a tensor, in a list as detection has it, in any container; series and tables are none."""
    images, odd = torch.rand(4, 3, 8, 8), [torch.rand(3, 8, 9), torch.rand(3, 10, 8)]
    targets = [{"boxes": torch.rand(2, 4)}, {"boxes": torch.rand(1, 4)}]
    for batch, count in (
        *((images, 4), ((images, torch.arange(4)), 4), ({"y": torch.arange(4), "x": images}, 4), ((odd, targets), 2)),
        *((([images, images], torch.arange(4)), 4), (torch.rand(4, 2, 8, 8), 0), (torch.rand(4, 3, 2, 8), 0)),
        *((torch.rand(4, 8), 0), ([], 0), ("text", 0), (None, 0), (torch.rand(3, 8, 8), 0)),
    ):
        assert len(pictures_in(batch)) == count, batch
    assert labels_in((odd, targets), 2) is None
    assert labels_in((images, 1 + torch.rand(4, 3)), 4) is None, "mixed ones"


def test_any_picture_becomes_a_small_png():
    """Large ones are made smaller; values of one level, not finite ones and half precision do no harm."""
    assert pixels(as_png(torch.rand(3, 300, 150))).shape == (96, 48, 3)
    for picture in (torch.ones(1, 8, 8), torch.full((3, 8, 8), torch.nan), torch.rand(3, 8, 8).bfloat16()):
        assert pixels(as_png(picture)).shape[:2] == (8, 8)


def test_a_run_shows_its_samples(shared):
    """A training and its test: each chapter on the page."""
    run = shared(*TINY)
    assert {*chapters(run.folder)} == {TRAINING, TEST}
    page = (run.folder / "report.html").read_text()
    assert page.count('<img alt="" src="data:image/png;base64,') == sum(map(len, chapters(run.folder).values()))
