"""Recipes that fit: each is trained by stock Lightning and with ``AutoAccumulate()``, and counts the same.

``RECIPES`` is the table of all. A row is a recipe: so many samples in batches of so many, arguments of the Trainer,
and what is special about it.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import reference
import torch
from lightning.pytorch import callbacks as stock
from recorder import Record
from scenarios import (
    CUT_MODES,
    DEFAULTS,
    NEUTRAL,
    Mode,
    Net,
    Row,
    Run,
    Samples,
    lambda_lr,
    loader,
    plateau,
    record,
    step_lr,
)
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader

BOTH, IN_STEP = (DEFAULTS, *NEUTRAL, *CUT_MODES), (DEFAULTS, NEUTRAL[1], CUT_MODES[1])
SEED = 7
OVER_EPOCHS = {"check_val_every_n_epoch": None}


class Line(Net):
    """A linear layer in float64 whose rate follows a schedule; it logs by step and by epoch, over all ranks.

    ``by_samples`` is for stock Lightning: a smaller last window is then divided by its samples, as by the callback, and
    not by the factor.
    """

    def __init__(self, schedule: Any = None, *, by_samples: bool = False, **config: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = torch.nn.Linear(reference.FEATURES, 1, dtype=torch.float64)
        super().__init__(partial(SGD, lr=0.05, momentum=0.5), schedule, net=net, **config)
        self.by_samples = by_samples

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.journal.add(self.trainer, "training_step", batch, batch_idx)
        loss = self.losses(batch).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=self.trainer.world_size > 1)
        return loss * self.share(len(batch[0]), batch_idx) if self.by_samples else loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.journal.add(self.trainer, "validation_step", batch, batch_idx, dataloader_idx)
        self.log("val", self.losses(batch).mean(), sync_dist=self.trainer.world_size > 1)

    def share(self, samples: int, batch_idx: int) -> float:
        """How much a batch counts in its window, times the factor that stock Lightning divides by."""
        data, factor = self.trainer.train_dataloader, self.trainer.accumulate_grad_batches
        total = min(len(data.sampler), self.trainer.num_training_batches * data.batch_size)
        before = batch_idx // factor * factor * data.batch_size
        return samples * factor / min(total - before, factor * data.batch_size)


class OneCycle(Line):
    """A schedule that is made with the number of steps."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class TwoSchedules(Line):
    """One by step and one by epoch, with frequencies."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        by_step = {"scheduler": lambda_lr(optimizer), "interval": "step", "frequency": 2}
        return [optimizer], [by_step, {"scheduler": step_lr(optimizer), "interval": "epoch", "frequency": 2}]


class Stateful(DataLoader):
    """A loader that goes on where it was: the only one with which stock Lightning resumes in mid-epoch."""

    done = start = 0

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= self.done:
                self.done += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["done"]


class Ends(pl.Callback):
    """Ends a life after so many steps, as an error does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise ArithmeticError


def by_step(schedule: Any = step_lr, frequency: int = 1, **config: Any) -> Callable[[], Line]:
    return partial(Line, schedule, interval="step", frequency=frequency, **config)


def by_epoch(schedule: Any = step_lr, frequency: int = 1, **config: Any) -> Callable[[], Line]:
    return partial(Line, schedule, interval="epoch", frequency=frequency, **config)


def saving(**settings: Any) -> Callable[[Path], pl.Callback]:
    return lambda folder: stock.ModelCheckpoint(folder / "checkpoints", **settings)


def stopping(*arguments: Any, **settings: Any) -> Callable[[Path], pl.Callback]:
    return lambda folder: stock.EarlyStopping(*arguments, **settings)


def fits(*ends: int) -> Callable[[Run], None]:
    """Several fits with one Trainer, each of which ends after an epoch: ``max_epochs`` is raised, as in a notebook."""

    def train(run: Run) -> None:
        module, data = run.row.module(), run.row.data()
        callbacks = filter(None, [run.row.callback(run.folder)])
        trainer = run.fit(module, data, *callbacks, **{**run.row.trainer, "max_epochs": ends[0]})
        for end in ends[1:]:
            trainer.fit_loop.max_epochs = end
            run.fit(module, data, trainer=trainer)

    return train


def resumes(step: int, **when: Any) -> Callable[[Run], None]:
    """A life that ends after so many steps, and another that goes on from the checkpoint that was written there."""

    def train(run: Run) -> None:
        for path in (None, run.folder / "resumed" / f"step={step}.ckpt"):
            saves = stock.ModelCheckpoint(run.folder / "resumed", **when, save_top_k=-1, filename="{step}")
            callbacks = [saves, *([Ends(step)] if path is None else [])]
            run.fit(run.row.module(), run.row.data(), *callbacks, ckpt_path=path, **run.row.trainer)

    return train


