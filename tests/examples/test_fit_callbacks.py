"""What the recipe shows, with a tiny network on two forked ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from forks import forked, in_turn

from examples.reproduce import fit_callbacks as recipe

pytestmark = [pytest.mark.distributed, pytest.mark.slow]  # gradients on ranks are what test_ranks.py holds
USUAL: dict[str, tuple[float, float | None, int]] = {
    recipe.STOCK: (1, 0.2, 0),
    recipe.UNDIVIDED: (10, 2, 0),
    recipe.BY_BATCH: (10 / 6, 2 / 6, 0),
    recipe.CARRIED: (1, None, 44),  # two micro-batches, then four
}
"""Shares of the mean over the window that a full and a ragged one have, and the images that are left over."""
SIZE = {"norm": "group", "train": 140, "val": 20, "epochs": 2, "goal": 0.0, "data": "digits", "net": "test_resnet"}


def train(how: str, folder: str, precision: str) -> None:
    settings = {"run": {"how": how, **SIZE}, "root": "data", "folder": folder, "precision": precision}
    assert recipe.main([json.dumps(settings)]) == 0


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the first rank of each training wrote, and how many checkpoints there are."""
    folder = tmp_path_factory.mktemp("fit_callbacks")
    precisions = dict.fromkeys((recipe.WHOLE, recipe.OURS), "32-true") | dict.fromkeys(USUAL, recipe.MIXED)
    for how in precisions:
        (folder / how).mkdir()
    lives = [((how, str(folder / how), precision), 0) for how, precision in precisions.items()]
    done = forked(in_turn, train, lives, folder=folder)
    assert done.code == 0, done.output
    return {how: read(folder / how) for how in precisions}


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return found | {"checkpoints": len(list(folder.glob("checkpoints/*.ckpt")))}


def test_callbacks_see_the_same_training_however_it_is_cut(records: dict[str, dict[str, Any]]) -> None:
    """Steps, checkpoints and what is monitored are those of whole batches."""
    whole, cut = records[recipe.WHOLE], records[recipe.OURS]
    for key in ("steps", "left", "checkpoints"):
        assert cut[key] == whole[key], key
    assert whole["steps"] == 4
    for ours, theirs in zip(cut["validated"], whole["validated"], strict=True):
        assert ours["val/loss"] == pytest.approx(theirs["val/loss"], rel=1e-4)
    assert cut["shares"] == {"full": pytest.approx(1, rel=1e-4), "ragged": pytest.approx(1, rel=1e-4)}


@pytest.mark.parametrize("how", USUAL)
def test_usual_answers_give_the_optimizer_another_gradient(how: str, records: dict[str, dict[str, Any]]) -> None:
    found, (full, ragged, left) = records[how], USUAL[how]
    assert found["shares"]["full"] == pytest.approx(full, rel=0.1)
    if ragged is not None:
        assert found["shares"]["ragged"] == pytest.approx(ragged, rel=0.3)
    assert found["left"] == left
