import json
from dataclasses import replace

from lightning_ga.app.plan_report import PlanRecords, printed_plan, save_plan
from lightning_ga.plan.accumulation import plan_accumulation
from lightning_ga.plan.exactness import Exactness
from lightning_ga.plan.records import Fits, ProbeResult, Trial

PROBE = ProbeResult(48, 2**31, 2_040_109_466, (Trial(48, 2_040_109_466, True, 0.2),), 4, 1.25, "replay")
CUT = plan_accumulation(256, micro_batch=48, world_size=2)


def test_the_table_says_how_a_window_is_cut_and_what_the_probe_found():
    """Effective batch, peak and budget, limit, trials and seconds, in 80 columns."""
    text = printed_plan(PlanRecords(CUT, PROBE, setting="a model"))
    for part in (
        "256 in 3 micro-batches of at most 43 on each of 2 ranks",
        "peak 1.9 GiB at the limit, of a budget of 2.0 GiB",
        "48 samples",
        "1 trial, 4 steps, 1.2 s",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80
    for source in ("cache", "checkpoint"):
        assert f"from the {source}" in printed_plan(PlanRecords(CUT, replace(PROBE, source=source)))


def test_the_table_says_that_a_window_fits_and_what_it_takes():
    """Measured, or bounded; nothing else was asked."""
    plan, fits = plan_accumulation(32, micro_batch=32), Fits(32, 358 * 2**20, 18 * 2**30, 32, 0.5)
    text = printed_plan(PlanRecords(plan, fits=fits))
    assert "fits             32 samples took 358.0 MiB of 18.0 GiB" in text
    assert "nothing is accumulated" in text
    assert "limit" not in text
    assert "32 samples take at most 358.0 MiB" in printed_plan(PlanRecords(plan, fits=replace(fits, tried=2)))


def test_a_plan_is_saved_whole(tmp_path):
    """Every field of the records, and null for what did not run."""
    plan, exactness = plan_accumulation(10, micro_batch=4), Exactness(1e-7, 1e-3, "exact")
    records = PlanRecords(plan, PROBE, exactness, setting="a model")
    save_plan(tmp_path / "new" / "plan.json", records)
    content = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert content["plan"]["chunks"] == [[4, 3, 3]]
    assert content["probe"]["trials"][0]["fits"] is True
    assert content["exactness"]["relative_error"] == 1e-7
    assert content["table"]["training"] == "a model"
    save_plan(tmp_path / "none.json", PlanRecords())
    content = json.loads((tmp_path / "none.json").read_text())
    assert content["plan"] is content["probe"] is content["exactness"] is None
    assert content["table"] == {"training": ""}