def in_mid_epoch(step: int) -> Callable[[Run], None]:
    return resumes(step, every_n_train_steps=step)


def after_an_epoch(step: int) -> Callable[[Run], None]:
    return resumes(step, every_n_epochs=1, save_on_train_epoch_end=True)


def recipe(
    samples: int = 20,
    batch: int = 4,
    accumulate: int = 1,
    *,
    ragged: bool = False,
    drop_last: bool = False,
    in_step: bool = False,
    **more: Any,
) -> Row:
    """A row: by default three epochs of five batches in their order, and a rate that falls with each step.

    ``ragged``: the last window of an epoch is smaller. ``in_step``: such data are cut in the step. All else is a field
    of a row, or an argument of the Trainer.
    """
    named = {each.name for each in fields(Row)}
    settings: dict[str, Any] = {
        "module": by_step(lambda_lr),
        "data": lambda: loader(Samples(samples), batch, drop_last=drop_last),
        "modes": IN_STEP if in_step else BOTH,
        "merges": accumulate > 1 and not in_step,
        "tolerance": 1e-11,
    }
    settings |= {name: value for name, value in more.items() if name in named}
    trainer = {name: value for name, value in more.items() if name not in named}
    trainer = {"accumulate_grad_batches": accumulate, "max_epochs": 3, **trainer}
    row = Row(**settings, batch=batch, trainer=trainer)
    if ragged:
        weighed = {"module": partial(row.module, by_samples=True), **row.stock}
        row = replace(row, by_windows=True, stock=weighed)
    if "train" in more and "data" not in row.stock and not in_step:
        whole = partial(Stateful, Samples(samples), batch, drop_last=drop_last)
        row = replace(row, stock={"data": whole, **row.stock})
    return row


