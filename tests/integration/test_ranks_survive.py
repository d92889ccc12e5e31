"""Memory runs out on some ranks only: nobody waits for ever, and gradients are those of the whole batch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Ended, forked
from reference import Samples, cut, permutation
from survivors import Task, main, marked
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

pytestmark = pytest.mark.distributed
LOADER = {"effective_batch_size": 24, "micro_batch_size": 4}
STEP = {**LOADER, "micro_batching": "step"}


def start(folder: Path, scenarios: dict[str, Any], ranks: int) -> Ended:
    """Run scenarios one after the other; all ranks end, or the test fails."""
    return forked(main, scenarios, folder, ranks, folder=folder)


def run(folder: Path, scenarios: dict[str, Any], ranks: int) -> dict[str, list[dict[str, Any]]]:
    """What every rank recorded of every scenario."""
    done = start(folder, scenarios, ranks)
    assert done.code == 0, done.output[-16000:]
    return {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(ranks)] for name in scenarios}


def scenario(*faults: tuple[int, Any], accumulate: Any = LOADER, **settings: Any) -> dict[str, Any]:
    """A fit of two epochs of 61 samples; faults are pairs of a rank and (epoch, batch, phase, times)."""
    by_rank: dict[str, list[Any]] = {}
    for rank, fault in faults:
        by_rank.setdefault(str(rank), []).append(fault)
    return {"task": {}, "size": 61, "batch_size": 12, "accumulate": accumulate, "faults": by_rank, **settings}


def one_rank(settings: dict[str, Any]) -> list[list[torch.Tensor | None]]:
    """Gradients of plain SGD with whole windows."""
    task, epochs = Task(**settings["task"]), settings.get("trainer", {}).get("max_epochs", 2)
    dataset = Samples(settings["size"], getattr(torch, settings["task"].get("dtype", "float64")))
    optimizer = task.configure_optimizers()
    effective = settings["accumulate"]["effective_batch_size"]
    for window in (w for epoch in range(epochs) for w in cut(permutation(settings["size"], 7, epoch), effective)):
        optimizer.zero_grad()
        task.loss((dataset.inputs[window], dataset.targets[window], torch.tensor(window))).backward()
        task.note_gradients()
        optimizer.step()
    return task.gradients


def same(ours: list[Any], oracle: list[Any], tolerance: float) -> None:
    """Gradients of every step, those that are none included."""
    assert len(ours) == len(oracle)
    for step, theirs in zip(ours, oracle):
        assert [g is None for g in step] == [g is None for g in theirs]
        a, b = (torch.cat([g.flatten().double() for g in one if g is not None]) for one in (step, theirs))
        assert float((a - b).norm() / b.norm()) <= tolerance


TOLERANCES = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 3e-2}


def check(scenarios: dict[str, Any], records: dict[str, Any]) -> None:
    """Gradients, buffers and plans of all ranks; errors were survived where they were raised, and nowhere else."""
    for name, settings in scenarios.items():
        oracle, tolerance = one_rank(settings), TOLERANCES[settings["task"].get("dtype", "float64")]
        for rank, record in enumerate(records[name]):
            same(record["gradients"], oracle, tolerance)
            first = records[name][0]
            assert record["plan"] == first["plan"], name
            assert all(torch.equal(record["buffers"][b], first["buffers"][b]) for b in first["buffers"])
            assert bool(record["events"]) == (str(rank) in settings["faults"]), (name, rank)


def places(phases: Iterable[str], batches: Iterable[int], **settings: Any) -> dict[str, Any]:
    """A fit of one epoch for each place where memory may run out."""
    settings = {"trainer": {"max_epochs": 1}, **settings}
    return {
        f"{phase}-{batch}": scenario((1, (0, batch, phase, 1)), **settings) for phase in phases for batch in batches
    }


UNUSED: dict[str, Any] = {"task": {"parts": ["unused"]}, "strategy": {"find_unused_parameters": True}}
STATIC, BUFFERS, SPARSE = (
    {"strategy": {"static_graph": True}},
    *({"task": {"parts": [p]}} for p in ("buffers", "sparse")),
)
HALF = {"task": {"dtype": "bfloat16"}}
ALONE: dict[str, Any] = {"task": {"parts": ["gathers after batches"]}}
WHOLE = {"effective_batch_size": 24, "micro_batch_size": 12}
CHECKED = {"effective_batch_size": 4, "micro_batch_size": 2, "on_oom": "raise", "verify": True}
SURVIVED: dict[str, tuple[int, dict[str, Any]]] = {
    "whatever the module is made of": (
        2,
        {
            "unused": scenario((1, (0, 0, "backward", 1)), **UNUSED),
            "unused-late": scenario((0, (0, 2, "late", 1)), (1, (1, 1, "late", 1)), **UNUSED),
            "unused-raise": scenario(accumulate=CHECKED, **UNUSED),  # in most first micro-batches
            "static": scenario((1, (0, 0, "late", 1)), **STATIC),
            "static-forward": scenario((0, (0, 0, "forward", 1)), **STATIC),
            "static-raise": scenario(accumulate={**LOADER, "on_oom": "raise"}, **STATIC),
            "views": scenario((1, (0, 1, "late", 1)), strategy={"gradient_as_bucket_view": True}),
            "hook": scenario((1, (0, 1, "late", 1)), strategy={"ddp_comm_hook": allreduce_hook}),  # not used on CPUs
            "buffers": scenario((1, (0, 0, "forward", 1)), **BUFFERS),
            "buffers-late": scenario((0, (0, 2, "backward", 1)), **BUFFERS, accumulate=STEP),
            "sparse": scenario((1, (0, 1, "late", 1)), (1, (1, 2, "forward", 1)), **SPARSE),
            "all": scenario((1, (0, 0, "late", 1)), **{**UNUSED, "task": {"parts": ["unused", "sparse", "buffers"]}}),
        },
    ),
    "counts that are known only as they come": (
        2,
        {
            "counted": scenario((1, (0, 0, "forward", 1)), counted=True),
            "counted-step": scenario((0, (0, 0, "late", 1)), counted=True, accumulate=STEP),
        },
    ),
    "sums in float32 of gradients in half precision, on ranks that run pieces and on others": (
        2,
        {
            **{f"{n}-clean": scenario(accumulate=each, **HALF) for n, each in enumerate((LOADER, WHOLE, STEP))},
            **{
                f"{n}-faulty": scenario((1, (0, 1, "backward", 1)), accumulate=each, **HALF)
                for n, each in enumerate((LOADER, WHOLE, STEP))
            },
            **places(("late",), (0, 2), task={"dtype": "float32"}),
        },
    ),
    "one rank, whose gradients are reduced all the same": (
        1,
        {
            "plain": scenario((0, (0, 1, "late", 1)), (0, (1, 0, "forward", 1))),
            "views": scenario((0, (0, 0, "backward", 1)), strategy={"gradient_as_bucket_view": True}),
            "static": scenario(**STATIC),
            "static-late": scenario((0, (0, 1, "late", 1)), **STATIC, accumulate=STEP),
            "half": scenario((0, (0, 1, "late", 1)), **HALF),
        },
    ),
    "a rank that measures alone asks no other": (
        2,
        {
            mode: scenario((1, (0, 1, "backward", 1)), accumulate={**each, "verify": True}, **ALONE)
            for mode, each in {"loader": LOADER, "step": STEP}.items()
        },
    ),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_gradients_are_those_of_the_whole_batch(name: str, tmp_path: Path) -> None:
    ranks, scenarios = SURVIVED[name]
    check(scenarios, run(tmp_path, scenarios, ranks))


def test_logs_are_exchanged_once(tmp_path: Path) -> None:
    """With ``sync_dist`` on every step, a retry on one rank logs what would be logged without: means of samples."""
    once = {"trainer": {"max_epochs": 1}}
    scenarios = {
        f"{mode}-{phase or 'clean'}": scenario(*([(1, (0, 1, phase, 1))] if phase else []), accumulate=each, **once)
        for mode, each in {"loader": LOADER, "step": STEP}.items()
        for phase in ("", "forward", "late")
    }
    records = run(tmp_path, scenarios, 2)
    for name, (ours, _) in records.items():
        clean = records[f"{name.split('-')[0]}-clean"][0]
        assert len(ours["logged"]) == len(clean["logged"]) > 0
        assert clean["metrics"].keys() >= {"loss_epoch", "error"}
        assert clean["metrics"]["loss_epoch"] == pytest.approx(clean["metrics"]["error"], rel=1e-6)  # of 31 and 30
        for step, theirs in zip(ours["logged"], clean["logged"]):
            assert step == pytest.approx(theirs, rel=1e-6), name
        assert ours["metrics"] == pytest.approx(clean["metrics"], rel=1e-6), name


def test_validation_of_one_rank_in_pieces(tmp_path: Path) -> None:
    """In a sanity check before training too, where ranks would share their buffers in the first forward pass."""
    common: dict[str, Any] = {"task": {"parts": ["buffers"]}, "validates": True, "trainer": {"num_sanity_val_steps": 1}}
    scenarios = {
        "clean": scenario(**common),
        "sanity": scenario(**common, most={"1": 3}),
        "first": scenario(**common, most={"0": 5}),
    }
    records = run(tmp_path, scenarios, 2)
    assert [[bool(record["events"]) for record in records[name]] for name in scenarios] == [
        [False, False],
        [False, True],
        [True, False],
    ]
    for name in ("sanity", "first"):
        assert records[name][0]["metrics"] == pytest.approx(records["clean"][0]["metrics"], rel=1e-6)


def test_the_average_is_that_of_distributed_data_parallel(tmp_path: Path) -> None:
    """To the bit on two ranks. ``on_oom="raise"`` leaves it to the last backward pass of a window."""
    kinds: dict[str, Any] = {"unused": UNUSED, "buffers": BUFFERS}
    scenarios = {
        f"{kind}-{on_oom}": scenario(
            accumulate={**LOADER, "on_oom": on_oom},
            **{**settings, "task": {**settings["task"], "dtype": "float32"}},
        )
        for kind, settings in kinds.items()
        for on_oom in ("split", "raise")
    }
    records = run(tmp_path, scenarios, 2)
    for kind in kinds:
        ours, theirs = records[f"{kind}-split"][0], records[f"{kind}-raise"][0]
        assert len(ours["gradients"]) == 6
        for a, b in zip(ours["gradients"], theirs["gradients"], strict=True):
            assert all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert all(torch.equal(ours["buffers"][name], theirs["buffers"][name]) for name in theirs["buffers"])
        assert all(ours["unsynced"])
        assert theirs["unsynced"] == [True, True, False, True, True, False, True, False] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_one_sample_too_large_on_one_rank_ends_all(rank: int, tmp_path: Path) -> None:
    done = start(tmp_path, {"huge": scenario((rank, (0, 1, "late", 100)))}, 2)
    assert done.code == 1
    assert "one sample alone" in (tmp_path / f"error-{rank}.txt").read_text()
    assert (tmp_path / f"error-{1 - rank}.txt").exists()


@pytest.mark.parametrize("fault", [(0, 1, "late", 1), (0, 0, "forward", 1)], ids=["seen before", "not seen yet"])
def test_a_step_that_asks_other_ranks_is_not_run_again(fault: Any, tmp_path: Path) -> None:
    done = start(tmp_path, {"gathers": scenario((1, fault), task={"gathers": True})}, 2)
    assert done.code == 1
    message = (tmp_path / "error-1.txt").read_text()
    assert "exchanges values with the other ranks" in message
    assert "max_micro_batch_size" in message
    assert (tmp_path / "error-0.txt").exists()


def test_a_gradient_that_follows_other_ranks_is_told(tmp_path: Path) -> None:
    """A mean over what all ranks count in a micro-batch is none over the window; values that are logged do no harm."""
    accumulate = {**LOADER, "verify": True}
    scenarios = {
        "mean": scenario(accumulate=accumulate, task={"parts": ["mean over ranks"]}),
        "counted": scenario(accumulate={**accumulate, "normalize": marked}, task={"parts": ["mean over ranks"]}),
        "logged": scenario(accumulate=accumulate, task={"gathers": True}),
    }
    records = run(tmp_path, scenarios, 2)
    for name, cause in {"mean": "coupled", "counted": "coupled", "logged": "exact"}.items():
        assert [record["cause"] for record in records[name]] == [cause] * 2
        assert ("exchanges with the other ranks" in str(records[name][0]["told"])) == (cause == "coupled")


def test_a_step_that_asks_other_ranks_is_cut_alike_on_all(tmp_path: Path) -> None:
    accumulate = {"effective_batch_size": 17, "micro_batch_size": 8, "micro_batching": "step"}
    scenarios = {"gathers": scenario(task={"gathers": True}, accumulate=accumulate)}
    records = run(tmp_path, scenarios, 2)
    check(scenarios, records)
    counts = [len([size for epoch, size in record["sizes"] if epoch == 1]) for record in records["gathers"]]
    assert counts[0] == counts[1]


def test_ranks_on_unequal_hosts_resume_together(tmp_path: Path) -> None:
    """The checkpoint's limit was found on hardware that only one of them has: both leave it, and probe."""
    accumulate = {"effective_batch_size": 24, "memory_budget": 6000}
    first = scenario(accumulate=accumulate, trainer={"max_epochs": 1}, save=str(tmp_path / "first.ckpt"))
    again = scenario(accumulate=accumulate, resume=str(tmp_path / "first.ckpt"))
    records = run(tmp_path, {"first": first, "same": again, "other": {**again, "elsewhere": {"1": "another GPU"}}}, 2)
    assert [record["source"] for record in records["same"]] == ["checkpoint"] * 2
    assert "checkpoint" not in [record["source"] for record in records["other"]]
    assert len({record["plan"] for record in (*records["same"], *records["other"])}) == 1


