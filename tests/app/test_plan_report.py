import json
from dataclasses import replace
from typing import get_args

import pytest
from rich.console import Console

from lightning_ga.app.plan_report import PlanRecords, plan_table, save_plan
from lightning_ga.app.plots import METHODS
from lightning_ga.plan.accumulation import plan_accumulation
from lightning_ga.plan.exactness import Exactness
from lightning_ga.plan.planned_device import PlannedDevice
from lightning_ga.plan.records import Attribution, Method, ProbeResult, Trial

HOLDERS = Attribution(48, 100, "backward", "net.1", (("activations of net.1", 70), ("parameters", 30)))
PROBE = ProbeResult(48, 2**31, 2_040_109_466, (Trial(48, 2_040_109_466, True, 0.2),), 4, 1.25, "replay")


def printed(table) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_table_says_how_a_window_is_cut_and_what_the_probe_found():
    """Effective batch, peak and budget, limit, trials and seconds, in 80 columns."""
    text = printed(
        plan_table(PlanRecords(plan_accumulation(256, micro_batch=48, world_size=2), PROBE, setting="a model"))
    )
    for part in (
        "256 in 3 micro-batches of at most 43 on each of 2 ranks",
        "peak 1.9 GiB at the limit, of a budget of 2.0 GiB",
        "48 samples",
        "1 trial, 4 steps, 1.2 s",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_estimate_for_another_device_is_called_one():
    """With the device, what is set aside, and what makes it uncertain."""
    device = PlannedDevice(2**34, reserved_bytes=2**30, unreliable=["net (LSTM): a reason", "another"])
    text = printed(plan_table(PlanRecords(plan_accumulation(256, micro_batch=48, world_size=2), PROBE, None, device)))
    for part in (
        "for 2 devices of 16.0 GiB; nothing was run",
        "1.0 GiB for context, workspaces, fragmentation, buckets",
        "net (LSTM): a reason",
    ):
        assert part in text
    assert "or more" not in text
    whole = printed(plan_table(PlanRecords(plan_accumulation(48, micro_batch=48), PROBE, None, device)))
    assert "48 samples per micro-batch or more" in whole
    assert max(map(len, text.splitlines())) <= 80


def test_a_plan_is_saved_whole(tmp_path):
    """Every field of the records, and null for what did not run."""
    records = PlanRecords(plan_accumulation(10, micro_batch=4), PROBE, Exactness(1e-7, 1e-3, "exact"))
    save_plan(tmp_path / "new" / "plan.json", records)
    content = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert content["plan"]["chunks"] == [[4, 3, 3]]
    assert content["probe"]["trials"][0]["fits"] is True
    assert content["exactness"]["relative_error"] == 1e-7
    save_plan(tmp_path / "device.json", PlanRecords(device=PlannedDevice(2**34, unreliable=["a reason"])))
    assert json.loads((tmp_path / "device.json").read_text())["device"]["unreliable"] == ["a reason"]
    save_plan(tmp_path / "plan.json", PlanRecords(setting="a model"))
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["plan"] is content["probe"] is content["exactness"] is content["device"] is None
    assert content["memory"] == []
    assert content["told"] == {"training": "a model", "effective batch": "set by the loader"}
    save_plan(tmp_path / "held.json", PlanRecords(probe=replace(PROBE, holders=HOLDERS)))
    assert (
        json.loads((tmp_path / "held.json").read_text())["memory"][1]
        == "activations 70 B (net.1 70 B), parameters 30 B"
    )


@pytest.mark.parametrize(("micro_batch", "says"), [(10, "nothing is accumulated"), (4, "relative error 1.0e-07")])
def test_the_table_says_whether_accumulation_is_exact(micro_batch, says):
    plan = plan_accumulation(10, micro_batch=micro_batch)
    assert says in printed(plan_table(PlanRecords(plan, None, Exactness(1e-7, 1e-3, "exact"))))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("replay", "1 trial, 4 steps, 1.2 s (replay: predicted and verified)"),
        ("prediction", "1 trial, 4 steps, 1.2 s (prediction: not tried)"),
        ("below", "1 trial, 4 steps, 1.2 s (below: never near the budget)"),
        ("phases", "1 trial, 4 steps, 1.2 s (phases: tried at the limit)"),
        ("bracket", "1 trial, 4 steps, 1.2 s (bracket: tried at the limit)"),
    ],
)
def test_the_table_says_how_the_limit_was_found(method, says):
    text = printed(plan_table(PlanRecords(plan_accumulation(256, micro_batch=48), replace(PROBE, method=method))))
    assert says in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("cache", "remembered, verified by one step, 1.2 s (cache)"),
        ("checkpoint", "found before and kept in the checkpoint (checkpoint)"),
        ("estimate", "4 steps worked out, 1.2 s (estimate)"),
    ],
)
def test_the_table_says_where_a_limit_comes_from(source, says):
    assert says in printed(
        plan_table(PlanRecords(plan_accumulation(256, micro_batch=48), replace(PROBE, source=source)))
    )


def test_every_method_of_a_search_has_its_words():
    assert set(METHODS) == set(get_args(Method))