RECIPES: dict[str, Row] = {
    # Windows: whole, ragged, dropped, limited.
    "no_accumulation": recipe(),
    "windows_of_two": recipe(48, accumulate=2),
    "windows_of_three": recipe(48, accumulate=3),
    "windows_of_four": recipe(48, accumulate=4),
    "a_ragged_batch": recipe(18),
    "a_ragged_batch_in_a_whole_window": recipe(22, accumulate=2, ragged=True),
    "a_window_of_one_batch": recipe(accumulate=2, ragged=True),
    "a_window_of_two_batches_of_three": recipe(accumulate=3, ragged=True),
    "a_window_of_one_batch_of_four": recipe(accumulate=4, ragged=True),
    "a_window_of_a_ragged_batch": recipe(18, accumulate=2, ragged=True),
    "less_than_a_window": recipe(8, accumulate=3, ragged=True),
    "less_than_a_batch_of_a_window": recipe(3, accumulate=2, ragged=True),
    "drop_last_of_a_ragged_batch": recipe(22, drop_last=True),
    "drop_last_of_no_batch": recipe(20, drop_last=True),
    "drop_last_before_a_short_window": recipe(36, 12, 2, drop_last=True, ragged=True),
    "drop_last_in_a_short_window": recipe(22, accumulate=2, drop_last=True, ragged=True),
    "drop_last_of_a_window": recipe(18, accumulate=2, drop_last=True),
    "drop_last_of_the_only_window": recipe(7, accumulate=2, drop_last=True, ragged=True),
    "drop_last_and_a_limit": recipe(22, accumulate=2, drop_last=True, limit_train_batches=3, ragged=True),
    "drop_last_and_a_limit_that_is_over": recipe(22, accumulate=2, drop_last=True, limit_train_batches=9, ragged=True),
    "limit_of_windows": recipe(accumulate=2, limit_train_batches=4),
    "limit_within_a_window": recipe(accumulate=2, limit_train_batches=3, ragged=True),
    "limit_of_a_part": recipe(24, accumulate=3, limit_train_batches=0.75, ragged=True),
    "limit_of_validation": recipe(limit_val_batches=1),
    "limit_of_a_part_of_validation": recipe(accumulate=2, limit_val_batches=0.5, ragged=True),
    "no_batch_of_validation": recipe(accumulate=2, limit_val_batches=0, ragged=True),
    # Schedules: stock Lightning steps one at multiples of both the frequency and the factor, in batches.
    "frequency_of_an_epoch": recipe(accumulate=2, module=by_step(frequency=5), ragged=True),
    "frequency_of_a_window": recipe(accumulate=2, module=by_step(frequency=2), ragged=True),
    "frequency_of_two_windows": recipe(accumulate=2, module=by_step(frequency=4), ragged=True),
    "frequency_beside_windows": recipe(32, accumulate=2, module=by_step(frequency=3)),
    "frequency_that_ends_in_a_short_window": recipe(28, accumulate=3, module=by_step(frequency=7), ragged=True),
    "frequency_beside_windows_of_three": recipe(32, accumulate=3, module=by_step(frequency=2), ragged=True),
    "frequency_of_batches": recipe(module=by_step(frequency=2)),
    "frequency_of_all_batches": recipe(module=by_step(frequency=5)),
    "frequency_over_the_epoch": recipe(module=by_step(frequency=7)),
    "frequency_over_the_epoch_of_windows": recipe(accumulate=2, module=by_step(frequency=8), ragged=True),
    "frequency_of_a_limit": recipe(accumulate=2, module=by_step(frequency=3), limit_train_batches=3, ragged=True),
    "frequency_that_drop_last_reaches": recipe(
        22, accumulate=2, drop_last=True, module=by_step(frequency=5), ragged=True
    ),
    "by_epoch": recipe(accumulate=2, module=by_epoch(), ragged=True),
    "by_two_epochs": recipe(accumulate=2, module=by_epoch(frequency=2), ragged=True, max_epochs=4),
    "plateau_by_epoch": recipe(accumulate=2, module=by_epoch(plateau, monitor="val"), ragged=True),
    "plateau_by_step": recipe(module=by_step(plateau, monitor="loss")),
    "plateau_by_step_of_windows": recipe(32, accumulate=2, module=by_step(plateau, 4, monitor="val", strict=False)),
    "one_cycle": recipe(module=OneCycle),
    "one_cycle_of_ragged_windows": recipe(accumulate=3, module=OneCycle, ragged=True),
    "one_cycle_of_a_limit": recipe(accumulate=2, module=OneCycle, limit_train_batches=3, ragged=True),
    "one_cycle_of_max_steps": recipe(accumulate=2, module=OneCycle, max_steps=5, ragged=True),
    "one_cycle_that_drops_the_last": recipe(22, accumulate=2, drop_last=True, module=OneCycle, ragged=True),
    "schedules_by_step_and_by_epoch": recipe(accumulate=2, module=TwoSchedules, ragged=True, max_epochs=4),
    # Validation: in, at and over epochs.
    "validation_in_the_epoch": recipe(val_check_interval=2),
    "validation_at_the_last_batch": recipe(accumulate=2, val_check_interval=5, ragged=True),
    "validation_at_windows": recipe(accumulate=2, val_check_interval=4, ragged=True),
    "validation_of_three_batches_within_windows": recipe(accumulate=2, val_check_interval=3, ragged=True, rounds=True),
    "validation_at_every_batch": recipe(accumulate=4, val_check_interval=1, ragged=True, rounds=True),
    "validation_at_a_part": recipe(val_check_interval=0.4),
    "validation_at_a_part_of_windows": recipe(accumulate=2, val_check_interval=0.4, ragged=True),
    "validation_at_a_quarter": recipe(32, accumulate=2, val_check_interval=0.25),
    "validation_of_every_second_epoch": recipe(accumulate=2, check_val_every_n_epoch=2, ragged=True, max_epochs=4),
    "validation_of_a_limit": recipe(accumulate=2, limit_train_batches=3, val_check_interval=3, ragged=True),
    "validation_over_two_epochs": recipe(accumulate=2, val_check_interval=10, **OVER_EPOCHS, ragged=True, max_epochs=4),
    "validation_over_two_epochs_of_a_number_of_samples": recipe(
        60,
        12,
        ours={"effective_batch_size": 24},
        stock={"trainer": {"accumulate_grad_batches": 2, "max_epochs": 4, "val_check_interval": 10, **OVER_EPOCHS}},
        val_check_interval=10,
        **OVER_EPOCHS,
        ragged=True,
        max_epochs=4,
        modes=(DEFAULTS,),
    ),
    "validation_over_an_epoch_of_windows": recipe(
        accumulate=2, val_check_interval=7, **OVER_EPOCHS, ragged=True, max_epochs=4
    ),
    "validation_over_an_epoch": recipe(val_check_interval=7, **OVER_EPOCHS, max_epochs=4),
    "validation_over_an_epoch_within_windows": recipe(
        accumulate=2, val_check_interval=8, **OVER_EPOCHS, ragged=True, rounds=True, max_epochs=4
    ),
}


def on_rank(name: str, mode: Mode, folder: Path) -> Record:
    """The record of a rank."""
    return record(RECIPES[name], mode, folder)
