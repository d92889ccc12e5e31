"""Trainings with the callback against the same trainings of stock Lightning."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from recorder import Record, differences, outcome, promised
from scenarios import ALL, DEFAULTS, SCENARIOS, STOCK, WITH_DEFAULTS, WRONG, Mode, Row, Run, record

from lightning_ga import UserError

SHOWN = 12  # differences that a failure prints


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all runs, as its path is in their checkpoints."""
    return tmp_path_factory.mktemp("runs") / "run"


@pytest.fixture(scope="session")
def stock(folder: Path) -> Callable[[str], Record]:
    """Run a scenario without the callback, once for all modes."""
    return cache(lambda name: record(SCENARIOS[name], STOCK, folder))


def cases() -> list[Any]:
    """Every scenario in both modes: uncut, cut, and after an error; one of these is quick, by turns."""
    rows = []
    for number, (name, row) in enumerate(SCENARIOS.items()):
        quick = ALL[number % len(ALL)]
        modes = [(mode, mode is quick or quick not in row.modes) for mode in row.modes]
        modes += [(DEFAULTS, WITH_DEFAULTS.index(name) % 2 == 0)] if name in WITH_DEFAULTS else []
        rows += [
            pytest.param(name, mode, id=f"{name}-{mode.name}", marks=() if is_quick else pytest.mark.slow)
            for mode, is_quick in modes
        ]
    return rows


@pytest.mark.parametrize(("name", "mode"), cases())
def test_a_training_is_that_of_stock_lightning(
    name: str, mode: Mode, stock: Callable[[str], Record], folder: Path
) -> None:
    row = SCENARIOS[name]
    # In the step the loader is the user's own, and so is where a resume finds it.
    oracle = "" if mode.where == "step" and name.startswith("resumed") else row.oracle
    theirs, ours = stock(oracle or name), record(row, mode, folder)
    if oracle:
        ours, theirs = outcome(ours), outcome(theirs)
    elif mode.cut:
        ours, theirs = (promised(each, in_step=mode.where == "step", failed=mode.fails) for each in (ours, theirs))
    exact = not mode.cut and not oracle
    found: dict[str, str] = {}
    for difference in differences(ours, theirs, 0.0 if exact else row.tolerance):
        found.setdefault(re.sub(r"\[\d+\]", "[n]", difference.partition(":")[0]), difference)
    assert not found, "\n".join([f"{len(found)} kinds of differences:", *list(found.values())[:SHOWN]])


@pytest.mark.parametrize("row", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("mode", ALL[:4], ids=lambda mode: mode.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_stock_lightning_refuses(row: Row, mode: Mode, tmp_path: Path) -> None:
    """Is refused all the same, by an error of the same kind or by one of the package's own."""
    errors = []
    for each in (STOCK, mode):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            row.train(Run(row, each, tmp_path))
        errors.append(caught.value)
    assert isinstance(errors[1], UserError) or repr(errors[1]) == repr(errors[0])
