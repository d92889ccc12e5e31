"""Trainings with the callback against the same trainings of stock Lightning."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from meant import MEANT
from recorder import Record, differences
from scenarios import CUT_LOADER, CUT_STEP, REFUSED, SCENARIOS, STOCK, Mode, Scenario, record
from views import view

DOCS = Path(__file__).parents[2] / "docs"
CASES = [(scenario, mode) for scenario in SCENARIOS.values() for mode in scenario.modes]
SHOWN = 12  # differences that a failure prints


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a scenario without the callback, once for all modes."""
    return cache(lambda name: record(SCENARIOS[name], STOCK, tmp_path_factory.mktemp("stock")))


def found(ours: Record, stock: Record, scenario: Scenario, mode: Mode) -> dict[str, str]:
    """Differences that are not meant, one for each kind of place."""
    tolerance = scenario.tolerance if mode.cut else 0.0
    result: dict[str, str] = {}
    for where, our_value, stock_value in differences(view(ours, mode), view(stock, mode), tolerance):
        if not any(each.covers(scenario.name, mode.name, where) for each in MEANT):
            result.setdefault(re.sub(r"\[\d+\]", "[n]", where), f"{where}: {our_value} instead of {stock_value}")
    return result


@pytest.mark.parametrize(("scenario", "mode"), CASES, ids=[f"{scenario.name}-{mode.name}" for scenario, mode in CASES])
def test_a_training_is_that_of_stock_lightning(scenario: Scenario, mode: Mode, stock: Any, tmp_path: Path) -> None:
    """Bit for bit where nothing is cut, and up to rounding where batches are."""
    wrong = found(record(scenario, mode, tmp_path), stock(scenario.oracle or scenario.name), scenario, mode)
    text = "\n".join(list(wrong.values())[:SHOWN])
    assert not wrong, f"{len(wrong)} kinds of differences:\n{text}"
