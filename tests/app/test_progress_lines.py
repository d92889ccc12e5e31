import re
from types import SimpleNamespace

import pytest
from command_lines import TINY
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_ga import AutoAccumulate
from lightning_ga.app import progress_lines as progress
from lightning_ga.app.terminal import number
from lightning_ga.plan.accumulation import plan_accumulation
from lightning_ga.plan.batch_schedule import by_samples, by_step

OFF = (*(word for word in TINY if not word.startswith("accumulate.")), "accumulate=off")


@pytest.fixture
def a_line_each_batch(monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)


@pytest.mark.usefixtures("a_line_each_batch")
def test_without_a_terminal_a_line_says_how_far_training_is(command):
    """Epoch, optimizer step, samples a second and time left; a line an epoch ends with samples a second."""
    run = command(*TINY, "trainer.max_epochs=2", "trainer.num_sanity_val_steps=2")
    assert run.code == 0, run.err
    lines = [line for line in run.out.splitlines() if line.startswith("Epoch")]
    steps = [line for line in lines if "step" in line]
    assert steps[0].startswith("Epoch 1/2, step 0/8, "), steps  # the first of two micro-batches
    assert steps[-1].startswith("Epoch 2/2, step 8/8, ")
    assert re.fullmatch(r"Epoch 2/2, step 8/8, [\d,.]+ samples/s, 0:00:00 left", steps[-1])
    epochs = [line for line in lines if ": train" in line]
    assert len(epochs) == 2
    assert all(re.search(r"; \d+\.\d s, [\d,.]+ samples/s$", line) for line in epochs)


@pytest.mark.usefixtures("a_line_each_batch")
def test_without_the_callback_optimizer_steps_are_counted(command, monkeypatch):
    """Where Lightning does not know the end, no time is left."""

    def unknown(trainer):
        raise MisconfigurationException("Estimated stepping batches cannot be computed")

    monkeypatch.setattr(progress, "optimizer_steps", unknown)
    run = command(*OFF)
    assert run.code == 0, run.err
    assert re.search(r"^Epoch 1/1, step 1, [\d,.]+ steps/s$", run.out, re.MULTILINE)
    assert " left" not in run.out


@pytest.mark.slow
@pytest.mark.usefixtures("a_line_each_batch")
def test_an_evaluation_and_a_bar_print_no_such_lines(command):
    run = command(*OFF, "progress=bar")
    assert run.code == 0, run.err
    assert " step " not in run.out
    evaluated = command(*OFF, "task=validate", "ckpt_path=last", folder="validate")
    assert evaluated.code == 0, evaluated.err
    assert "Epoch" not in evaluated.out


def test_samples_are_those_of_the_whole_epoch(monkeypatch):
    """Their number over the seconds of training: validation is left out, and what was done before the epoch."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(progress, "done", lambda trainer: (trainer.samples, "samples"))
    line, trainer = progress.EpochLine(), SimpleNamespace(samples=1000)
    line.on_train_epoch_start(trainer, None)
    clock.now, trainer.samples = 2.0, 3000
    assert line._rate(trainer) == "1,000 samples/s"
    line.on_validation_start(trainer, None)
    clock.now = 12.0
    line.on_validation_end(trainer, None)
    clock.now, trainer.samples = 14.0, 3010
    assert line._rate(trainer) == "502 samples/s"
    trainer.samples = 1006
    assert line._rate(trainer) == "1.50 samples/s"


def test_before_a_validation_values_of_one_are_of_the_epoch_before(monkeypatch):
    """A name that only begins alike is of training."""
    monkeypatch.setattr(progress, "done", lambda trainer: (8, "samples"))
    monkeypatch.setattr(progress, "batch_of", lambda trainer: "")
    metrics = {"value_loss": 1.0, "val/loss": 2.0, "validation_loss": 3.0}
    trainer = SimpleNamespace(callback_metrics=metrics, is_global_zero=True, current_epoch=1, max_epochs=2)
    line, printed = progress.EpochLine(), []
    monkeypatch.setattr(line, "_print", printed.append)
    line._print_epoch(trainer)
    line._has_validated = True
    line._print_epoch(trainer)
    before, after = printed
    assert "value_loss" in before
    assert "2.0" not in before
    assert "3.0" not in before
    assert "2.0000" in after


def test_training_that_goes_on_in_an_epoch_counts_from_there(monkeypatch):
    """Lightning then does not say that an epoch begins."""
    clock = SimpleNamespace(now=9000.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(progress, "done", lambda trainer: (trainer.samples, "samples"))
    monkeypatch.setattr(progress, "optimizer_steps", lambda trainer: 80)
    line, trainer = progress.EpochLine(), SimpleNamespace(samples=1000, global_step=10)
    line.on_train_start(trainer, None)
    clock.now, trainer.samples = 9002.0, 3000
    assert line._rate(trainer) == "1,000 samples/s"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"accumulate": by_step({0: 1, 9: 2})}, "; batch 64"),
        ({"accumulate": {0: 1, 1: 2}}, "; batch 64"),
        ({"effective_batch_size": by_step({0: 32, 9: 48})}, "; batch 48"),
        ({"effective_batch_size": by_samples({0: 32, 999: 64})}, ""),
        ({"effective_batch_size": 64}, ""),
    ],
)
def test_an_epoch_names_its_batch_if_a_schedule_changes_it(arguments, text):
    """And not the factor, if the schedule is one of factors."""
    asked = AutoAccumulate(**arguments)._request
    accumulate = SimpleNamespace(plan=plan_accumulation(64, micro_batch=32), probe=None, _request=asked)
    assert progress.batch_of(SimpleNamespace(callbacks=[accumulate], global_step=10)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5000"), (0.0, "0.0000"), (-0.00025, "-2.5e-4"), (1.5e-4, "1.5e-4"), (1e-9, "1e-9"), (1e20, "1e20")],
)
def test_small_and_huge_numbers_keep_their_digits(value, text):
    """A rate of 1.5e-4 is not shown as 0.0001 or 0.0002."""
    assert number(value) == text
    assert float(number(value)) == value
