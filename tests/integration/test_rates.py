"""Learning rate and β₂ follow the effective batch: each value is that of a loop written by hand, to the bit."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from pairing import every_pair
from reference import Regression, Samples, fit, worst_error
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.schedule import by_samples, by_step, linear, seesaw

SIZE, RECIPE, EPOCHS = 40, 4, 3


class Rates(Regression):
    """Notes the learning rates and β₂ that the optimizer reads at each step."""

    def __init__(self, schedule: Any = None, interval: str = "step", adam: bool = False) -> None:
        super().__init__()
        self.schedule, self.interval, self.adam = schedule, interval, adam
        self.read: list[tuple[float, ...]] = []

    def configure_optimizers(self) -> Any:
        first, *rest = self.net.parameters()
        groups = [{"params": [first]}, {"params": rest, "lr": 0.03}]
        optimizer = torch.optim.Adam(groups, lr=0.01) if self.adam else torch.optim.SGD(groups, lr=0.01)
        optimizer.register_step_pre_hook(lambda chosen, *_: self.read.append(values(chosen)))
        if self.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": self.interval}]


def values(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    groups = optimizer.param_groups
    return (*(group["lr"] for group in groups), *(group["betas"][1] for group in groups if "betas" in group))


SCHEDULERS: dict[str, Any] = {
    "none": (None, "step"),
    "exponential by step": (lambda optimizer: ExponentialLR(optimizer, 0.9), "step"),
    "exponential by epoch": (lambda optimizer: ExponentialLR(optimizer, 0.5), "epoch"),
    "cosine": (lambda optimizer: CosineAnnealingLR(optimizer, 50), "step"),
    "one cycle": (lambda optimizer: OneCycleLR(optimizer, [0.1, 0.2], total_steps=60), "step"),
    "lambda": (lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)), "step"),
}
BATCHES: dict[str, Any] = {
    "constant": (12, lambda k, n: 12),
    "by step": (by_step({0: 4, 3: 8, 7: 10}), lambda k, n: 4 if k < 3 else 8 if k < 7 else 10),
    "by samples": (by_samples({0: 3, 50: 7}), lambda k, n: 3 if n < 50 else 7),
    "linear": (linear(2, 9, steps=7), lambda k, n: min(2 + k, 9)),
}


def by_hand(scheduler: str, count: Any, rule: str, *, adam: bool, beta2: bool) -> list[tuple[float, ...]]:
    """A loop that multiplies what its scheduler sets before each step, and takes that back after it."""
    module = Rates(*SCHEDULERS[scheduler], adam=adam)
    made = module.configure_optimizers()
    (optimizer,), schedulers = ([made], []) if SCHEDULERS[scheduler][0] is None else made
    found, seen = [], 0
    for _ in range(EPOCHS):
        start = 0
        while start < SIZE:
            batch = count(len(found), seen)
            ratio = batch / RECIPE
            factor = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[rule]
            betas = [group["betas"][1] ** (ratio if beta2 else 1.0) for group in optimizer.param_groups if adam]
            found.append((*(group["lr"] * factor for group in optimizer.param_groups), *betas))
            optimizer.step()
            start, seen = start + batch, seen + min(batch, SIZE - start)
            if schedulers and schedulers[0]["interval"] == "step":
                schedulers[0]["scheduler"].step()
        if schedulers and schedulers[0]["interval"] == "epoch":
            schedulers[0]["scheduler"].step()
    return found


class SaveSome(pl.Callback):
    """A checkpoint after the fourth micro-batch and every eleventh from there on: within windows too."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.batches = folder, 0
        self.saved: dict[Path, int] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches % 11 == 4:
            path = self.folder / f"{self.batches}.ckpt"
            trainer.save_checkpoint(path)
            self.saved[path] = trainer.global_step


def train(module: pl.LightningModule, callback: Any, *callbacks: pl.Callback, **settings: Any) -> Any:
    loader = DataLoader(Samples(SIZE), RECIPE, shuffle=True)
    return fit(loader, callback, *callbacks, module=module, **{"max_epochs": EPOCHS, **settings})


