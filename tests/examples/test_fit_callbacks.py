"""What the recipe shows, with a tiny network on two forked ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import forked

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # examples are not installed

from examples.reproduce import fit_callbacks as recipe  # noqa: E402

pytestmark = pytest.mark.distributed
SIZE = {"norm": "group", "train": 140, "val": 20, "epochs": 2, "goal": 0.0, "data": "digits", "net": "test_resnet"}


def train(how: str, folder: str, precision: str) -> None:
    settings = {"run": {"how": how, **SIZE}, "root": "data", "folder": folder, "precision": precision}
    assert recipe.main([json.dumps(settings)]) == 0


def record(how: str, folder: Path, precision: str = recipe.MIXED) -> dict[str, Any]:
    """What the first rank wrote, and how many checkpoints there are."""
    folder.mkdir()
    ended = forked(train, how, str(folder), precision, folder=folder)
    assert ended.code == 0, ended.output
    found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return found | {"checkpoints": len(list(folder.glob("checkpoints/*.ckpt")))}


def test_callbacks_see_the_same_training_however_it_is_cut(tmp_path: Path) -> None:
    """Steps, checkpoints and what is monitored are those of whole batches."""
    whole, cut = (record(how, tmp_path / how, "32-true") for how in (recipe.WHOLE, recipe.OURS))
    for key in ("steps", "left", "checkpoints"):
        assert cut[key] == whole[key], key
    assert whole["steps"] == 4
    for ours, theirs in zip(cut["validated"], whole["validated"], strict=True):
        assert ours["val/loss"] == pytest.approx(theirs["val/loss"], rel=1e-4)
    assert cut["shares"] == {"full": pytest.approx(1, rel=1e-4), "ragged": pytest.approx(1, rel=1e-4)}


@pytest.mark.parametrize(
    ("how", "full", "ragged", "left"),
    [
        (recipe.STOCK, 1, 0.2, 0),
        (recipe.UNDIVIDED, 10, 2, 0),
        (recipe.BY_BATCH, 10 / 6, 2 / 6, 0),
        (recipe.CARRIED, 1, None, 44),  # two micro-batches, then four
    ],
)
def test_usual_answers_give_the_optimizer_another_gradient(
    how: str, full: float, ragged: float | None, left: int, tmp_path: Path
) -> None:
    """Multiples of the mean over the window; the last window of an epoch is of 2 micro-batches instead of 10."""
    found = record(how, tmp_path / "run")
    assert found["shares"]["full"] == pytest.approx(full, rel=0.1)
    if ragged is not None:
        assert found["shares"]["ragged"] == pytest.approx(ragged, rel=0.3)
    assert found["left"] == left
