"""Remembered limits: written whole, read back equal, and never a reason to fail."""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lightning_ga.plan.records import ProbeResult, Timing, Trial
from lightning_ga.probe.cache import cache_folder, forget, remember, remembered

STEP = {"model": "abc", "budget": 1000}
FOUND = ProbeResult(
    limit=8,
    budget_bytes=1000,
    peak_bytes=990,
    trials=(Trial(4, 600, True, 0.1), Trial(8, 990, True, 0.2)),
    steps=4,
    seconds=0.5,
    method="replay",
    curve=((1, 300), (8, 990), (9, 1090)),
    timings=(Timing(8, 2, 0.25),),
    fastest=8,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "on the way"))
    return cache_folder()


def test_what_is_written_is_read_back(folder: Path) -> None:
    assert remembered(STEP) is None
    remember(STEP, FOUND)
    assert remembered(dict(reversed(STEP.items()))) == FOUND, "the order of a description does not matter"
    assert remembered({**STEP, "budget": 1001}) is None
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_what_an_error_has_disproved_is_forgotten(folder: Path) -> None:
    """Of that step alone; and nothing is lost where there is nothing to delete."""
    other = {**STEP, "model": "def"}
    forget(STEP)
    remember(STEP, FOUND)
    remember(other, FOUND)
    forget(STEP)
    assert remembered(STEP) is None
    assert remembered(other) == FOUND


@pytest.mark.parametrize(
    "change",
    [
        "",
        "[]",
        "\x00\xff",
        '{"probe": {"limit": 3}}',
        {"limit": 0},
        {"peak_bytes": "990"},
        {"curves": []},
    ],
    ids=str,
)
def test_a_corrupt_file_is_ignored_with_a_warning_and_mended(folder: Path, change: str | dict[str, Any]) -> None:
    """It is none of ours, has another field, or a limit that is none."""
    remember(STEP, FOUND)
    (file,) = folder.iterdir()
    content = json.loads(file.read_text())
    whole = change if isinstance(change, str) else json.dumps({**content, "probe": content["probe"] | change})
    file.write_text(whole, encoding="latin-1")
    with pytest.warns(UserWarning, match=f"{file.name} cannot be read .*so the limit is looked for again"):
        assert remembered(STEP) is None
    remember(STEP, FOUND)
    assert remembered(STEP) == FOUND


def test_an_unwritable_folder_is_a_warning(folder: Path) -> None:
    folder.parent.write_text("")
    with pytest.warns(UserWarning, match="cannot be written .*so the limit is not remembered"):
        remember(STEP, FOUND)
    assert remembered(STEP) is None


def test_a_write_that_fails_half_way_leaves_the_old_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(STEP, FOUND)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        remember(STEP, ProbeResult(**{**asdict(FOUND), "limit": 9}))
    assert remembered(STEP) == FOUND
    assert len(list(folder.iterdir())) == 1


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == Path(os.environ["XDG_CACHE_HOME"]) / "lightning_ga"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "lightning_ga"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() == Path(tempfile.gettempdir()) / "lightning_ga"
