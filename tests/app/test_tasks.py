"""What a run does with names and secrets from elsewhere, and with checkpoints that are not as Lightning wrote them."""

import csv
import errno
import json
import math
import os
import random
from pathlib import Path

import pytest
import torch
from command_lines import TINY
from PIL import Image
from sklearn.metrics import classification_report

from lightning_ga.app import tasks
from lightning_ga.app.tasks import class_report
from lightning_ga.app.values import as_written, resolved

CLASSES = ("=cmd|' /C calc'!A1", "\x1b]0;title\x07", b"caf\xe9".decode("utf-8", "surrogateescape"), "a\nb")


def write_pictures(root: Path) -> None:
    """Three pictures of each class, in folders and files with names that do no good."""
    for number, name in enumerate(CLASSES):
        for part in ("train", "val", "test"):
            folder = root / part / os.fsencode(name).decode("utf-8", "surrogateescape")
            folder.mkdir(parents=True)
            for index in range(2):
                Image.new("RGB", (8, 8), (60 * number, 20 * index, 0)).save(folder / f"={index}\x1b[2J.png")


def test_names_from_elsewhere_do_nothing_and_lose_nothing(command):
    """Not on the screen, in the log, nor in a spreadsheet; what was trained is there, whatever classes are called."""
    write_pictures(Path("pictures"))
    data = ("data=image_folder", "data.root=pictures", "data.image_size=8", "data.batch_size=4")
    run = command(*TINY, *data)
    assert run.code == 0, run.err
    assert "test/acc" in json.loads((run.folder / "result.json").read_text())
    predicted = command(*TINY, *data, "task=predict", f"ckpt_path={run.folder}", folder="predict")
    assert predicted.code == 0, predicted.err
    texts = [run.out, run.err, predicted.out, predicted.err]
    texts += [(run.folder / name).read_text() for name in ("train.log", "classification_report.txt", "report.html")]
    assert not any("\x1b" in text or "\x07" in text for text in texts)
    assert "\\x1b]0;title" in run.out
    with (predicted.folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    cells = [cell for row in rows for cell in row]
    assert not any(cell.startswith(("=", "\x1b")) for cell in cells)
    assert "caf\ufffd" in "".join(cells)
    assert len(rows) == 9


def test_a_folder_that_a_library_cannot_write_is_told(command):
    assert "is not read as UTF-8" in command(*TINY, f"hydra.run.dir='outputs/{CLASSES[2]}'").mistake
    assert command(*TINY, "logger=csv", f"hydra.run.dir='outputs/{CLASSES[2]}2'").code == 0


@pytest.mark.parametrize("broken", ["write_page", "loss_figure"])
def test_what_is_written_for_people_loses_nothing(command, monkeypatch, broken):
    monkeypatch.setattr(tasks, broken, lambda *_: 1 / 0)
    run = command(*TINY)
    assert run.code == 0
    assert "could not be written: division by zero" in run.err
    assert "test/acc" in json.loads((run.folder / "result.json").read_text())


def test_a_result_that_cannot_be_written_is_shown(command, monkeypatch):
    """The disk may be full by then."""
    write = tasks.write_json

    def fail(path, content):
        if path.name == "result.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(tasks, "write_json", fail)
    run = command(*TINY)
    assert run.code == 1
    assert "test/acc" in run.out.splitlines()[-1]
    assert "result.json' cannot be written: No space left on device" in run.err


def test_secrets_of_the_environment_are_nowhere_in_a_run(command, monkeypatch):
    """Their names are: in the configuration, which a later run is compared with; the page has neither."""
    secret = "correct-horse-battery"
    monkeypatch.setenv("TOKEN", secret)
    line = (*TINY, "data.root=https://me:${oc.env:TOKEN}@host")
    run = command(*line)
    assert run.code == 0, run.err
    for path in run.folder.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    assert secret not in run.out + run.err
    assert "root: https://me:${oc.env:TOKEN}@host" in (run.folder / "config.yaml").read_text()
    page = (run.folder / "report.html").read_text()
    assert "https://me:***@host" in page
    assert "TOKEN" not in page
    again = command(*line, "task=validate", "ckpt_path=best", folder="again")
    assert again.code == 0, again.err
    assert "not as the one that wrote" not in again.err


def test_a_variable_is_written_by_its_name(monkeypatch):
    """Also in the middle of a text, by way of other keys, and as a number; a default that stands in for it is plain."""
    from omegaconf import OmegaConf

    monkeypatch.setenv("SECRET", "7")
    cfg = OmegaConf.create(
        {
            "a": {"b": "${oc.env:SECRET}"},
            "c": ["x-${a.b}", "${oc.decode:${oc.env:SECRET}}"],
            "d": "${oc.env:NOT_SET,plain}",
            "e": "${a}",
            "f": 7,
        }
    )
    config = resolved(cfg)
    assert config["c"] == ["x-7", 7]
    name = "${oc.env:SECRET}"
    assert as_written(cfg, config) == {
        "a": {"b": name},
        "c": [f"x-{name}", name],
        "d": "plain",
        "e": {"b": name},
        "f": 7,
    }
    assert resolved(cfg) == config
    cfg["g"] = {"7": "found"}
    cfg["h"] = "${g.${oc.env:SECRET}}"  # a key that needs the value
    config = resolved(cfg)
    written = as_written(cfg, config)
    assert "7" not in str([written["a"], written["c"]])
    assert config["h"] == "found"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.update({"pytorch-lightning_version": "2.x"}), "cannot be taken over"),
        (lambda content: content["callbacks"].update(AutoAccumulate={"position": 3}), "state of AutoAccumulate"),
        (
            lambda content: content["callbacks"]["AutoAccumulate"]["position"].update(epoch=-1),
            "state of AutoAccumulate",
        ),
        (lambda content: content["optimizer_states"][0]["param_groups"].clear(), "cannot be taken over"),
        (lambda content: content["optimizer_states"][0]["param_groups"][0].update(lr=math.nan), "other values are its"),
        (lambda content: content["optimizer_states"][0]["param_groups"][0].update(betas=(9.0,)), "are its betas"),
        (lambda content: content.update(lr_schedulers=[{}]), "cannot be taken over"),
    ],
)
def test_a_checkpoint_of_other_content_ends_in_one_sentence(command, shared, change, words):
    """Before anything is trained."""
    first = shared(*TINY, folder="first")
    content = torch.load(first.folder / "checkpoints" / "last.ckpt", weights_only=True)
    change(content)
    torch.save(content, "changed.ckpt")
    run = command(*TINY, "trainer.max_epochs=2", "ckpt_path=changed.ckpt")
    assert words in run.mistake
    assert "Epoch" not in run.out


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


def test_scores_are_told_with_the_names_of_classes():
    """In lines that a terminal holds; numbers where the names are not those of the classes."""
    text, _ = class_report([[2, 0], [1, 1]], ["cat", "dog"])
    assert "cat     0.6667    1.0000    0.8000         2" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "0     0.6667    1.0000    0.8000         2" in class_report([[2, 0], [1, 1]], ["cat"])[0]
