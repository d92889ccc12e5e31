"""The benchmarks' tables, records and targets; what they time and train is left to them."""

import doctest
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # benchmarks are not installed

from benchmarks import fidelity, output, overhead, quote, startup, turns  # noqa: E402
from benchmarks.cases import CASES, Case  # noqa: E402
from benchmarks.measure import Measured  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go to a folder of the test's own, and logging and warnings stay as pytest has them."""
    monkeypatch.setattr(output, "RESULTS", tmp_path)
    for program in (fidelity, overhead):
        monkeypatch.setattr(program, "quiet", lambda: None)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything leaves them behind
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize("name", ["fidelity", "output", "overhead", "startup"])
def test_doctests(name: str) -> None:
    """Examples in docstrings hold."""
    assert doctest.testmod(importlib.import_module(f"benchmarks.{name}")).failed == 0


def test_the_fidelity_table_is_80_columns_wide_and_its_json_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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


def test_a_missed_target_is_said_and_exits_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the value and what was asked; NaN is a miss."""
    wrong = Measured({"ours": [1e-3], "ours_fp64": [float("nan")], "whole": [1e-7]})
    monkeypatch.setattr(fidelity, "CASES", [Case("wrong")])
    monkeypatch.setattr(fidelity, "measure", lambda case, draws: wrong)
    assert fidelity.main([]) == 1
    printed = capsys.readouterr().out
    assert "MISSED wrong: ours in fp64 is nan, at most 1e-12 was asked." in printed
    assert printed.count("MISSED") == 3


@pytest.mark.parametrize(("slower", "code"), [(1.0, 0), (1.015, 1), (1.03, 1)])
def test_overhead_is_judged_by_the_median_ratio(
    slower: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of wall-clock times; one slow window does not matter."""

    def bout(model: str, rounds: int, order: list[str]) -> dict[str, Any]:
        assert sorted(order) == sorted([overhead.STOCK, *overhead.TARGETS])
        ours, stock = [slower, slower, 9.0], [1.0, 1.0, 1.0]
        return {name: dict.fromkeys(("wall", "cpu"), ours if "ours" in name else stock) for name in order}

    monkeypatch.setattr(overhead, "bout", bout)
    monkeypatch.setattr(overhead, "scaling_seconds", lambda model: 0.0)
    assert overhead.main(["--bouts", "2"]) == code
    assert max(map(len, capsys.readouterr().out.split("\r")[-1].splitlines())) <= output.WIDTH


@pytest.mark.parametrize(("added", "code"), [(0.5, 0), (1.5, 1)])
def test_a_start_is_judged_by_the_median_of_what_is_added(
    added: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To stock Lightning, in rows with and without workers and a cache."""
    costs = {startup.STOCK: 1.0, startup.AGAIN: 1.01, startup.OURS: 1.0 + added}
    monkeypatch.setattr(startup, "script", lambda name, **row: name)
    monkeypatch.setattr(startup, "seconds", lambda source, folder: costs[source])
    assert startup.main(["--rounds", "3"]) == code
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= output.WIDTH
    assert printed.count(f"+{added:.2f}") == 3 * 4
    assert printed.count(" NO") == 4 * code


@pytest.mark.filterwarnings("ignore:.*_dataloader.* has:UserWarning")
@pytest.mark.parametrize("name", [startup.STOCK, startup.OURS])
def test_the_fits_whose_starts_are_compared_train_the_same_micro_batches(name: str) -> None:
    """Of 64 samples, four to a step, as the README's script finds them."""
    held: dict[str, Any] = {"__name__": "readme"}
    exec(compile(startup.script(name, workers=0, cache="off"), name, "exec"), held)
    trainer = held["trainer"]
    assert (trainer.fit_loop.max_batches, trainer.global_step) == (16, 8)
    assert trainer.train_dataloader.batch_size == (startup.MICRO if name == startup.STOCK else 32)
    assert trainer.accumulate_grad_batches == startup.FACTOR
    assert "num_workers=2, persistent_workers=True" in startup.script(name, workers=2, cache="warm")


def test_trainers_take_turns_window_by_window() -> None:
    """In order, and those that are left go on when one ends."""
    seen: list[str] = []

    def player(name: str, windows: int) -> Any:
        def fit(watch: turns.Stopwatch) -> None:
            for index in range(2 * windows):
                seen.append(name)
                watch.on_train_batch_end(None, None, None, None, index)

        return fit

    watches = turns.take_turns([player("a", 2), player("b", 1), player("c", 2)], [2, 2, 2])
    assert "".join(seen) == "aabbccaacc"
    assert [len(watch.wall) for watch in watches] == [2, 1, 2]


def test_a_trainer_that_fails_ends_all() -> None:
    """Rather than leaving the others to wait for ever."""

    def waits(watch: turns.Stopwatch) -> None:
        watch.on_train_batch_end(None, None, None, None, 0)

    def fails(watch: turns.Stopwatch) -> None:
        raise ValueError("broken")

    with pytest.raises(RuntimeError, match="a trainer failed") as caught:
        turns.take_turns([waits, fails], [1, 1])
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_documentation_quotes_the_last_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m benchmarks.quote`` has been run after each benchmark."""
    monkeypatch.setattr(output, "RESULTS", ROOT / "benchmarks" / "results")
    for page in quote.PAGES:
        assert page.read_text() == quote.quoted(page.read_text())
