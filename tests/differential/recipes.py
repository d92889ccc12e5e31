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
from reference import SizedStreamOf, StreamOf, cut
from scenarios import (
    CUT_MODES,
    DEFAULTS,
    NEUTRAL,
    STOCK,
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
from torch.utils.data import DataLoader, Sampler, default_collate

from lightning_ga import AutoAccumulate

BOTH = (DEFAULTS, *NEUTRAL, *CUT_MODES)
IN_LOADER, IN_STEP = (
    tuple(mode for mode in BOTH if mode.where == where or mode == DEFAULTS) for where in ("loader", "step")
)
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

    def on_train_epoch_end(self) -> None:
        self.set_epoch_of_data(self.current_epoch + 1)

    def set_epoch_of_data(self, epoch: int) -> None:
        """Let data that change have the length of an epoch."""
        data = self.trainer.train_dataloader.dataset
        if isinstance(data, Changing):
            data.epoch = min(epoch, len(data.sizes) - 1)

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


class Late(Line):
    """Its data change after an epoch has begun, just before the loop asks for the first batch."""

    def on_train_epoch_end(self) -> None:
        pass

    def on_train_epoch_start(self) -> None:
        self.set_epoch_of_data(self.current_epoch)


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


class Sparse(Line):
    """A number for each fifth sample, whose gradients are sparse; each batch has some of them twice."""

    def __init__(self, schedule: Any = None, **config: Any) -> None:
        super().__init__(schedule, **config)
        self.net = torch.nn.Embedding(5, 1, sparse=True, dtype=torch.float64)
        self.make = partial(SGD, lr=0.05)

    def losses(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[2] % 5) - batch[1]).square().flatten()


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


class BySeedAndEpoch(Sampler[int]):
    """The order of ``shuffle=True`` with the callback."""

    def __init__(self, data: Samples) -> None:
        self.data = data
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        return iter(reference.permutation(len(self.data), SEED, self.epoch))


class Changing(Samples):
    """As many samples in each epoch as is said; the module that trains on them sets the epoch."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(max(sizes))
        self.sizes = sizes
        self.epoch = 0

    def __len__(self) -> int:
        return self.sizes[self.epoch]

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return super().__getitem__(index)


def begun_at(epoch: int, data: Changing) -> Changing:
    """Data that have the length of another epoch when they are set up."""
    data.epoch = epoch
    return data


class ChangesLoader(pl.Callback):
    """Lets the user's loader double its inputs, once training has begun, if it is ours that trains."""

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if any(isinstance(each, AutoAccumulate) for each in trainer.callbacks):
            trainer.fit_loop._data_source.instance.collate_fn = doubled


def doubled(samples: list[Any]) -> Any:
    inputs, *rest = default_collate(samples)
    return [2 * inputs, *rest]


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
    """A life that ends after so many steps, and another that goes on from the checkpoint that was written there.

    Stock Lightning gets a loader that goes on in mid-epoch, too.
    """

    def train(run: Run) -> None:
        for path in (None, run.folder / "resumed" / f"step={step}.ckpt"):
            data = run.row.data()
            if run.mode == STOCK and "every_n_train_steps" in when:
                data = Stateful(data.dataset, data.batch_size, drop_last=data.drop_last)
            saves = stock.ModelCheckpoint(run.folder / "resumed", **when, save_top_k=-1, filename="{step}")
            callbacks = [saves, *([Ends(step)] if path is None else [])]
            run.fit(run.row.module(), data, *callbacks, ckpt_path=path, **run.row.trainer)

    return train


