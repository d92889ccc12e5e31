"""Trainings with the callback against the same trainings of stock Lightning."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from meant import MEANT, Meant
from recorder import Record, differences
from scenarios import (
    ALL,
    CASES,
    CUT_LOADER,
    CUT_STEP,
    DEFAULTS,
    REFUSED,
    SCENARIOS,
    STOCK,
    WITH_DEFAULTS,
    WRONG,
    Mode,
    Refused,
    Run,
    Scenario,
    record,
)
from views import outcome, survived, view

from lightning_ga import UserError

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = 12  # differences that a failure prints
READ = {"sgd", "validation_by_count", "limit_by_count", "ready_batches", "own_batch_sampler", "own_class_of_loader"}
READ |= {"a_dict_of_loaders"}
"""Scenarios in which what users read of the trainer is the same where nothing is cut: the loader, and after how many
batches validation runs."""
DEFECTS = (("random_numbers_of_unequal_loaders", "defaults", r"\['draws'\]\[[01]\]\[1\]"),)
"""Differences that are not meant, and not mended yet: random numbers where the first epoch of loaders of unequal size
starts."""
Stock = Callable[[str], Record]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Run a scenario without the callback, once for all modes."""
    return cache(lambda name: record(SCENARIOS[name], STOCK, tmp_path_factory.mktemp("stock")))


def found(ours: Record, stock: Record, scenario: Scenario, mode: Mode) -> dict[str, str]:
    """Differences that are not meant, one for each kind of place."""
    seen = survived if mode.fails else lambda record: view(record, mode)
    parts = [seen(each) if scenario.oracle is None else outcome(each) for each in (ours, stock)]
    if scenario.name in READ and not mode.cut and mode is not DEFAULTS:
        parts = [{**part, "read": each["read"]} for part, each in zip(parts, (ours, stock))]
    exact = not mode.cut and scenario.oracle is None
    return unmeant(*parts, scenario.name, mode.name, tolerance=0.0 if exact else scenario.tolerance)


def unmeant(ours: Any, stock: Any, scenario: str, mode: str, *, tolerance: float = 0.0) -> dict[str, str]:
    """Differences of two values that ``meant.py`` does not list."""
    result: dict[str, str] = {}
    for where, our_value, stock_value in differences(ours, stock, tolerance):
        known = any(each[:2] == (scenario, mode) and re.fullmatch(each[2], where) for each in DEFECTS)
        if not known and not any(each.covers(scenario, mode, where, our_value) for each in MEANT):
            result.setdefault(re.sub(r"\[\d+\]", "[n]", where), f"{where}: {our_value} instead of {stock_value}")
    return result


def show(wrong: dict[str, str]) -> str:
    """The first differences, one a line."""
    return "\n".join([f"{len(wrong)} kinds of differences from stock Lightning:", *list(wrong.values())[:SHOWN]])


def row(scenario: Scenario, mode: Mode, quick: bool) -> Any:
    """Parameters of a test; all rows together take more than a minute."""
    return pytest.param(scenario, mode, id=f"{scenario.name}-{mode.name}", marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("scenario", "mode"), [row(*case) for case in CASES])
def test_a_training_is_that_of_stock_lightning(scenario: Scenario, mode: Mode, stock: Stock, tmp_path: Path) -> None:
    wrong = found(record(scenario, mode, tmp_path), stock(scenario.oracle or scenario.name), scenario, mode)
    assert not wrong, show(wrong)


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("mode", [DEFAULTS, CUT_LOADER, CUT_STEP], ids=lambda mode: mode.name)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's, of what is refused
def test_what_is_refused(refused: Refused, mode: Mode, tmp_path: Path) -> None:
    """By the sentence that the documentation promises, and before the first batch."""
    run = Run(Scenario("refused", refused.train), mode, tmp_path)
    with pytest.raises(UserError, match=re.escape(refused.sentence)):
        refused.train(run)
    assert not [event for event in run.journal.events if event.hook == "on_train_batch_start"]


@pytest.mark.parametrize("train", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_stock_lightning_refuses(train: Callable[[Run], Any], mode: Mode, tmp_path: Path) -> None:
    """Is refused all the same, by an error of the same kind or by one of the package's own."""
    errors = []
    for each in (STOCK, mode):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            train(Run(Scenario("wrong", train), each, tmp_path))
        errors.append(caught.value)
    assert isinstance(errors[1], UserError) or (type(errors[1]), str(errors[1])) == (type(errors[0]), str(errors[0]))


@pytest.mark.parametrize("meant", MEANT, ids=lambda meant: meant.scenarios)
def test_a_meant_difference_is_documented(meant: Meant) -> None:
    page = " ".join((DOCS / meant.page).read_text(encoding="utf-8").split())
    assert meant.sentence in page
    assert any(re.fullmatch(meant.scenarios, name) for name in SCENARIOS)
    assert any(re.fullmatch(meant.modes, mode.name) for mode in (DEFAULTS, *ALL))


def test_names_of_scenarios_with_defaults() -> None:
    assert len(set(WITH_DEFAULTS)) == len(WITH_DEFAULTS)
    assert set(WITH_DEFAULTS) <= set(SCENARIOS)