@pytest.mark.filterwarnings("ignore:.* ends after .0 steps and training takes")
@every_pair(
    scheduler=list(SCHEDULERS), batches=list(BATCHES), rule=["linear", "sqrt", "none"], adam=[False, True],
    mode=["loader", "step"],
)  # fmt: skip
def test_each_rate_is_that_of_a_loop_by_hand(
    scheduler: str, batches: str, rule: Any, adam: bool, mode: Any, tmp_path: Path
) -> None:
    """In each parameter group, beside any scheduler, and after a resume within a window, to the bit (pairs)."""
    asked, count = BATCHES[batches]

    def callback() -> AutoAccumulate:
        scale = {"scale_lr": rule, "scale_beta2": adam}
        return AutoAccumulate(asked, micro_batch_size=2, micro_batching=mode, verify=False, **scale)

    module, saver = Rates(*SCHEDULERS[scheduler], adam=adam), SaveSome(tmp_path)
    train(module, callback(), saver)
    expected = by_hand(scheduler, count, rule, adam=adam, beta2=adam)
    assert module.read == expected
    before_the_end = [(path, step) for path, step in saver.saved.items() if step < len(expected)]
    assert before_the_end
    for path, step in before_the_end:
        resumed = Rates(*SCHEDULERS[scheduler], adam=adam)
        train(resumed, callback(), ckpt_path=path)
        assert resumed.read == expected[step:]
        assert worst_error(resumed.gradients, module.gradients[step:]) <= 1e-9
        stock = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"]
        if scheduler == "none":
            assert [group["lr"] for group in stock] == [0.01, 0.03]  # unscaled, for whoever resumes it


def test_two_hands_on_one_rate_are_refused() -> None:
    """A step of the user's own that sets the rate is named, with the value that it set."""

    class WarmUp(Rates):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.001
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

    message = r"scale_lr='linear' set lr=0.02 of parameter group 0, and a hook .* set 0.001 \(one of WarmUp"
    with pytest.raises(UserError, match=message):
        train(WarmUp(), AutoAccumulate(8, micro_batch_size=4, scale_lr="linear", verify=False))
    train(WarmUp(), AutoAccumulate(8, micro_batch_size=4, verify=False))


def test_what_contradicts_is_refused_before_training() -> None:
    """Two arguments that scale one rate, and an optimizer without β₂."""
    with pytest.raises(UserError, match="seesaw.* divides the learning rate, and scale_lr='sqrt' multiplies it"):
        AutoAccumulate(seesaw(4, samples=800), scale_lr="sqrt")
    with pytest.raises(UserError, match="scale_lr='root' must be one of 'none', 'linear', 'sqrt'"):
        AutoAccumulate(scale_lr="root")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="scale_beta2=True scales 'betas', and SGD has none"):
        train(Rates(), AutoAccumulate(8, micro_batch_size=4, scale_beta2=True, verify=False))


def test_loggers_get_batch_factor_and_rate_by_step(tmp_path: Path) -> None:
    """At the steps that ``log_every_n_steps`` says; Lightning's own monitor sees the scaled rate."""
    logger = CSVLogger(tmp_path, name="", version="")
    callback = AutoAccumulate(by_step({0: 4, 3: 8}), micro_batch_size=2, scale_lr="linear", verify=False)
    train(
        Rates(lambda optimizer: ExponentialLR(optimizer, 0.9)), callback, LearningRateMonitor("step"), logger=logger,
        log_every_n_steps=1, max_epochs=1, barebones=False,
    )  # fmt: skip
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    table = {name: [row[place] for row in rows[1:]] for place, name in enumerate(rows[0])}
    ours = {name: [value for value in table[name] if value] for name in table}
    batches = [4, 4, 4, 8, 8, 8, 8]
    assert [float(value) for value in ours["effective_batch_size"]] == batches
    rates = [0.01 * 0.9**step * batch / 4 for step, batch in enumerate(batches)]
    assert [float(value) for value in ours["learning_rate"]] == pytest.approx(rates)
    monitored = [float(value) for value in ours["lr-SGD/pg1"]]  # by micro-batch
    assert list(dict.fromkeys(monitored)) == pytest.approx(rates)
    assert len(ours["learning_rate/1"]) == len(ours["accumulate_grad_batches"]) == 7


@pytest.mark.parametrize("schedule", [{0: 4, 1: 8}, lambda epoch: 4 * (epoch + 1)])
def test_loggers_get_batch_and_factor_of_a_schedule_by_epoch(schedule: Any, tmp_path: Path) -> None:
    """By step, too; of a batch that stays as it is they get nothing."""
    for given, batches in ((schedule, [4.0] * 10 + [8.0] * 5), (4, [])):
        logger = CSVLogger(tmp_path, name=str(given == 4), version="")
        settings: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 2, "barebones": False}
        train(Rates(), AutoAccumulate(given, micro_batch_size=2, verify=False), LearningRateMonitor("step"), **settings)
        rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
        found = [row for row in rows if row.get("effective_batch_size")]
        assert [float(row["effective_batch_size"]) for row in found] == batches
        assert [float(row["accumulate_grad_batches"]) for row in found] == [batch / 2 for batch in batches]
