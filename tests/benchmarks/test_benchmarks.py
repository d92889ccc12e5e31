"""The benchmarks' tables, records and targets; what they time and train is left to them."""

import doctest
import importlib
from pathlib import Path

import pytest

from benchmarks import output, quote

ROOT = Path(__file__).parents[2]


def test_doctests() -> None:
    """Examples in docstrings hold, and there are some."""
    names = (
        "fidelity frameworks output startup gpu chaos checkpointing turns idle weight "
        "probing.cells probing.programs probing.training"
    )
    results = [doctest.testmod(importlib.import_module(f"benchmarks.{name}")) for name in names.split()]
    assert sum(result.failed for result in results) == 0
    assert all(result.attempted for result in results)


def test_the_documentation_quotes_the_last_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "RESULTS", ROOT / "benchmarks" / "results")
    for page in quote.PAGES:
        assert page.read_text() == quote.quoted(page.read_text())
