"""The benchmarks' tables, records and targets; what they time and train is left to them."""

import doctest
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import fidelity, output, quote, turns
from benchmarks.fidelity import Measured
from benchmarks.stacks import CASES, Case

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quiet_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go to a folder of the test's own, and logging and warnings stay as pytest has them."""
    monkeypatch.setattr(output, "RESULTS", tmp_path)
    monkeypatch.setattr(output, "quiet", lambda: None)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything leaves them behind
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize(
    "name",
    [
        *("fidelity", "output", "overhead", "startup", "sampler", "gpu", "chaos", "turns", "idle"),
        *("exchange", "probing.cells", "probing.programs", "probing.training"),
    ],
)
def test_doctests(name: str) -> None:
    """Examples in docstrings hold."""
    assert doctest.testmod(importlib.import_module(f"benchmarks.{name}")).failed == 0


def test_the_fidelity_table_is_80_columns_wide_and_its_json_complete(monkeypatch, capsys, tmp_path):
    """Run for real on three rows, a peer that refuses among them."""
    chosen = [case for case in CASES if case.name.startswith(("ragged: 2", "fp16", "LBFGS strong"))]
    monkeypatch.setattr(fidelity, "CASES", chosen)
    assert fidelity.main(["--draws", "1"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= output.WIDTH
    ragged, half, _ = json.loads((tmp_path / "fidelity.json").read_text())["rows"]
    assert ragged["met"]
    assert ragged["worst"]["stock_lightning"] == pytest.approx(0.5)
    assert half["worst"]["ours_fp64"] is None
    assert set(half["reasons"]) == {"accelerate", "ours_fp64"}


def test_a_missed_target_is_said_and_exits_with_one(monkeypatch, capsys):
    """With the value and what was asked; NaN is a miss."""
    wrong = Measured({"ours": [1e-3], "ours_fp64": [float("nan")], "whole": [1e-7]})
    monkeypatch.setattr(fidelity, "CASES", [Case("wrong")])
    monkeypatch.setattr(fidelity, "measured", lambda case, draws: wrong)
    assert fidelity.main([]) == 1
    printed = capsys.readouterr().out
    assert "MISSED wrong: ours in fp64 is nan, at most 1e-12 was asked." in printed
    assert printed.count("MISSED") == 3


def test_trainers_take_turns_window_by_window() -> None:
    """In order, and those that are left go on when one ends."""
    seen, trainer = list[str](), SimpleNamespace(accumulate_grad_batches=2)

    def player(name: str, windows: int) -> Any:
        def fit(watch: turns.Stopwatch) -> None:
            for index in range(2 * windows):
                seen.append(name)
                watch.on_train_batch_end(trainer, None, None, None, index)

        return fit

    watches = turns.take_turns([player("a", 2), player("b", 1), player("c", 2)])
    assert "".join(seen) == "aabbccaacc"
    assert [len(watch.wall) for watch in watches] == [2, 1, 2]


def test_the_documentation_quotes_the_last_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "RESULTS", ROOT / "benchmarks" / "results")
    for page in quote.PAGES:
        assert page.read_text() == quote.quoted(page.read_text())
