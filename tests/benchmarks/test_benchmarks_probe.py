"""The benchmark of the probe: its counters, its peers on a tiny model, its tables and targets."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks import output, probe
from benchmarks.probing import cells, training
from benchmarks.probing.cells import Cell
from benchmarks.probing.devices import EMULATED
from benchmarks.probing.programs import BINSEARCH, OURS, PEERS, start_size
from benchmarks.probing.training import Oracle

TINY = training.Model(
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 10)), lambda: training.images(8)
)


@pytest.fixture(autouse=True)
def _tiny_and_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One tiny model, results in a folder of the test's own, trainers that say nothing."""
    for name in list(training.MODELS):
        monkeypatch.setitem(training.MODELS, name, TINY)
    monkeypatch.setattr(output, "RESULTS", tmp_path)
    monkeypatch.setattr(output, "quiet", lambda: None)
    monkeypatch.setattr(probe, "prepare", lambda: None)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_every_program_meets_the_same_limit() -> None:
    """Real steps: ours finds it, none finds more, and each counts as its own rules say."""
    record = cells.measured(Cell("MLP", 1 / 8192))
    limit, found = record["limit"], record["programs"]
    assert found[OURS]["found"] == limit
    assert found[OURS]["ooms"] == 0
    assert found[OURS]["steps"] <= probe.MOST_STEPS
    for name in PEERS.keys() & found.keys():
        assert limit / 4 < found[name]["found"] <= limit
        assert found[name]["ooms"] >= 1
        assert found[name]["seconds"] > 0
        told = cells.count(name, Oracle(limit), start_size(limit))
        # A step that is too large may run until Adam makes its state: then the second one fails.
        assert told.pop("steps") in (found[name]["steps"], found[name]["steps"] - 1)
        assert told.items() <= {**found[name], "seconds": None}.items(), "what is tried depends on the limit alone"


def small_cell(**changes: Any) -> dict[str, Any]:
    """A record of a cell: a peer with ten times the steps and the seconds of ours."""
    mine = {"found": 20, "method": "replay", "trials": 4, "steps": 4, "ooms": 0, "seconds": 1.0, **changes}
    theirs = {"found": 19, "method": "×2, ½", "trials": 12, "steps": 40, "ooms": 3, "seconds": 10.0}
    return {"model": "ViT", "gib": 0.5, "kind": EMULATED, "limit": 20, "programs": {OURS: mine, BINSEARCH: theirs}}


def test_the_benchmark_prints_80_columns_and_exits_by_its_targets(monkeypatch, capsys, tmp_path):
    """A quick run leaves the results of the last full one alone."""
    cost = {"model": "ViT", "operations": 3, "limit_us": 10.0, "trace_us": 12.0}
    monkeypatch.setattr(probe, "emulation_cost", lambda: cost)
    monkeypatch.setattr(probe, "measured", lambda cell: {**small_cell(), "model": cell.model, "gib": cell.gib})
    assert probe.main(["--quick"]) == 0
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(probe, "measured", lambda cell: {**small_cell(steps=6), "model": cell.model})
    capsys.readouterr()
    assert probe.main([]) == 1
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= output.WIDTH
    assert "MISSED training steps" in printed
    assert len(json.loads((tmp_path / "probe.json").read_text())["cells"]) == len(cells.chosen(cuda=False))
