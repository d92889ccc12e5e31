"""Trainings with the callback against the same trainings of stock Lightning."""

import re
import shutil
from collections.abc import Callable
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import recipes
from ranks import on_ranks
from recipes import RECIPES
from recorder import Record, differences, outcome, promised, rounded, without_step_values
from scenarios import ALL, DEFAULTS, SCENARIOS, STOCK, WITH_DEFAULTS, WRONG, Mode, Row, Run, record

from lightning_ga import UserError

assert not SCENARIOS.keys() & RECIPES.keys()
TABLE = SCENARIOS | RECIPES
SHOWN = 12  # differences that a failure prints


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all runs, as its path is in their checkpoints."""
    return tmp_path_factory.mktemp("runs") / "run"


@pytest.fixture(scope="session")
def run(folder: Path) -> Callable[[str, Mode], Record]:
    """Run a scenario; without the callback once for all modes, and on ranks together with all others that have some."""
    shared = lru_cache(maxsize=2)(lambda name: here(name, STOCK))
    on_two_ranks = cache(lambda mode: recorded_on_ranks(mode, folder.with_name("ranks")))

    def here(name: str, mode: Mode) -> Record:
        shutil.rmtree(folder, ignore_errors=True)
        return record(TABLE[name], mode, folder)

    def run(name: str, mode: Mode) -> Record:
        if TABLE[name].ranks == 1:
            return shared(name) if mode is STOCK else here(name, mode)
        first, second = (each[name] for each in on_two_ranks(mode))
        assert isinstance(first, dict), first
        assert not [*differences(*([end["state"] for end in each["ends"]] for each in (second, first)))]
        return first

    return run


def recorded_on_ranks(mode: Mode, folder: Path) -> list[Any]:
    """The records of two ranks."""
    shutil.rmtree(folder, ignore_errors=True)
    return on_ranks(recipes.on_rank, folder, mode, folder)


def cases() -> list[Any]:
    """Every scenario in both modes: uncut, cut, and after an error; one of these is quick, by turns.

    Recipes that fit are quick with nothing set.
    """
    rows = []
    for number, (name, row) in enumerate(TABLE.items()):
        quick = DEFAULTS if name in RECIPES else ALL[number % len(ALL)]
        modes = [(mode, mode is quick or quick not in row.modes) for mode in row.modes]
        modes += [(DEFAULTS, WITH_DEFAULTS.index(name) % 2 == 0)] if name in WITH_DEFAULTS else []
        for mode, is_quick in modes:
            marks = [*([] if is_quick else [pytest.mark.slow]), *([pytest.mark.distributed] if row.ranks > 1 else [])]
            rows.append(pytest.param(name, mode, id=f"{name}-{mode.name}", marks=marks))
    return rows


def compared(row: Row, mode: Mode) -> Callable[[Record], Record]:
    """What of a record has to equal stock Lightning's: all, if nothing is cut and batches are the recipe's.

    What is logged by step is the window's on purpose, if the recipe accumulates batches.
    """
    accumulates = row.trainer.get("accumulate_grad_batches", 1) > 1
    view = _compared(row, mode)
    return (lambda record: without_step_values(view(record))) if accumulates else view


def _compared(row: Row, mode: Mode) -> Callable[[Record], Record]:
    in_step = mode.where == "step"
    if row.rounds and not in_step and (mode.cut or mode is DEFAULTS):
        return rounded
    if mode.cut or row.by_windows or (row.merges and mode is DEFAULTS):
        return partial(promised, in_step=in_step and not row.by_windows, failed=mode.fails)
    return lambda record: record


@pytest.mark.parametrize(("name", "mode"), cases())
def test_a_training_is_that_of_stock_lightning(name: str, mode: Mode, run: Callable[[str, Mode], Record]) -> None:
    row = TABLE[name]
    # In the step the loader is the user's own, and so is where a resume finds it.
    oracle = "" if mode.where == "step" and name.startswith("resumed") else row.oracle
    theirs = run(oracle or name, STOCK)
    ours = run(name, mode)
    view = outcome if oracle else compared(row, mode)
    is_exact = not (mode.cut or oracle or row.by_windows or row.merges)
    found: dict[str, str] = {}
    for difference in differences(view(ours), view(theirs), 0.0 if is_exact else row.tolerance):
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