def in_mid_epoch(step: int) -> dict[str, Any]:
    """A resume there; batches that are cut in the step are read from the start of their epoch again."""
    return {"train": resumes(step, every_n_train_steps=step), "modes": IN_LOADER}


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
    """A row: by default two epochs of five batches in their order, and a rate that falls with each step.

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
    trainer = {"accumulate_grad_batches": accumulate, "max_epochs": 2, **trainer}
    row = Row(**settings, batch=batch, trainer=trainer)
    if ragged:
        weighed = {"module": partial(row.module, by_samples=True), **row.stock}
        row = replace(row, by_windows=True, stock=weighed)
    if row.ranks > 1:
        row = replace(row, by_windows=True)
    return row


def shuffled(data: Callable[[], Samples], *, drop_last: bool = False, **more: Any) -> Row:
    """A row whose loader shuffles; stock Lightning gets a sampler with the callback's order."""

    def in_our_order() -> DataLoader:
        samples = data()
        return loader(samples, 4, drop_last=drop_last, sampler=BySeedAndEpoch(samples))

    ours = lambda: loader(data(), 4, drop_last=drop_last, shuffle=True)  # noqa: E731
    return recipe(data=ours, stock={"data": in_our_order}, modes=IN_LOADER, **more)


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
    "plateau_by_step": recipe(module=by_step(plateau, monitor="loss"), modes=(DEFAULTS, *NEUTRAL)),
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
    # Several fits with one Trainer, as in a notebook.
    "fits": recipe(train=fits(1, 3)),
    "fits_of_windows": recipe(accumulate=2, train=fits(2, 4), ragged=True),
    "fits_of_windows_of_three": recipe(accumulate=3, module=by_step(frequency=3), train=fits(1, 2, 4), ragged=True),
    "fits_with_a_frequency_of_an_epoch": recipe(
        accumulate=2, module=by_step(frequency=5), train=fits(1, 3), ragged=True
    ),
    "fits_with_validation_over_epochs": recipe(val_check_interval=7, **OVER_EPOCHS, train=fits(2, 4)),
    "fits_of_windows_with_validation_over_epochs": recipe(
        accumulate=2, val_check_interval=10, **OVER_EPOCHS, train=fits(1, 3, 6), ragged=True
    ),
    "fits_that_drop_the_last": recipe(22, accumulate=2, drop_last=True, train=fits(1, 3), ragged=True),
    "fits_that_save": recipe(
        accumulate=2, callback=saving(every_n_train_steps=2, save_top_k=-1), train=fits(1, 3), ragged=True
    ),
    "fits_with_one_cycle": recipe(accumulate=2, module=OneCycle, train=fits(1, 3), ragged=True),
    "fits_by_epoch": recipe(accumulate=2, module=by_epoch(frequency=2), train=fits(1, 4), ragged=True),
    # Resumes: stock Lightning with a loader that goes on where it was.
    "resumed_in_mid_epoch_by_batches": recipe(**in_mid_epoch(7), by_windows=True),
    "resumed_in_mid_epoch_by_windows": recipe(accumulate=2, **in_mid_epoch(5), ragged=True),
    "resumed_in_mid_epoch_with_a_frequency": recipe(
        24, accumulate=2, module=by_step(frequency=6), **in_mid_epoch(4), by_windows=True
    ),
    "resumed_in_mid_epoch_between_validations": recipe(
        accumulate=2, val_check_interval=4, **in_mid_epoch(4), ragged=True
    ),
    "resumed_in_mid_epoch_with_validation_over_epochs": recipe(
        accumulate=2, val_check_interval=9, **OVER_EPOCHS, max_epochs=4, **in_mid_epoch(4), ragged=True, rounds=True
    ),
    "resumed_in_mid_epoch_that_drops_the_last": recipe(
        22, accumulate=2, drop_last=True, **in_mid_epoch(4), ragged=True
    ),
    "resumed_in_mid_epoch_from_stock": recipe(
        24, accumulate=2, module=by_step(frequency=6), **in_mid_epoch(4), by_windows=True, with_callback=(1,)
    ),
    "resumed_after_an_epoch_of_windows": recipe(accumulate=2, train=after_an_epoch(3), ragged=True),
    "resumed_after_an_epoch_with_a_frequency": recipe(
        accumulate=2, module=by_step(frequency=5), train=after_an_epoch(6), max_epochs=4, ragged=True
    ),
    "resumed_after_an_epoch_with_validation_over_epochs": recipe(
        accumulate=2, val_check_interval=10, **OVER_EPOCHS, max_epochs=4, train=after_an_epoch(3), ragged=True
    ),
    "resumed_after_an_epoch_with_one_cycle": recipe(
        accumulate=3, module=OneCycle, train=after_an_epoch(2), ragged=True
    ),
    "resumed_after_an_epoch_from_stock": recipe(24, accumulate=2, train=after_an_epoch(3), with_callback=(1,)),
    # The end of training.
    "stopped_early": recipe(callback=stopping("val", patience=0, min_delta=0.2), max_epochs=6),
    "stopped_early_between_windows": recipe(
        accumulate=2, callback=stopping("val", patience=0, min_delta=9.0), val_check_interval=2, ragged=True
    ),
    "stopped_early_by_training": recipe(
        accumulate=2, callback=stopping("loss_epoch", patience=0, min_delta=9.0), max_epochs=4, ragged=True
    ),
    "stopped_early_but_for_least_steps": recipe(
        accumulate=2, callback=stopping("val", stopping_threshold=9.0), val_check_interval=2, min_steps=5, ragged=True
    ),
    "stopped_early_but_for_least_epochs": recipe(
        accumulate=2, callback=stopping("val", stopping_threshold=9.0), min_epochs=2, ragged=True
    ),
    "most_steps": recipe(max_steps=7, max_epochs=-1),
    "most_steps_at_a_short_window": recipe(accumulate=2, max_steps=6, max_epochs=-1, ragged=True),
    "most_steps_within_an_epoch": recipe(accumulate=2, max_steps=5, max_epochs=-1, val_check_interval=2, ragged=True),
    # Names of checkpoints.
    "saved_every_two_steps": recipe(accumulate=2, callback=saving(every_n_train_steps=2, save_top_k=-1), ragged=True),
    "saved_every_four_steps": recipe(accumulate=2, callback=saving(every_n_train_steps=4, save_top_k=-1), ragged=True),
    "saved_every_two_epochs": recipe(accumulate=2, callback=saving(every_n_epochs=2), max_epochs=4, ragged=True),
    "saved_by_what_is_best": recipe(
        accumulate=2,
        callback=saving(monitor="val", save_top_k=2, save_last=True, filename="{epoch}-{step}-{val:.4f}"),
        val_check_interval=2,
        ragged=True,
    ),
    "saved_by_what_is_best_in_training": recipe(
        accumulate=2, callback=saving(monitor="loss_epoch", filename="{epoch}-{step}-{loss_epoch:.4f}"), ragged=True
    ),
    "saved_while_validation_is_over_epochs": recipe(
        accumulate=2, callback=saving(save_top_k=-1), val_check_interval=10, **OVER_EPOCHS, max_epochs=4, ragged=True
    ),
    # Data of other kinds.
    "own_order": recipe(accumulate=2, data=lambda: loader(Samples(20), 4, sampler=range(19, -1, -1)), ragged=True),
    "own_order_of_some": recipe(accumulate=2, data=lambda: loader(Samples(20), 4, sampler=range(3, 17)), ragged=True),
    "stream_of_windows": recipe(24, accumulate=2, data=lambda: loader(StreamOf(Samples(24)), 4), in_step=True),
    "stream_with_a_length_and_a_frequency": recipe(
        accumulate=2,
        module=by_step(frequency=4),
        data=lambda: loader(SizedStreamOf(Samples(24)), 4),
        val_check_interval=3,
        in_step=True,
    ),
    "stream_with_a_limit": recipe(
        accumulate=2, data=lambda: loader(StreamOf(Samples(40)), 4), limit_train_batches=4, in_step=True
    ),
    "own_batches": recipe(
        accumulate=2,
        module=by_step(frequency=2),
        data=lambda: loader(Samples(24), 1, batch_sampler=cut(range(24), 4)),
        val_check_interval=4,
        in_step=True,
    ),
    "cut_in_the_step": recipe(
        accumulate=2,
        module=by_step(frequency=2),
        val_check_interval=3,
        samples=24,
        in_step=True,
        ours={"micro_batching": "step"},
        modes=(DEFAULTS,),
    ),
    "shorter_in_later_epochs": recipe(data=lambda: loader(Changing(20, 12), 4)),
    "shorter_in_later_epochs_of_windows": recipe(accumulate=2, data=lambda: loader(Changing(16, 8), 4)),
    "shorter_as_an_epoch_begins": recipe(
        module=partial(Late, lambda_lr), data=lambda: loader(Changing(20, 12, 16), 4), max_epochs=3
    ),
    "longer_as_the_first_epoch_begins": recipe(
        module=partial(Late, lambda_lr), data=lambda: loader(begun_at(1, Changing(30, 18)), 4)
    ),
    "longer_in_later_epochs": recipe(data=lambda: loader(Changing(12, 20), 4)),
    "longer_in_later_epochs_of_windows": recipe(accumulate=2, data=lambda: loader(Changing(16, 24), 4)),
    "longer_in_reloaded_epochs": recipe(
        accumulate=2, data=lambda: loader(Changing(16, 24, 32), 4), reload_dataloaders_every_n_epochs=1, max_epochs=3
    ),
    "shorter_in_reloaded_epochs": recipe(
        accumulate=2, data=lambda: loader(Changing(32, 24, 8), 4), reload_dataloaders_every_n_epochs=1, max_epochs=3
    ),
    # Different on purpose: stock Lightning is given the order of samples, or the gradients, that are ours.
    "shuffled_by_seed_and_epoch": shuffled(partial(Samples, 24), accumulate=2),
    "shuffled_without_the_last": shuffled(partial(Samples, 22), accumulate=2, drop_last=True, ragged=True),
    "shuffled_and_shorter_in_later_epochs": shuffled(partial(Changing, 20, 12)),
    "shuffled_and_longer_in_later_epochs": shuffled(partial(Changing, 12, 30), module=by_step(frequency=2)),
    "shuffled_by_a_sampler_of_seed_and_epoch": recipe(
        module=by_step(frequency=5), data=lambda: loader(Samples(18), 4, sampler=BySeedAndEpoch(Samples(18)))
    ),
    "sparse_gradients_that_are_coalesced": recipe(24, 6, module=partial(Sparse, lambda_lr), by_windows=True),
    "a_loader_that_is_changed_too_late": recipe(callback=lambda folder: ChangesLoader(), modes=IN_LOADER),
    # Two ranks.
    "ranks": recipe(40, ranks=2),
    "ranks_of_windows": recipe(64, accumulate=2, ranks=2),
    "ranks_of_ragged_windows": recipe(40, accumulate=2, ranks=2, ragged=True),
    "ranks_of_ragged_batches": recipe(36, accumulate=2, ranks=2, ragged=True),
    "ranks_that_drop_the_last": recipe(44, accumulate=2, drop_last=True, ranks=2, ragged=True),
    "ranks_with_a_frequency": recipe(40, module=by_step(frequency=2), ranks=2),
    "ranks_with_a_frequency_of_an_epoch": recipe(40, accumulate=2, module=by_step(frequency=5), ranks=2, ragged=True),
    "ranks_with_one_cycle": recipe(40, accumulate=2, module=OneCycle, ranks=2, ragged=True),
    "ranks_with_a_plateau": recipe(40, module=by_epoch(plateau, monitor="val"), ranks=2),
    "ranks_with_validation_in_the_epoch": recipe(40, val_check_interval=2, ranks=2),
    "ranks_with_validation_over_epochs": recipe(
        40, accumulate=2, val_check_interval=10, **OVER_EPOCHS, max_epochs=4, ranks=2, ragged=True
    ),
    "ranks_with_a_limit": recipe(40, accumulate=2, limit_train_batches=3, ranks=2, ragged=True),
    "ranks_of_two_fits": recipe(40, accumulate=2, train=fits(1, 3), ranks=2, ragged=True),
    "ranks_that_save": recipe(
        40, accumulate=2, callback=saving(every_n_train_steps=2, save_top_k=-1), ranks=2, ragged=True
    ),
    "ranks_that_stop_early": recipe(
        40, accumulate=2, callback=stopping("val", patience=0, min_delta=9.0), ranks=2, ragged=True
    ),
    "ranks_that_cut_in_the_step": recipe(
        64, accumulate=2, ranks=2, in_step=True, ours={"micro_batching": "step"}, modes=(DEFAULTS,)
    ),
}


def on_rank(mode: Mode, folder: Path) -> dict[str, Record | str]:
    """The records of this rank, of all recipes that have two; the text of an error if there was one."""
    found: dict[str, Record | str] = {}
    for name, row in RECIPES.items():
        if row.ranks == 2 and mode in (STOCK, *row.modes):
            try:
                found[name] = record(row, mode, folder / name)
            except Exception as error:
                found[name] = repr(error)
    return found
