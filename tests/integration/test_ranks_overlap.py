"""Gradients are exchanged while the last backward pass of a window runs; memory may run out anywhere in it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranks_survive import check, one_rank, run, same, scenario

pytestmark = pytest.mark.distributed
GRADIENTS = 4
EACH_ALONE = {"bucket_cap_mb": 1e-6}  # a message for every gradient
MODES = {
    "factor 1": {"effective_batch_size": 8, "micro_batch_size": 4},
    "factor 2": {"effective_batch_size": 16, "micro_batch_size": 4},
    "step": {"effective_batch_size": 16, "micro_batch_size": 4, "micro_batching": "step"},
}


def failing(mode: str, *operations: tuple[int, int], **settings: Any) -> dict[str, Any]:
    """A fit of as many windows, and a first one: where memory runs out in each last backward pass, by rank."""
    return {
        **scenario(accumulate=MODES[mode], strategy=EACH_ALONE, trainer={"max_epochs": 1}),
        "size": (1 + len(operations)) * MODES[mode]["effective_batch_size"],
        "operations": dict(zip("01", map(list, zip(*operations)))),
        **settings,
    }


def are_exact(scenarios: dict[str, Any], records: dict[str, Any]) -> None:
    """Every rank has the gradients of whole windows."""
    for name, settings in scenarios.items():
        for record in records[name]:
            same(record["gradients"], one_rank(settings), 1e-12)


def operations_of(mode: str, folder: Path) -> int:
    """How many operations the last backward pass of a window has."""
    folder.mkdir()
    return int(run(folder, {"clean": failing(mode, (0, 0))}, 2)["clean"][0]["operations"])


def survive(mode: str, folder: Path, *operations: tuple[int, int]) -> None:
    """Every error is survived, and no rank sends more messages than the other."""
    scenarios = {mode: failing(mode, *operations)}
    records = run(folder, scenarios, 2)
    are_exact(scenarios, records)
    assert [record["events"] for record in records[mode]] == [sum(map(bool, at)) for at in zip(*operations)]
    assert [len(record["sent"]) for record in records[mode]] == [GRADIENTS * (1 + len(operations))] * 2


@pytest.mark.parametrize("mode", ["factor 1", pytest.param("step", marks=pytest.mark.slow)])
def test_at_every_operation_of_the_last_backward_pass(mode: str, tmp_path: Path) -> None:
    """On either rank, or on both at different operations; those that join and exchange gradients are among them."""
    most = operations_of(mode, tmp_path / "clean")
    assert most > 30
    kinds = [lambda k: (k, 0), lambda k: (0, k), lambda k: (k, 1 + 7 * k % most)]
    every = 4 if mode == "step" else 1  # its windows take longer
    survive(mode, tmp_path, *(kinds[k % 3](k) for k in range(1, most + 1, every)))


def test_messages_leave_within_the_last_backward_pass(tmp_path: Path) -> None:
    """All of them, once a first pass has shown in which order gradients come: with a factor of 1 that is a window."""
    scenarios = {
        **{mode: failing(mode, (0, 0)) for mode in MODES},
        "small": failing("factor 2", (0, 0), strategy={}),
        "static": failing("factor 2", (0, 0), strategy={**EACH_ALONE, "static_graph": True}),
        "sparse": failing("factor 2", (0, 0), task={"parts": ["sparse"]}),
    }
    records = run(tmp_path, scenarios, 2)
    are_exact(scenarios, records)
    for name, (first, second) in records.items():
        messages = {"small": 1, "sparse": GRADIENTS + 1}.get(name, GRADIENTS)
        assert first["sent"] == second["sent"] == [name != "factor 1"] * messages + [True] * messages, name


def test_what_is_added_to_twice_waits_for_the_end_of_the_pass(tmp_path: Path) -> None:
    """It is the last parameter, so all gradients wait; memory may run out meanwhile, at first too."""
    twice: dict[str, Any] = {"task": {"parts": ["twice"]}, "strategy": EACH_ALONE}
    scenarios = {
        f"{phase}-{batch}": scenario((1, (0, batch, phase, 1)), **twice)
        for phase in ("backward", "late")
        for batch in (0, 2, 5)
    }
    records = run(tmp_path, scenarios, 2)
    check(scenarios, records)
    assert {sent for name in scenarios for record in records[name] for sent in record["sent"]} == {False}


def test_hooks_after_the_backward_pass_see_averages(tmp_path: Path) -> None:
    scenarios = {mode: failing(mode, (0, 0), (3, 0), (0, 0)) for mode in MODES}
    for records in run(tmp_path, scenarios, 2).values():
        for record in records:
            assert len(record["after_backward"]) == len(record["gradients"])
            for seen, (used, *_) in zip(record["after_backward"], record["gradients"]):
                assert torch.equal(seen, used)
