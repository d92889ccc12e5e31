"""Effective batches by epoch, step and samples, and rates that follow them: each is that of a loop by hand."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from reference import Regression, Samples, SaveAll, Validated, fit, loader, worst_error
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.schedule import by_samples, by_step, linear

SIZE, RECIPE, EPOCHS = 40, 4, 3
WITHIN = 27  # micro-batches after which no window ends


def in_order(samples: int = 48, batch_size: int = 4) -> Any:
    return DataLoader(Samples(samples), batch_size)


def fit_epochs(loader: Any, *callbacks: pl.Callback, **settings: Any) -> tuple[Any, pl.Trainer]:
    return fit(loader, *callbacks, **{"max_epochs": EPOCHS, **settings})


def scheduled(schedule: Any, micro_batch: Any = 2, **settings: Any) -> AutoAccumulate:
    return AutoAccumulate(schedule, micro_batch_size=micro_batch, **{"verify": False, **settings})


def test_the_recipe_decides_when_validation_is_due() -> None:
    """``val_check_interval`` counts the recipe's batches, of which windows have 1, 1, 1, 3, 3, 3, 3, 3, 3, 3.

    The loader mode validates after the window; the step leaves it to Lightning, after batches 5, 10, 15 and 20.
    """
    over_epochs = {"val_check_interval": 5, "check_val_every_n_epoch": None, "max_epochs": 2}
    for mode, steps in (("loader", [4, 6, 7, 9]), ("step", [3, 5, 7, 8])):
        callback = scheduled(by_step({0: 4, 3: 12}), micro_batching=mode)
        module, _ = fit_epochs(in_order(), callback, module=Validated(), **over_epochs)
        assert module.steps_at_validation == steps
        assert [len(window) for window in module.windows] == [4] * 3 + [12] * 7


def test_the_plan_is_that_of_the_current_window() -> None:
    """``callback.plan`` and ``trainer.accumulate_grad_batches`` change at a window's border, not in a ragged one."""
    seen: list[tuple[int, int, int]] = []

    def watch(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        factor = trainer.accumulate_grad_batches
        seen.append((callback.plan.effective_batch_size, callback.plan.factor, batch_idx % factor))  # type: ignore[union-attr]

    callback = scheduled(linear(2, 6, steps=2), micro_batching="loader")
    _, trainer = fit_epochs(in_order(15), callback, LambdaCallback(on_train_batch_start=watch), max_epochs=1)
    assert seen == [(2, 1, 0), (4, 2, 0), (4, 2, 1), (6, 3, 0), (6, 3, 1), (6, 3, 2), (6, 3, 0), (6, 3, 1)]
    assert type(trainer.accumulate_grad_batches) is int


def test_the_probe_tries_what_the_largest_window_needs() -> None:
    """A limit that holds the first windows alone would run out of memory later; the step cuts the loader's batches."""
    for mode, limit in (("loader", 24), ("step", 4)):
        settings: dict[str, Any] = {"micro_batching": mode, "memory_budget": "1GiB", "cache": False}
        callback = AutoAccumulate(by_step({0: 4, 5: 24}), **settings)
        fit_epochs(in_order(), callback, max_epochs=2)
        assert callback.probe is not None
        assert callback.probe.limit == limit


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize(("mode", "saved"), [("loader", "on_validation_end"), ("step", "on_train_batch_end")])
def test_a_growing_batch_grows_on_after_a_resume(mode: Any, saved: str, tmp_path: Path) -> None:
    """At the end of an epoch, and within one, where a window begins after a resume."""
    step = 6 if mode == "loader" else 2

    def save(trainer: Any, *_: Any) -> None:
        if trainer.global_step == step and not path.exists():
            trainer.save_checkpoint(path)

    path, arguments = tmp_path / "saved.ckpt", {"micro_batching": mode, "micro_batch": 4}
    module, _ = fit_epochs(in_order(), scheduled(by_step({0: 4, 2: 12}), **arguments), LambdaCallback(**{saved: save}),
                      module=Validated())  # fmt: skip
    resumed, _ = fit_epochs(in_order(), scheduled(by_step({0: 4, 2: 12}), **arguments), ckpt_path=path)
    assert [len(each) for each in resumed.windows if each] == [len(each) for each in module.windows[step:]]


@pytest.mark.loader_only(reason="in the step a resume is stock Lightning's")
def test_a_checkpoint_of_stock_lightning_knows_steps_and_samples(tmp_path: Path) -> None:
    """The loop's counts tell how many there have been."""
    fit_epochs(in_order(), SaveAll(tmp_path), max_epochs=2)
    for schedule in (by_step({0: 4, 16: 8}), by_samples({0: 4, 64: 8})):
        for step in (12, 14):
            module, _ = fit_epochs(
                in_order(), scheduled(schedule, 4), ckpt_path=tmp_path / f"step{step}.ckpt", max_epochs=2
            )
            assert [len(window) for window in module.windows[step:]] == [4] * (16 - step) + [8] * 4


def test_another_schedule_after_a_resume_holds_from_the_step_on(tmp_path: Path) -> None:
    """The windows before are what they were: neither steps nor samples are counted by the new schedule."""
    fit_epochs(in_order(), scheduled(4, 4), SaveAll(tmp_path), max_epochs=1)
    later = scheduled(by_step({0: 16, 6: 6, 8: 10}), 3, micro_batching="loader")
    module, _ = fit_epochs(in_order(), later, ckpt_path=tmp_path / "step5.ckpt", max_epochs=1)
    assert module.windows[5:] == [list(range(20, 36)), list(range(36, 42)), list(range(42, 48))]


def test_a_batch_that_cannot_be_cut_in_a_later_epoch_is_refused_at_once() -> None:
    """Where the step cuts, a window is whole batches of the loader."""
    module = Regression()
    with pytest.raises(UserError, match="effective_batch_size=20 is no whole number of batches"):
        fit(loader(48, 8), AutoAccumulate({0: 16, 3: 20}, micro_batching="step"), module=module, max_epochs=5)
    assert not module.gradients


# --- learning rates ------------------------------------------------------------------------------


class Rates(Regression):
    """Notes the learning rates that the optimizer reads at each step."""

    def __init__(self, schedule: Any = None, interval: str = "step", frequency: int = 1) -> None:
        super().__init__()
        self.schedule, self.interval, self.frequency = schedule, interval, frequency
        self.read: list[tuple[float, ...]] = []

    def configure_optimizers(self) -> Any:
        first, *rest = self.net.parameters()
        optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": 0.03}], lr=0.01)
        optimizer.register_step_pre_hook(lambda chosen, *_: self.read.append(rates_of(chosen)))
        if self.schedule is None:
            return optimizer
        config = {"scheduler": self.schedule(optimizer), "interval": self.interval, "frequency": self.frequency}
        return [optimizer], [config]


def rates_of(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    return tuple(group["lr"] for group in optimizer.param_groups)


SCHEDULERS: dict[str, Any] = {
    "none": (None, "step"),
    "by step": (lambda optimizer: ExponentialLR(optimizer, 0.9), "step"),
    "by epoch": (lambda optimizer: ExponentialLR(optimizer, 0.5), "epoch"),
    "one cycle": (lambda optimizer: OneCycleLR(optimizer, [0.1, 0.2], total_steps=60), "step"),
}
BATCHES: dict[str, Any] = {
    "constant": (12, lambda k, n: 12),
    "by step": (by_step({0: 4, 3: 8, 7: 12}), lambda k, n: 4 if k < 3 else 8 if k < 7 else 12),
    "by samples": (by_samples({0: 4, 50: 8}), lambda k, n: 4 if n < 50 else 8),
}


def by_hand(scheduler: str, count: Any, rule: str) -> list[tuple[float, ...]]:
    """A loop that multiplies what its scheduler sets before each step, and takes that back after it."""
    made = Rates(*SCHEDULERS[scheduler]).configure_optimizers()
    (optimizer,), schedulers = ([made], []) if SCHEDULERS[scheduler][0] is None else made
    found, seen = [], 0
    for _ in range(EPOCHS):
        start = 0
        while start < SIZE:
            batch = count(len(found), seen)
            factor = {"linear": batch / RECIPE, "sqrt": (batch / RECIPE) ** 0.5}[rule]
            found.append(tuple(rate * factor for rate in rates_of(optimizer)))
            optimizer.step()
            start, seen = start + batch, seen + min(batch, SIZE - start)
            if schedulers and schedulers[0]["interval"] == "step":
                schedulers[0]["scheduler"].step()
        if schedulers and schedulers[0]["interval"] == "epoch":
            schedulers[0]["scheduler"].step()
    return found


def rated(module: pl.LightningModule, callback: Any, *callbacks: pl.Callback, **settings: Any) -> Any:
    return fit_epochs(DataLoader(Samples(SIZE), RECIPE, shuffle=True), callback, *callbacks, module=module, **settings)


@pytest.mark.parametrize(
    ("scheduler", "batches", "rule", "mode"),
    [
        (scheduler, batches, ("linear", "sqrt")[(row + column) % 2], ("loader", "step")[(row // 2 + column) % 2])
        for row, scheduler in enumerate(SCHEDULERS)
        for column, batches in enumerate(BATCHES)
    ],
)
def test_each_rate_is_that_of_a_loop_by_hand(
    scheduler: str, batches: str, rule: Any, mode: Any, tmp_path: Path
) -> None:
    """In each parameter group, beside any scheduler, to the bit; and after a resume within a window (pairs)."""
    asked, count = BATCHES[batches]
    module, path, steps = Rates(*SCHEDULERS[scheduler]), tmp_path / "within.ckpt", []

    def save(trainer: Any, *_: Any) -> None:
        steps.append(trainer.global_step)
        if len(steps) == WITHIN:
            trainer.save_checkpoint(path)

    saver = LambdaCallback(on_train_batch_end=save)
    rated(module, scheduled(asked, micro_batching=mode, scale_lr=rule), saver)
    expected = by_hand(scheduler, count, rule)
    assert module.read == expected
    if mode == "step":  # resumes are stock Lightning's
        return
    step, resumed = steps[WITHIN - 1], Rates(*SCHEDULERS[scheduler])
    rated(resumed, scheduled(asked, micro_batching=mode, scale_lr=rule), ckpt_path=path)
    assert resumed.read == expected[step:]
    assert worst_error(resumed.gradients, module.gradients[step:]) <= 1e-9
    stock = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert scheduler != "none" or [group["lr"] for group in stock] == [0.01, 0.03]  # unscaled, for whoever resumes


@pytest.mark.filterwarnings("ignore:The effective batch of 1,000 samples is above the 40 of an epoch")
@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("asked", [1000, {0: 1000}, by_step({0: 1000}), by_step({0: 996, 1: 1000})])
def test_a_rate_follows_no_more_samples_than_an_epoch_has(asked: Any, mode: str) -> None:
    module = Rates(None)
    rated(module, AutoAccumulate(asked, micro_batching=mode, verify=False, scale_lr="linear"))
    assert module.read == [(0.01 * 10, 0.03 * 10)] * EPOCHS


class WarmedUp(Rates):
    """Sets the rates by hand after each step, as Lightning's page on ``optimizer_step`` shows."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        for group, rate in zip(optimizer.param_groups, (0.01, 0.03)):
            group["lr"] = rate * min(1.0, 0.125 * 2.0**self.trainer.global_step)


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_rates_that_the_module_sets_are_scaled_in_the_next_window(mode: str) -> None:
    """Each is twice the one before, as large as that one scaled: its value does not tell who has set it."""
    plain = WarmedUp(None)
    rated(plain, AutoAccumulate(2 * RECIPE, micro_batching=mode, verify=False))
    scaled = WarmedUp(None)
    rated(scaled, AutoAccumulate(2 * RECIPE, micro_batching=mode, verify=False, scale_lr="linear"))
    assert len({*plain.read}) > 3
    assert scaled.read == [tuple(2 * rate for rate in rates) for rates in plain.read]


def test_the_frequency_of_a_schedule_counts_the_recipes_batches_whatever_the_micro_batch() -> None:
    one, other = (Rates(SCHEDULERS["by step"][0], frequency=4) for _ in range(2))
    for module, micro_batch in ((one, 4), (other, 2)):
        fit_epochs(in_order(), scheduled(8, micro_batch), module=module, accumulate_grad_batches=2)
    assert one.read == other.read


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize(("frequency", "due_after"), [(2, [2, 4, 5, 6, 7, 8]), (3, [3, 5, 6, 8]), (6, [5, 8])])
def test_a_frequency_in_windows_that_grow_is_due_at_the_end_of_the_window(
    mode: Any, frequency: int, due_after: list[int]
) -> None:
    """Windows end after 1, 2, 3, 5, 7, 9, 11 and 12 or 13 batches of four."""
    grown = Rates(SCHEDULERS["by step"][0], frequency=frequency)
    fit_epochs(in_order(52), scheduled(by_step({0: 4, 3: 8}), micro_batching=mode), module=grown, max_epochs=1)
    expected = [0.01 * 0.9 ** sum(step < read for step in due_after) for read in range(1, len(grown.read) + 1)]
    assert [rate[0] for rate in grown.read] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", [by_step({0: 4, 2: 8}), 4])
def test_loggers_get_batch_factor_and_rate_by_step(schedule: Any, tmp_path: Path) -> None:
    """At the steps that ``log_every_n_steps`` says; Lightning's own monitor sees the scaled rate."""
    logger, is_constant = CSVLogger(tmp_path, name="", version=""), schedule == 4
    module = Rates(lambda optimizer: ExponentialLR(optimizer, 0.9))
    callback = scheduled(schedule, micro_batching="loader", scale_lr="none" if is_constant else "linear")
    settings: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 2, "barebones": False}
    rated(module, callback, LearningRateMonitor("step"), **settings)
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    found = [row for row in rows if row.get("effective_batch_size")]
    batches = [] if is_constant else [4.0] * 2 + [8.0] * (len(module.read) - 2)
    assert [float(row["effective_batch_size"]) for row in found] == batches
    assert [float(row["accumulate_grad_batches"]) for row in found] == [batch / 2 for batch in batches]
    rates = [read[0] for read in module.read]
    assert is_constant or [float(row["learning_rate"]) for row in found] == pytest.approx(rates)
    monitored = [float(row["lr-SGD/pg1"]) for row in rows if row.get("lr-SGD/pg1")]  # by micro-batch
    assert list(dict.fromkeys(monitored)) == pytest.approx(list(dict.fromkeys(rates)))


class Rows(DummyLogger):
    """Keeps what is logged of windows: the step, and the factor."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, int]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        if "effective_batch_size" in metrics:
            self.rows.append((step, int(metrics["accumulate_grad_batches"])))


class Short(Regression):
    """Memory runs out in passes of more than two samples, from the second optimizer step on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) > 2 and self.trainer.global_step > 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)


@pytest.mark.loader_only(reason="the step keeps the factor")
def test_a_window_that_begins_again_is_logged_once() -> None:
    """As it steps: with the factor that it has then."""
    logger = Rows()
    callback = scheduled(by_step({0: 4, 1: 8}), 8)
    with pytest.warns(UserWarning, match="Memory ran out in training"):
        fit_epochs(in_order(36), callback, module=Short(), max_epochs=1, logger=logger, log_every_n_steps=1)
    assert callback.oom_events == 2
    assert logger.rows == [(0, 1), *((step, 4) for step in range(1, 5))]
