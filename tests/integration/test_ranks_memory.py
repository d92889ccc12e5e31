"""Ranks with unequal memory, and ranks in trouble: they agree, go on together, or end with an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Ended, forked
from ranks import main

pytestmark = pytest.mark.distributed
SMALL, LARGE = 6000, 12000
VOTES = 128  # bytes of votes that may still be on their way when memory is counted
SETTINGS: dict[str, Any] = {"ranks": 2, "size": 256, "batch_size": 32, "trainer": {"max_epochs": 2}}


def start(folder: Path, effective: int = 128, **trouble: Any) -> Ended:
    """A fit on two ranks that trouble befalls; it ends, or the test fails."""
    folder.mkdir(exist_ok=True)
    settings = {**SETTINGS, "trouble": trouble}
    settings["accumulate"] = {"effective_batch_size": effective, "verify": False, "cache": False}
    return forked(main, settings, folder, folder=folder)


def run(folder: Path, effective: int = 128, **trouble: Any) -> list[dict[str, Any]]:
    """What both ranks recorded."""
    done = start(folder, effective, **trouble)
    assert done.code == 0, done.output[-6000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Both ranks with little memory."""
    return run(tmp_path_factory.mktemp("small"), budgets=(SMALL, SMALL))


def test_the_rank_with_less_memory_decides(tmp_path: Path, small: list[dict[str, Any]]) -> None:
    """Both end with its limit, run the same trials, and train to the same weights within their memory."""
    unequal = run(tmp_path / "unequal", budgets=(LARGE, SMALL))
    large = run(tmp_path / "large", budgets=(LARGE, LARGE))
    assert unequal[0]["limit"] == unequal[1]["limit"] == small[0]["limit"] < large[0]["limit"] < 64
    for records in (unequal, small, large):
        assert records[0]["trials"] == records[1]["trials"]
        assert max(max(record["sizes"]) for record in records) <= records[0]["limit"]
        assert torch.equal(records[0]["weights"], records[1]["weights"])


def test_training_at_the_limit_has_room_to_exchange_gradients(tmp_path: Path, small: list[dict[str, Any]]) -> None:
    budget, limit = SMALL - small[0]["spare"] + VOTES, small[0]["limit"]
    tight = run(tmp_path, effective=2 * 3 * limit, budgets=(budget, budget))
    for record in tight:
        assert record["limit"] == limit
        assert record["spare"] <= 2 * VOTES  # on their way in the one run, in the other, or in neither
        assert record["sizes"].count(limit) > 6


def test_running_out_of_memory_on_one_rank_is_every_ranks_limit(tmp_path: Path) -> None:
    records = run(tmp_path, budgets=(10**6, 10**6), fails_above=21)
    assert [record["limit"] for record in records] == [21, 21]
    assert records[0]["trials"] == records[1]["trials"]
    assert [record["collectives"] for record in records] == [[], []]
    assert torch.equal(records[0]["weights"], records[1]["weights"])


@pytest.mark.parametrize("above", [0, 4], ids=["at once", "in a trial"])
def test_a_rank_that_dies_ends_the_run_with_an_error(above: int, tmp_path: Path) -> None:
    done = start(tmp_path, budgets=(LARGE, LARGE), dies_above=above)
    assert done.code != 0
    assert "exit code 17" in done.output
    assert not list(tmp_path.glob("rank*.pt"))
