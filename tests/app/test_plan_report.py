import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from command_lines import TINY
from faults import Arm, Faults
from reference import Regression, Samples, quiet_trainer
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.app.plan_report import PlanReport, printed_plan, records_of, save_plan, schedule_text
from lightning_ga.plan.accumulation import plan_accumulation
from lightning_ga.plan.batch_schedule import by_samples, by_step, linear
from lightning_ga.plan.exactness_verdicts import Exactness
from lightning_ga.plan.records import Fits, ProbeResult, Trial

PROBE = ProbeResult(48, 2**31, 2_040_109_466, (Trial(48, 2_040_109_466, True, 0.2),), 4, 1.25, "replay")
SHORT = (*TINY, "test=false", "trainer.max_epochs=2", "trainer.limit_val_batches=1")
CUT = plan_accumulation(256, micro_batch=48, world_size=2)


def records(plan=None, probe=None, exactness=None, fits=None, setting="a model", schedule=""):
    """Those of a callback that has found these."""
    found = SimpleNamespace(plan=plan, probe=probe, exactness=exactness, fits=fits)
    return {**records_of(found, setting), "schedule": schedule}


def test_the_table_says_how_a_window_is_cut_and_what_the_probe_found():
    """Effective batch, peak and budget, limit, trials and seconds, in 80 columns."""
    text = printed_plan(records(CUT, PROBE))
    for part in (
        "256 in 3 micro-batches of at most 43 on each of 2 ranks",
        "peak 1.9 GiB at the limit, of a budget of 2.0 GiB",
        "48 samples",
        "1 trial, 4 steps, 1.2 s",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80
    for source in ("cache", "checkpoint"):
        assert f"from the {source}" in printed_plan(records(CUT, replace(PROBE, source=source)))


def test_a_schedule_is_shown():
    """In words, of the batch or of the factor; nothing for one number, and the ends of a long one."""
    assert schedule_text(AutoAccumulate({0: 32, 2: 64})) == "from epoch 0 on 32, from epoch 2 on 64"
    assert schedule_text(AutoAccumulate({3: 8})) == "from epoch 3 on 8"
    samples = schedule_text(AutoAccumulate(by_samples({0: 32, 50_000: 64})))
    assert samples == "from sample 0 on 32, from sample 50,000 on 64"
    assert schedule_text(AutoAccumulate(accumulate={3: 8})) == "factor from epoch 0 on 1, from epoch 3 on 8"
    by_steps = schedule_text(AutoAccumulate(accumulate=by_step({0: 1, 9: 2})))
    assert by_steps == "factor from step 0 on 1, from step 9 on 2"
    for unscheduled in (AutoAccumulate(32), AutoAccumulate(), AutoAccumulate(abs), None):
        assert schedule_text(unscheduled) == ""
    long = schedule_text(AutoAccumulate(linear(8, 64, steps=56)))
    assert long.startswith("from step 0 on 8, from step 1 on 9, from step 2 on 10")
    assert long.endswith("…, from step 56 on 64")
    assert "schedule         from epoch 0 on 32" in printed_plan(records(CUT, schedule="from epoch 0 on 32"))


def test_a_schedule_is_shown_in_the_plan_and_with_every_epoch(command):
    """On the page too, which shows the plan's table."""
    mapping = command(*SHORT, "accumulate.effective_batch_size={0:16,1:32}")
    assert mapping.code == 0, mapping.err
    assert "schedule         from epoch 0 on 16, from epoch 1 on 32" in mapping.out
    assert [batch in mapping.out for batch in ("batch 16", "batch 32")] == [True, True]
    assert "16, from epoch 1 on 32" in (mapping.folder / "report.html").read_text()


@pytest.mark.slow
def test_a_schedule_by_its_short_name_is_shown_and_a_number_is_not(command):
    by_name = "accumulate.effective_batch_size={_target_:by_step,counts:{0:16,3:32}}"
    schedule = command(*SHORT, "logger=none", by_name, folder="by_step")
    assert schedule.code == 0, schedule.err
    assert "from step 0 on 16, from step 3 on 32" in schedule.out
    constant = command(*TINY, "accumulate.effective_batch_size=16", "dry_run=true", folder="constant")
    assert "schedule" not in constant.out


def test_the_table_says_that_a_window_fits_and_what_it_takes():
    """Measured, or bounded; nothing else was asked."""
    plan, fits = plan_accumulation(32, micro_batch=32), Fits(32, 358 * 2**20, 18 * 2**30, 32, 0.5)
    text = printed_plan(records(plan, fits=fits))
    assert "fits             32 samples took 358.0 MiB of 18.0 GiB" in text
    assert "nothing is accumulated" in text
    assert "limit" not in text
    assert "32 samples take at most 358.0 MiB" in printed_plan(records(plan, fits=replace(fits, tried=2)))


def test_a_plan_is_saved_whole(tmp_path):
    """Every field of the records, and null for what did not run."""
    plan, exactness = plan_accumulation(10, micro_batch=4), Exactness(1e-7, 1e-3, "exact")
    save_plan(tmp_path / "new" / "plan.json", records(plan, PROBE, exactness))
    content = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert content["plan"]["chunks"] == [[4, 3, 3]]
    assert content["probe"]["trials"][0]["fits"] is True
    assert content["exactness"]["relative_error"] == 1e-7
    assert content["table"]["training"] == "a model"
    save_plan(tmp_path / "none.json", records_of(None, ""))
    content = json.loads((tmp_path / "none.json").read_text())
    assert content["plan"] is content["probe"] is content["exactness"] is None
    assert content["table"] == {"training": ""}


def test_a_verdict_of_training_replaces_that_of_the_start(tmp_path):
    """The rest of the plan stays as it was at the start."""
    accumulate = SimpleNamespace(plan=plan_accumulation(10, micro_batch=4), probe=None, fits=None)
    accumulate.exactness = Exactness(1e-7, 1e-3, "exact")
    module = torch.nn.Linear(1, 1)
    module.hparams, module.device = {}, torch.device("cpu")
    trainer = SimpleNamespace(callbacks=[accumulate], is_global_zero=True, world_size=1, precision="32-true")
    report = PlanReport(tmp_path)
    report.on_train_start(trainer, module)
    accumulate.plan = plan_accumulation(20, micro_batch=4)
    accumulate.exactness = Exactness(0.11, 1e-3, "weighted")
    report.on_train_end(trainer, module)
    content = json.loads((tmp_path / "plan.json").read_text())
    assert (content["plan"]["effective_batch_size"], content["exactness"]["cause"]) == (10, "weighted")
    assert content["table"]["exactness"].startswith("relative error 1.1e-01: the loss is a mean over something else")


def test_after_an_error_the_plan_is_the_one_that_trained(tmp_path):
    """A window that fitted in one pass as training began runs in more from the error on."""
    faults = Faults(2)
    callbacks = [AutoAccumulate(16, micro_batch_size=16), PlanReport(tmp_path), Arm(faults)]
    loader = DataLoader(Samples(32), batch_size=16)
    with faults, pytest.warns(UserWarning, match="after 0 optimizer steps "):
        quiet_trainer(*callbacks, max_epochs=1).fit(Regression(), loader)
    table = json.loads((tmp_path / "plan.json").read_text())["table"]
    assert table["effective batch"].startswith("16 = 8 × 2 × 1")
    assert "nothing is accumulated" not in table["exactness"]