@pytest.mark.parametrize(("part", "what"), [("late", "training"), ("late step", "model")])
def test_what_one_rank_finds_is_told_by_the_first(part: str, what: str, tmp_path: Path) -> None:
    """While it trains, or before: then all ranks look for submodules together."""
    wanted = {"accumulate": {**LOADER, "verify": True}, "task": {"parts": [part]}}
    scenarios = {"loader": scenario(**wanted), "step": scenario(**{**wanted, "accumulate": {**STEP, "verify": True}})}
    for first, second in run(tmp_path, scenarios, 2).values():
        assert first["cause"] == second["cause"] == "coupled"
        assert [f"Accumulation is not exact for this {what}" in text for text in first["told"]] == [True]
        assert not second["told"]


# --- gradients are exchanged while the last backward pass of a window runs -----------------------

GRADIENTS = 4
EACH_ALONE = {"bucket_cap_mb": 1e-6}  # a message for every gradient
OVERLAPPING = {
    "factor 1": {"effective_batch_size": 8, "micro_batch_size": 4},
    "factor 2": {"effective_batch_size": 16, "micro_batch_size": 4},
    "step": {"effective_batch_size": 16, "micro_batch_size": 4, "micro_batching": "step"},
}


def failing(mode: str, *operations: tuple[int, int], **settings: Any) -> dict[str, Any]:
    """A fit of as many windows, and a first one: where memory runs out in each last backward pass, by rank."""
    return {
        **scenario(accumulate=OVERLAPPING[mode], strategy=EACH_ALONE, trainer={"max_epochs": 1}),
        "size": (1 + len(operations)) * OVERLAPPING[mode]["effective_batch_size"],
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
        **{mode: failing(mode, (0, 0)) for mode in OVERLAPPING},
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
    scenarios = {mode: failing(mode, (0, 0), (3, 0), (0, 0)) for mode in OVERLAPPING}
    for records in run(tmp_path, scenarios, 2).values():
        for record in records:
            assert len(record["after_backward"]) == len(record["gradients"])
            for seen, (used, *_) in zip(record["after_backward"], record["gradients"]):
                assert torch.equal(seen, used)
