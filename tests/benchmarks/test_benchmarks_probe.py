"""The benchmark of the probe: its counters, its peers on a tiny model, its tables and targets."""

import doctest
import importlib
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # benchmarks are not installed

from benchmarks import gpu, output, probe  # noqa: E402
from benchmarks.probing import cells, models, programs, tables  # noqa: E402
from benchmarks.probing.cells import Cell  # noqa: E402
from benchmarks.probing.devices import EMULATED, FAKE, TRAINER  # noqa: E402
from benchmarks.probing.programs import (  # noqa: E402
    ACCELERATE,
    BINSEARCH,
    MAX_MEM,
    OURS,
    POWER,
    PROGRAMS,
    Choice,
    start_size,
)
from benchmarks.probing.training import Counter, Oracle  # noqa: E402

TINY = models.Model(
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 10)), lambda: models.images(8)
)
MIB = 2**20


@pytest.fixture(autouse=True)
def _tiny_and_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One tiny model, results in a folder of the test's own, trainers that say nothing."""
    for name in list(models.MODELS):
        monkeypatch.setitem(models.MODELS, name, TINY)
    monkeypatch.setattr(output, "RESULTS", tmp_path)
    for benchmark in (probe, gpu):
        monkeypatch.setattr(benchmark, "quiet", lambda: None)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", ["gpu", "probing.cells", "probing.programs", "probing.training"])
def test_doctests(name: str) -> None:
    """Examples in docstrings hold."""
    assert doctest.testmod(importlib.import_module(f"benchmarks.{name}")).failed == 0


def test_the_quick_list_has_every_model_once_on_each_device() -> None:
    """In one small budget; a CUDA device adds cells of its own."""
    assert [(cell.model, cell.gib, cell.kind) for cell in cells.quick(cuda=False)] == [
        *((name, model.quick_gib, EMULATED) for name, model in models.MODELS.items()),
        *((name, 16, FAKE) for name in models.MODELS),
        (cells.IN_TRAINER, 0.25, TRAINER),
    ]
    assert {cell.kind for cell in cells.full(cuda=True)} == {EMULATED, FAKE, TRAINER, "cuda"}
    assert {cell.gib for cell in cells.full(cuda=False)} == {0.5, 1, 2, 16, 80}


def test_a_counter_counts_steps_and_errors_about_memory() -> None:
    """In words that every peer takes for what they are; other errors are not counted."""
    counter = Counter()
    with counter.step(4):
        pass
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory. Live"), counter.step(8):
        raise torch.OutOfMemoryError("Live tensors out of memory.")
    with pytest.raises(RuntimeError, match="shapes"), counter.step(8):
        raise RuntimeError("shapes")
    assert (counter.sizes, counter.steps, counter.trials, counter.ooms) == ([4, 8, 8], 3, 2, 1)


def test_every_program_meets_the_same_limit() -> None:
    """Real steps: ours finds it, none finds more, and each counts as its own rules say."""
    record = cells.measure(Cell("MLP", 1 / 8192))
    limit, found = record["limit"], record["programs"]
    assert found[OURS]["found"] == limit
    assert found[OURS]["ooms"] == 0
    assert found[OURS]["steps"] <= tables.MOST_STEPS
    for name in PROGRAMS.keys() & found.keys() - {OURS}:
        assert limit / 4 < found[name]["found"] <= limit
        assert found[name]["ooms"] >= 1
        assert found[name]["seconds"] > 0
        told = asdict(cells.count(name, limit, Choice(0, "cpu", cells.HIGH, start_size(limit))))
        # A step that is too large may run until Adam makes its state: then the second one fails.
        assert told.pop("steps") in (found[name]["steps"], found[name]["steps"] - 1)
        assert told.items() <= {**found[name], "seconds": None}.items(), "what is tried depends on the limit alone"


@pytest.mark.parametrize(
    ("program", "sizes", "found"),
    [
        (POWER, [*(2,) * 3, *(4,) * 3, *(8,) * 3, 16], 8),
        (BINSEARCH, [*(2,) * 3, *(4,) * 3, *(8,) * 3, 16, *(12,) * 3, 14, *(13,) * 3], 12),  # 13 less 5 %
        (ACCELERATE, [32, 28, 25, 22, 19, 17, 15, 13, 13], 13),
        (MAX_MEM, [32, 16, 8, 8], 8),
    ],
)
def test_peers_search_as_their_documentation_says(program: str, sizes: list[int], found: int) -> None:
    """Driven by a training that is told its limit."""
    if reason := programs.missing(program):
        pytest.skip(reason)
    training = Oracle(13)
    outcome, _ = PROGRAMS[program](training, Choice(MIB, "cpu", cells.HIGH, programs.start_size(13)))
    assert (training.counter.sizes, outcome) == (sizes, found)


