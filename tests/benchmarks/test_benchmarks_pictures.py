"""The pictures of the documentation show what was measured."""

from pathlib import Path

import pytest

from benchmarks import pictures
from benchmarks.output import read_json

ROOT = Path(__file__).parents[2]

KEPT = ROOT / "benchmarks" / "results"


def test_a_batch_that_runs_out_of_memory_runs_again_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the picture: the attempt stays within the budget until it fails, and its halves do not fail."""
    monkeypatch.setattr(pictures, "quiet", lambda: None)
    with pytest.warns(UserWarning, match="Memory ran out in training with 4096 samples"):
        measured = pictures.measured_survival()
    for seen in (measured, read_json("pictures", KEPT)["survival"]):
        assert [part["samples"] for part in seen["attempts"]] == [4096, 2048, 2048]
        assert [part["failed"] for part in seen["attempts"]] == [True, False, False]
        assert max(max(part["live"]) for part in seen["attempts"]) <= seen["budget"]


def test_each_picture_is_drawn_for_light_and_dark_pages(tmp_path: Path) -> None:
    pictures.draw(read_json("pictures", KEPT), tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert set(drawn) == {path.name for path in pictures.FOLDER.glob("*.svg")}
    for name, text in drawn.items():
        assert pictures.INKS["dark" if "dark" in name else "light"] in text
