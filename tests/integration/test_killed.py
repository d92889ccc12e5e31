"""A run that is killed at any moment and started again ends as if it had never been killed."""

import json
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked
from killed import main

SAMPLES = 27
DEATHS = [
    ("epoch", 1),
    ("between", 3),
    ("backward", 8),
    ("write", 2),
    ("update", 4),
    ("written", 1),
    ("validation", 1),
    ("updated", 3),
    ("forward", 9),
]


def chain(mode: str, *micro_batches: int, **settings: Any) -> list[dict[str, Any]]:
    """Lives that end in every way, and one that goes on to the end; some with the micro-batch of the one before."""
    lives: list[dict[str, Any]] = [{"dies": place, "at": at} for place, at in DEATHS] + [{}]
    same = {"micro_batching": mode, **settings}
    return [{**life, **same, "micro_batch_size": size} for life, size in zip(lives, cycle(micro_batches))]


PROBED = {"samples": 128, "batch": 64, "accumulate_grad_batches": 1, "memory_budget": 6000}
CHAINS = {
    "loader": [{"micro_batch_size": 4}],
    "step": [{"micro_batch_size": 4, "micro_batching": "step"}],
    "loader, killed": chain("loader", 4, 4, 3, 10, 1),
    "step, killed": chain("step", 4, 4, 3, 10, 1),
    "loader, killed, by steps": chain("loader", 4, 3, steps=21),
    "loader, killed, saved by epoch": chain("loader", 4, 5, by_epoch=True),
    "loader, killed, by steps, saved by epoch": chain("loader", 4, 5, steps=21, by_epoch=True),
    "probed": [
        {**PROBED, "dies": "written"},
        {**PROBED, "dies": "forward"},
        {**PROBED, "dies": "forward", "memory_budget": 8000},
        {**PROBED, "hardware": "another machine"},
    ],
}


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all chains have left what they wrote down."""
    folder = tmp_path_factory.mktemp("killed")
    done = forked(main, CHAINS, folder, folder=folder)
    assert done.code == 0, done.output[-4000:]
    return folder


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What the lives of a chain wrote down, in the order of time."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def that_count(folder: Path) -> list[dict[str, Any]]:
    """Optimizer steps that the final weights come from: of one that was run again, the last time."""
    last = {record["step"]: record for record in records(folder, "step")}
    return [last[step] for step in sorted(last)]


@pytest.mark.parametrize("name", [name for name in CHAINS if "killed" in name])
def test_nothing_is_lost_and_nothing_is_seen_twice(name: str, chains: Path) -> None:
    """Samples, windows, counters, learning rates and final weights are those of a run that was left alone."""
    whole, killed = chains / name.partition(",")[0], chains / name
    steps = that_count(killed)
    for _, in_epoch in groupby(steps, key=lambda record: record["epoch"]):
        assert sorted(index for record in in_epoch for index in record["used"]) == list(range(SAMPLES))
    for ours, theirs in zip(steps, that_count(whole), strict=True):
        assert sorted(ours["used"]) == sorted(theirs["used"])
        assert (ours["step"], ours["epoch"], ours["rates"]) == (theirs["step"], theirs["epoch"], theirs["rates"])
    ours, theirs = (torch.load(folder / "end.pt") for folder in (killed, whole))
    assert (ours["step"], ours["epoch"]) == (theirs["step"], theirs["epoch"]) == (21, 7)
    torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=1e-10, atol=1e-12)


def test_every_life_goes_on_where_the_last_checkpoint_was(chains: Path) -> None:
    """Checkpoints are written every two steps, and at most two steps are run again."""
    for name in (name for name in CHAINS if "killed" in name and "by epoch" not in name):
        starts = [record["step"] for record in records(chains / name, "start")]
        assert len(starts) == len(DEATHS) + 1
        assert starts == sorted(starts)
        assert all(step % 2 == 0 for step in starts)
        reached = [
            max([start, *(r["step"] for r in records(chains / name, "step") if r["life"] == life)])
            for life, start in enumerate(starts)
        ]
        assert all(0 <= done - start <= 2 for done, start in zip(reached, starts[1:]))


def test_the_limit_is_known_on_the_same_hardware_and_probed_on_another(chains: Path) -> None:
    """Another budget is another limit, another machine may be."""
    first, again, budget, machine = records(chains / "probed", "start")
    assert first["probed"] > 0
    assert (again["source"], again["probed"], again["limit"]) == ("checkpoint", 0, first["limit"])
    assert again["step"] > 0
    assert budget["probed"] > 0
    assert budget["limit"] > first["limit"]
    assert machine["probed"] > 0
    assert machine["limit"] == first["limit"]