def small_cell(**changes: Any) -> dict[str, Any]:
    """A record of a cell: a peer with ten times the steps and the seconds of ours."""
    mine = {"found": 20, "method": "replay", "trials": 4, "steps": 4, "ooms": 0, "seconds": 1.0, **changes}
    theirs = {"found": 19, "method": "×2, ½", "trials": 12, "steps": 40, "ooms": 3, "seconds": 10.0}
    return {"model": "ViT", "gib": 0.5, "kind": EMULATED, "limit": 20, "programs": {OURS: mine, BINSEARCH: theirs}}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, 0),
        ({"found": 19}, 1),
        ({"found": 21}, 1),
        ({"steps": 6}, 1),
        ({"ooms": 1}, 1),
        ({"ooms": 1, "method": "bracket"}, 1),
        ({"seconds": 3.0}, 1),
    ],
)
def test_targets_are_judged(changes: dict[str, Any], missed: int) -> None:
    """Found sizes in every cell; ratios by their median."""
    held = tables.targets([small_cell(**changes)])
    assert sum(not target.met for target in held) == missed


def test_the_benchmark_prints_80_columns_and_exits_by_its_targets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A quick run leaves the results of the last full one alone."""
    cost = {"model": "ViT", "operations": 3, "limit_us": 10.0, "trace_us": 12.0}
    monkeypatch.setattr(probe, "emulation_cost", lambda: cost)
    monkeypatch.setattr(probe, "measure", lambda cell: {**small_cell(), "model": cell.model, "gib": cell.gib})
    assert probe.main(["--quick"]) == 0
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(probe, "measure", lambda cell: {**small_cell(steps=6), "model": cell.model})
    capsys.readouterr()
    assert probe.main([]) == 1
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= output.WIDTH
    assert "MISSED training steps" in printed
    assert len(json.loads((tmp_path / "probe.json").read_text())["cells"]) == len(cells.full(cuda=False))


def test_what_the_gpu_benchmark_has_measured_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An error in a later cell, and one in what comes on top of a cell, lose nothing of the cells before."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * 2**30, 4 * 2**30))
    measured = iter([[small_cell()], KeyboardInterrupt()])

    def run(chosen: Any) -> Any:
        found = next(measured)
        if isinstance(found, BaseException):
            raise found
        return found

    def predict(cell: Cell) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "prediction", predict)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--stages", "cells", "--models", "ViT", "MLP", "--budgets", "2"])
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert file.name == "nvidia-t4-cells.json"
    assert record["cells"][0]["incomplete"] == "CUDA out of memory."
    assert {target["what"]: target["met"] for target in record["targets"]}["cells that an error cut short"] is False
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**30))
    assert gpu.main([]) == 2
    assert "NVIDIA T4 is smaller than the smallest budget, 2 GiB" in capsys.readouterr().err


def test_what_fails_on_a_gpu_is_kept_and_the_rest_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Hours of a device are not lost to one error, and it is no success."""
    pieces = [lambda: {"ratio": 1 / 0}, lambda: {"ratio": 1.0}]
    for count, measured in ((1, []), (2, [{"ratio": 1.0}])):
        stage = gpu.Stage(pieces[:count], gpu.speed_targets)
        record = gpu.measure("throughput", stage, "NVIDIA T4", float("inf"))
        assert gpu.show("throughput", stage, record) == 1
        assert "ZeroDivisionError" in capsys.readouterr().out
        kept = json.loads((tmp_path / "nvidia-t4-throughput.json").read_text())
        assert (kept["cells"], kept["left_out"], len(kept["errors"])) == (measured, 0, 1)


def test_the_gpu_benchmarks_need_neither_hydra_nor_the_hub_of_timm(tmp_path: Path) -> None:
    """On a machine with a GPU, PyTorch, Lightning and timm are enough."""
    blocked = dict.fromkeys(("hydra", "omegaconf", "huggingface_hub", "benchmarks", "timm"))
    lines = (
        f"import sys; assert sys.modules.keys().isdisjoint({[*blocked]})",
        "sys.modules |= dict.fromkeys(('hydra', 'omegaconf', 'huggingface_hub'))",
        "import benchmarks.gpu, benchmarks.soak; benchmarks.gpu.MODELS['resnet34d 32'].build()",
    )
    done = forked(exec, "\n".join(lines), folder=tmp_path)
    assert done.code == 0, done.output
