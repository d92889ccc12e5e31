"""The benchmarks' tables, records and targets; what they time and train is left to them."""

import doctest
import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import fidelity, output, quote
from benchmarks.stacks import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quiet_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results go to a folder of the test's own; Lightning tells nothing, whoever has set its logging up before."""
    monkeypatch.setattr(output, "RESULTS", tmp_path)
    monkeypatch.setattr(output, "quiet", lambda: None)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything leaves them behind
        monkeypatch.setenv(name, "0")
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_doctests() -> None:
    """Examples in docstrings hold, and there are some."""
    names = "fidelity output startup gpu chaos turns idle weight probing.cells probing.programs probing.training"
    results = [doctest.testmod(importlib.import_module(f"benchmarks.{name}")) for name in names.split()]
    assert sum(result.failed for result in results) == 0
    assert all(result.attempted for result in results)


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


def test_the_documentation_quotes_the_last_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "RESULTS", ROOT / "benchmarks" / "results")
    for page in quote.PAGES:
        assert page.read_text() == quote.quoted(page.read_text())
