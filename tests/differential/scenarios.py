"""Trainings that users write, each to be run with the callback and without it.

``SCENARIOS`` is the table of all. A row says what a training changes in the recipe: its module, its data, its
callbacks, the Trainer's arguments; or it names a function that trains in another way, as ``Run.fit`` helps it to.
"""

import contextlib
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import reference
import torch
import torchmetrics
from faults import Arm, Faults
from lightning.pytorch import callbacks as stock
from lightning.pytorch.utilities import CombinedLoader
from ranks import ddp
from recorder import Journal, Record, Rows, Watcher, checkpoints, end_of
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, WeightedRandomSampler

from lightning_ga import AutoAccumulate

FEATURES, BATCH, CUT, SIZE = 5, 8, 3, 20
FAILS_AT = 60  # operations of training steps and their backward passes


@dataclass(frozen=True)
class Mode:
    """One way to run a scenario."""

    name: str
    where: str = "loader"
    cut: bool = False
    fails: bool = False  # memory runs out once, in the second step or so


STOCK, DEFAULTS = Mode("stock"), Mode("defaults")
NEUTRAL = tuple(Mode(f"neutral-{where}", where) for where in ("loader", "step"))
CUT_MODES = tuple(Mode(f"cut-{where}", where, cut=True) for where in ("loader", "step"))
AFTER = tuple(Mode(f"oom-{where}", where, cut=True, fails=True) for where in ("loader", "step"))
ALL = NEUTRAL + CUT_MODES + AFTER
OF_BATCHES = (*NEUTRAL, CUT_MODES[1], AFTER[1])  # if it matters that a micro-batch of the loader is a batch


class Run:
    """What a scenario trains with: builds trainers as the mode asks for them and keeps records."""

    def __init__(self, row: "Row", mode: Mode, folder: Path) -> None:
        self.row, self.mode, self.folder = row, mode, folder
        self.journal, self.faults = Journal(), Faults(*([FAILS_AT] if mode.fails else []))
        self.ends: list[Record] = []
        self.notes: dict[str, Any] = {}
        self.loggers: list[Rows] = []
        self.survived = self.trainers = 0

    def trainer(self, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
        """A Trainer with a logger and without checkpoints, unless they are asked for."""
        number, self.trainers = self.trainers, self.trainers + 1
        ours = [self.ours()] if self.mode != STOCK and number in self.row.with_callback else []
        watching = [*ours, *callbacks, Watcher(self.journal), *([Arm(self.faults)] if self.mode.fails and ours else [])]
        if settings.get("barebones"):  # which takes no argument that turns off what it has not
            return pl.Trainer(max_epochs=2, callbacks=watching, accelerator="cpu", devices=1, **settings)
        self.loggers.append(Rows())
        saves = any(isinstance(each, stock.Checkpoint) for each in callbacks)
        own = {"logger": self.loggers[-1], "enable_checkpointing": saves, "log_every_n_steps": 1}
        own |= ddp() if self.row.ranks > 1 else {}
        return reference.quiet_trainer(*watching, **{**own, "default_root_dir": self.folder, **settings})

    def ours(self) -> AutoAccumulate:
        """The callback, as the mode sets it."""
        if self.mode == DEFAULTS:
            return AutoAccumulate(**self.row.ours)
        size = CUT if self.mode.cut else self.row.batch
        own = {"verify": False, "micro_batch_size": size, "micro_batching": self.mode.where}
        return AutoAccumulate(**{**own, **self.row.ours})

    def fit(
        self,
        module: pl.LightningModule | None = None,
        data: Any = None,
        *callbacks: pl.Callback,
        trainer: pl.Trainer | None = None,
        val: Any = None,
        ckpt_path: Any = None,
        call: str = "fit",
        **settings: Any,
    ) -> pl.Trainer:
        """Train, or do what ``call`` says, and keep what is left."""
        module = Net() if module is None else module
        trainer = self.trainer(*callbacks, **settings) if trainer is None else trainer
        module.journal = self.journal
        data = loader() if data is None else data
        evaluates = call == "fit" and not isinstance(data, pl.LightningDataModule)
        vals = [loader(Samples(6), 4) if val is None else val] if evaluates else []
        try:
            result = getattr(trainer, call)(module, data, *vals, ckpt_path=ckpt_path)
        except (ArithmeticError, KeyboardInterrupt, SystemExit) as ended:
            result = type(ended).__name__
        self.survived += sum(each.oom_events for each in trainer.callbacks if isinstance(each, AutoAccumulate))
        self.ends.append(end_of(trainer, module, result))
        return trainer


def fit_once(run: Run) -> None:
    """Train once, as the row says."""
    row, data = run.row, run.row.data()
    run.fit(row.module(), data, *filter(None, [row.callback(run.folder)]), val=row.val(), **row.trainer)
    run.notes["asked"] = getattr(data, "asked", [])


@dataclass(frozen=True)
class Row:
    """What a training changes in the recipe, and how it is compared."""

    module: Callable[[], Any] = lambda: Net()
    data: Callable[[], Any] = lambda: loader()
    val: Callable[[], Any] = lambda: None
    callback: Callable[[Path], pl.Callback | None] = lambda folder: None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    train: Callable[[Run], None] = fit_once
    modes: tuple[Mode, ...] = ALL
    batch: int = BATCH
    tolerance: float = 1e-9  # if batches are cut
    ours: Mapping[str, Any] = field(default_factory=dict)
    with_callback: tuple[int, ...] = (0, 1, 2, 3)  # trainers
    oracle: str = ""  # a scenario with the same outcome if the loader cuts
    stock: Mapping[str, Any] = field(default_factory=dict)  # fields that are others for stock Lightning
    ranks: int = 1
    merges: bool = False  # with nothing set, the loader makes one batch of those that the recipe accumulates
    by_windows: bool = False  # what hooks see of a batch differs on purpose, in every mode
    rounds: bool = False  # validation is due within a window: at its end, if the loader makes the windows


def record(row: Row, mode: Mode, folder: Path) -> Record:
    """Run a scenario in an empty folder, whose path is part of checkpoints, and keep what is left."""
    run = Run(replace(row, **row.stock) if mode == STOCK else row, mode, folder)
    pl.seed_everything(7, verbose=False)
    with warnings.catch_warnings(), run.faults if mode.fails else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        row.train(run)
    assert bool(run.survived) == (mode.fails and run.faults.count >= FAILS_AT)
    journal, rows = run.journal, [each for logger in run.loggers for each in logger.rows]
    kept = {name: getattr(journal, name) for name in ("calls", "rates", "validations", "ends_of_windows")}
    found = checkpoints(folder) if os.environ.get("RANK", "0") == "0" else {}
    return {**kept, "ends": run.ends, "rows": rows, "checkpoints": found, "notes": run.notes}


class Samples(reference.Samples):
    """Twenty samples, unless it is said how many; ``kind`` makes each into another type."""

    def __init__(self, size: int = SIZE, dtype: torch.dtype = torch.float64, kind: Any = None) -> None:
        super().__init__(size, dtype)
        self.kind = kind

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample if self.kind is None else self.kind(*sample)


class Augmented(Samples):
    """Every sample draws from all generators."""

    def __getitem__(self, index: int) -> Any:
        inputs, *rest = super().__getitem__(index)
        return (inputs * (torch.rand(()).item() + np.random.random() + random.random()), *rest)


class Ready(Dataset):
    """Ready batches: a dataset for ``batch_size=None``, or a loader that is no DataLoader."""

    def __init__(self) -> None:
        samples = Samples()
        parts = samples.inputs, samples.targets, torch.arange(len(samples))
        self.batches = list(zip(*(part.split(BATCH) for part in parts)))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Data(pl.LightningDataModule):
    """Loaders, and how often they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def setup(self, stage: str) -> None:
        self.asked.append(f"setup {stage}")

    def train_dataloader(self) -> Any:
        self.asked.append("train")
        return loader(Samples(SIZE + 4 * self.asked.count("train")))

    def val_dataloader(self) -> Any:
        self.asked.append("val")
        return loader(Samples(6), 4)


def loader(dataset: Any = None, batch_size: int | None = BATCH, **settings: Any) -> DataLoader:
    return DataLoader(Samples() if dataset is None else dataset, batch_size=batch_size, **settings)


def network(dtype: torch.dtype = torch.float64, *layers: torch.nn.Module) -> torch.nn.Sequential:
    """The same weights on every call; ``layers`` come after the first."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, last = torch.nn.Linear(FEATURES, 7), torch.nn.Linear(7, 1)
        return torch.nn.Sequential(first, *layers, torch.nn.Tanh(), last).to(dtype)


def unpack(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a batch."""
    return (batch["inputs"], batch["targets"]) if isinstance(batch, dict) else (batch[0], batch[1])


class Net(pl.LightningModule):
    """A regression that logs its loss and validates itself; ``step`` takes the module, a batch and its losses."""

    journal = Journal()

    def __init__(
        self, optimizer: Any = None, schedule: Any = None, *, net: Any = None, step: Any = None, **config: Any
    ):
        super().__init__()
        self.net = network() if net is None else net
        self.make = partial(SGD, lr=0.1) if optimizer is None else optimizer
        self.schedule, self.step, self.config = schedule, step, config

    def losses(self, batch: Any) -> torch.Tensor:
        """The loss of each sample."""
        inputs, targets = unpack(batch)
        return (self.net(inputs) - targets).square().flatten()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.journal.add(self.trainer, "training_step", batch, batch_idx)
        losses = self.losses(batch)
        if self.step is not None:
            return self.step(self, batch, losses)
        self.log("loss", losses.mean(), on_step=True, on_epoch=True, prog_bar=True)
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.journal.add(self.trainer, "validation_step", batch, batch_idx, dataloader_idx)
        self.log("val", self.losses(batch).mean())

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", self.losses(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.losses(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make([each for each in self.parameters() if each.requires_grad])
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), **self.config}}


class Paired(Net):
    """Trains on several loaders at a time."""

    def losses(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict) and "inputs" not in batch:
            each = [super(Paired, self).losses(part).mean() for part in batch.values() if part is not None]
            return torch.stack(each)
        return super().losses(batch)


step_lr = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
lambda_lr = partial(lr_scheduler.LambdaLR, lr_lambda=lambda count: 1 / (1 + count))
plateau = partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5)
adam_by_step = partial(Net, partial(Adam, lr=0.05), step_lr, interval="step")


class TwoSchedules(Net):
    """One by step, made with the length of training, and one by epoch."""

    def configure_optimizers(self) -> Any:
        optimizer, steps = self.make(self.parameters()), int(self.trainer.estimated_stepping_batches)
        by_step = {"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps), "interval": "step"}
        return [optimizer], [by_step, step_lr(optimizer)]


class OwnOptimization(Net):
    """Overrides what Lightning does between a loss and the next batch."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["momentum"] = 0.5 / (1 + self.trainer.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch + 1)


class Curious(Net):
    """Logs in hooks: the norm of gradients, and what is known at the end of epochs."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log("norm", torch.stack([each.grad.norm() for each in self.parameters()]).norm())

    def on_train_epoch_end(self) -> None:
        self.log("at_epoch_end", self.trainer.callback_metrics["loss_epoch"] * 2)

    def on_validation_epoch_end(self) -> None:
        self.log("at_validation_end", float(self.trainer.global_step))
        self.logger.log_metrics({"direct": 1.0}, step=self.trainer.global_step)


class OwnTransfer(Net):
    """Changes batches on their way, at random if its steps draw."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], *batch[1:]]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device([3 * batch[0], *batch[1:]], device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * (torch.rand(()) if self.step else 0.2), *batch[1:]]


class Measured(Net):
    """Logs torchmetrics."""

    def __init__(self, on_step: bool) -> None:
        super().__init__()
        self.on_step = on_step  # where batches are cut, the value of a metric by step is that of a part
        self.error, self.val_error = torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()
        self.largest = torchmetrics.MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses, (inputs, targets) = self.losses(batch), unpack(batch)
        self.error(self.net(inputs).detach(), targets)
        self.largest(losses.detach())
        self.log("error", self.error, on_step=self.on_step, on_epoch=True)
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        inputs, targets = unpack(batch)
        self.val_error.update(self.net(inputs), targets)
        self.log("val_error", self.val_error)


class Skipping(Net):
    """Leaves out the rest of one epoch, from the batch that begins with a sample."""

    def __init__(self, epoch: int, first: int) -> None:
        super().__init__()
        self.skipped = epoch, first

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, int(batch[2][0])) == self.skipped else None


def log_and_return(module: Any, batch: Any, losses: torch.Tensor) -> Any:
    module.log("largest", losses.max(), reduce_fx="max", on_epoch=True, on_step=False)
    module.log("smallest", losses.min(), reduce_fx=torch.min, on_epoch=True, on_step=False)
    module.log("total", losses.sum(), reduce_fx="sum", on_epoch=True, on_step=False)
    module.log_dict({"a": losses.mean(), "b": 2 * losses.mean()}, on_epoch=True, on_step=False, batch_size=len(losses))
    module.log_dict({"a_step": losses.mean(), "b_step": losses.mean() * 2}, prog_bar=True)
    return {"loss": losses.mean(), "each": losses.detach(), "extra": losses.detach().mean() * 2, "name": "a batch"}


def draw_numbers(module: Any, batch: Any, losses: torch.Tensor) -> Any:
    return losses.mean() * (1 + torch.rand(()) + random.random() + np.random.rand())


def skip_batches(module: Any, batch: Any, losses: torch.Tensor) -> Any:
    return None if 8 <= int(batch[2][0]) < 16 else losses.mean()


def stop(module: Any, batch: Any, losses: torch.Tensor) -> Any:
    if 8 in batch[2].tolist():
        module.trainer.should_stop = True
    return losses.mean()


def raise_in(error: type[BaseException], module: Any, batch: Any, losses: torch.Tensor) -> Any:
    if module.trainer.global_step == 2:
        raise error("of the user's")
    return losses.mean()


def log_outputs(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    value = outputs["extra"] + outputs["each"].mean()
    module.log("seen", value, on_epoch=True, on_step=False, batch_size=len(batch[0]))


class Thaw(stock.BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.05)


def saving(folder: Path, **settings: Any) -> stock.ModelCheckpoint:
    return stock.ModelCheckpoint(folder / "checkpoints", **settings)


def evaluated_before_and_after_the_fit(run: Run) -> None:
    module, trainer = Net(), run.trainer()
    for call in ("validate", "fit", "validate", "test", "predict"):
        run.fit(module, None if call == "fit" else loader(Samples(11), 4), trainer=trainer, call=call)


def fitted_again(run: Run, max_epochs: int | None = None) -> None:
    module = Net(partial(SGD, lr=0.1, momentum=0.9), step_lr)
    trainer = run.fit(module)
    trainer.fit_loop.max_epochs = max_epochs or trainer.fit_loop.max_epochs
    run.fit(module, trainer=trainer)


def evaluated_from_a_checkpoint(run: Run) -> None:
    trainer = run.fit(Net(), None, saving(run.folder, monitor="val", save_top_k=1, filename="best"))
    run.fit(Net(), loader(Samples(11), 4), trainer=trainer, call="test", ckpt_path="best")


def resumed(steps: int, factor: int, run: Run) -> None:
    """Resume from a checkpoint of the first epoch, which has six batches, or of its end."""
    when = {"every_n_train_steps": steps} if steps else {}
    first = stock.ModelCheckpoint(run.folder / "first", **when, save_top_k=-1, filename="{step}")
    run.fit(adam_by_step(), loader(Samples(48)), first, max_epochs=1, accumulate_grad_batches=factor)
    path = run.folder / "first" / f"step={steps or 6 // factor}.ckpt"
    run.fit(adam_by_step(), loader(Samples(48)), ckpt_path=path, max_epochs=3, accumulate_grad_batches=factor)


def each(field: str, **table: Any) -> dict[str, Row]:
    """Rows that differ in one field."""
    return {name: Row(**{field: value}) for name, value in table.items()}


def each_callback(**table: Callable[[Path], pl.Callback]) -> dict[str, Row]:
    """Rows with a callback of Lightning's."""
    return {name: Row(callback=make, trainer={"max_epochs": 4}) for name, make in table.items()}


def combined(mode: str) -> Callable[[], Any]:
    return lambda: CombinedLoader({"a": loader(Samples(16)), "b": loader(Samples(24))}, mode)


def in_half_precision(size: int, scale: float, interval: int, **settings: Any) -> Row:
    def train(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        data, val = loader(Samples(size, torch.float32)), loader(Samples(6, torch.float32), 4)
        run.fit(Net(net=network(torch.float32)), data, val=val, plugins=plugin, gradient_clip_val=0.5)

    return Row(train=train, **settings)


def drawing(data: Callable[[], Any], **ours: Any) -> Row:
    """Let data, dropout, steps and validation draw."""
    module = lambda: Paired(step=draw_numbers, net=network(torch.float64, torch.nn.Dropout(0.3)))  # noqa: E731
    return Row(module, data, lambda: loader(Augmented(6), 4), modes=NEUTRAL, batch=1000, ours=ours)


FP32 = {
    "module": lambda: Net(net=network(torch.float32)),
    "data": lambda: loader(Samples(dtype=torch.float32)),
    "val": lambda: loader(Samples(6, torch.float32), 4),
}
WINDOWS = {"data": lambda: loader(Samples(32))}
OVER_EPOCHS = {"check_val_every_n_epoch": None, "max_epochs": 3}
RAGGED = {"data": lambda: loader(Samples(36))}  # windows of 8 + 8, 8 + 8 and 4
PLACES = {"in_mid_epoch": (2, 1), "at_the_last_batch": (6, 1), "in_mid_epoch_with_accumulation": (1, 2)}

SCENARIOS: dict[str, Row] = {
    **each(
        "module",
        sgd=Net,
        adam_with_weight_decay=lambda: Net(partial(Adam, lr=0.05, weight_decay=0.1)),
        sgd_with_momentum=lambda: Net(partial(SGD, lr=0.1, momentum=0.9, nesterov=True)),
        lbfgs=lambda: Net(partial(torch.optim.LBFGS, lr=0.1, max_iter=3)),
        fp64_parameters_and_buffers=lambda: Net(net=network(torch.float64, torch.nn.LayerNorm(7))),
        schedule_by_step=lambda: Net(schedule=step_lr, interval="step"),
        schedule_by_epoch=lambda: Net(schedule=step_lr, interval="epoch"),
        schedule_by_function=lambda: Net(schedule=lambda_lr, interval="step", name="mine"),
        schedule_by_plateau=lambda: Net(schedule=plateau, monitor="val"),
        schedule_by_plateau_of_training=lambda: Net(schedule=plateau, monitor="loss_epoch"),
        two_schedules=TwoSchedules,
        logged_in_hooks=Curious,
        own_hooks_of_the_transfer=OwnTransfer,
        nothing_logged=lambda: Net(step=lambda module, batch, losses: losses.mean()),
        step_skips_batches=lambda: Net(step=skip_batches),
        error_in_the_step=lambda: Net(step=partial(raise_in, ArithmeticError)),
        interrupted=lambda: Net(step=partial(raise_in, KeyboardInterrupt)),
        rest_of_the_epoch_is_skipped=lambda: Skipping(0, 8),
    ),
    "metrics_by_step": Row(lambda: Measured(True), modes=NEUTRAL),
    "metrics_by_epoch": Row(lambda: Measured(False), trainer={"val_check_interval": 2}, tolerance=2e-05),
    "stopped_by_the_step": Row(lambda: Net(step=stop), modes=OF_BATCHES),  # the loop ends after the micro-batch
    "whole_epoch_is_skipped": Row(lambda: Skipping(1, 0), trainer={"max_epochs": 3}),
    "own_optimization": Row(
        lambda: OwnOptimization(schedule=lambda_lr, interval="step"), **WINDOWS, trainer={"accumulate_grad_batches": 2}
    ),
    "schedule_by_step_with_a_frequency_under_accumulation": Row(
        lambda: Net(schedule=step_lr, interval="step", frequency=2),
        lambda: loader(Samples(48)),
        trainer={"accumulate_grad_batches": 3},
    ),
    # Random numbers of the step, dropout and BatchNorm see the parts of a batch.
    "random_numbers_in_the_step": Row(lambda: Net(step=draw_numbers), modes=NEUTRAL),
    "random_numbers_in_the_transfer": Row(lambda: OwnTransfer(step=draw_numbers), modes=NEUTRAL),
    "dropout": Row(lambda: Net(net=network(torch.float64, torch.nn.Dropout(0.3))), modes=NEUTRAL),
    "batch_norm": Row(lambda: Net(net=network(torch.float64, torch.nn.BatchNorm1d(7))), modes=NEUTRAL),
    **each(
        "trainer",
        gradient_clipping_by_norm={"gradient_clip_val": 0.1},
        gradient_clipping_by_value={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        limit_by_count={"limit_train_batches": 2},
        limit_by_fraction={"limit_train_batches": 0.5},
        no_training_batches={"limit_train_batches": 0},
        no_validation={"limit_val_batches": 0},
        max_steps_in_mid_epoch={"max_steps": 4, "max_epochs": -1},
        no_steps={"max_steps": 0},
        min_epochs={"min_epochs": 2, "max_epochs": 3},
        validation_by_count={"val_check_interval": 2},
        validation_by_fraction={"val_check_interval": 0.34},
        validation_over_epochs={"val_check_interval": 4, **OVER_EPOCHS},
        validation_of_a_part={"limit_train_batches": 2, "val_check_interval": 1},
        sanity_check={"num_sanity_val_steps": 2},
        overfitting_by_count={"overfit_batches": 2},
        fast_dev_run={"fast_dev_run": True},
        log_every_two_steps={"log_every_n_steps": 2},
        barebones={"barebones": True},
        precision_64={"precision": "64-true"},
        no_inference_mode={"inference_mode": False},
    ),
    "gradient_clipping_of_windows": Row(**WINDOWS, trainer={"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "validation_within_windows": Row(  # whole windows, if the loader cuts
        **WINDOWS, trainer={"val_check_interval": 1, "accumulate_grad_batches": 2}, modes=OF_BATCHES
    ),
    "validation_of_windows_by_fraction": Row(
        **WINDOWS, trainer={"val_check_interval": 0.5, "accumulate_grad_batches": 2, "check_val_every_n_epoch": 2}
    ),
    "validation_of_windows_over_epochs": Row(
        **WINDOWS, trainer={"val_check_interval": 6, "accumulate_grad_batches": 2, **OVER_EPOCHS}
    ),
    # Stock Lightning divides a smaller last window by the factor, however few batches it has.
    "ragged_windows_as_stock": Row(
        **RAGGED, trainer={"accumulate_grad_batches": 2}, modes=NEUTRAL, ours={"normalize": None}
    ),
    "ragged_windows": Row(**RAGGED, trainer={"accumulate_grad_batches": 2}, oracle="ragged_windows_whole"),
    "ragged_windows_whole": Row(data=lambda: loader(Samples(36), 16), modes=()),
    "precision_32": Row(**FP32, tolerance=2e-05),
    "precision_bf16_mixed": Row(**FP32, trainer={"precision": "bf16-mixed"}, tolerance=0.02),
    "precision_bf16_true": Row(**FP32, trainer={"precision": "bf16-true", "max_epochs": 1}, tolerance=0.02),
    "precision_16_mixed": in_half_precision(40, 2.0**8, 2, tolerance=5e-3),
    # A gradient in fp16 overflows for the sum over a batch before that over a part of it.
    "precision_16_mixed_that_overflows": in_half_precision(80, 2.0**24, 100, modes=NEUTRAL),
    **each(
        "data",
        drop_last=lambda: loader(drop_last=True),
        less_than_a_batch=lambda: loader(Samples(6)),
        exactly_a_batch=lambda: loader(Samples(8)),
        one_sample_left_over=lambda: loader(Samples(17)),
        batch_is_a_dict=lambda: loader(Samples(kind=lambda x, y, i: {"inputs": x, "targets": y, "name": str(i)})),
        stream=lambda: loader(reference.StreamOf(Samples())),
        stream_with_a_length=lambda: loader(reference.SizedStreamOf(Samples())),
        stream_that_drops_the_last=lambda: loader(reference.StreamOf(Samples()), drop_last=True),
        ready_batches=lambda: loader(Ready(), batch_size=None),
        own_sampler=lambda: loader(sampler=range(SIZE - 1, -1, -1)),
        own_batch_sampler=lambda: loader(
            batch_size=1, batch_sampler=BatchSampler(SequentialSampler(range(SIZE)), BATCH, False)
        ),
        own_class_of_loader=Ready,
        a_worker=lambda: loader(num_workers=1, persistent_workers=True),
    ),
    "batches_of_one": Row(data=lambda: loader(Samples(4), 1), batch=1, modes=NEUTRAL),
    # In loader mode samplers that draw do so from seed and epoch, so that a resume finds its place.
    "shuffled_by_a_sampler_of_weights": Row(
        data=lambda: loader(sampler=WeightedRandomSampler(torch.arange(1.0, 21.0), SIZE)), modes=NEUTRAL[1:]
    ),
    "shuffled": Row(data=lambda: loader(shuffle=True), modes=OF_BATCHES[1:]),
    "combined_max_size_cycle": Row(Paired, combined("max_size_cycle")),
    "combined_min_size": Row(Paired, combined("min_size")),
    "combined_max_size": Row(Paired, combined("max_size"), modes=NEUTRAL),
    "a_dict_of_loaders": Row(Paired, lambda: {"a": loader(Samples(24)), "b": loader(Samples(24), 8)}),
    "overfitting_one_batch_of_shuffled_loaders": Row(
        Paired,
        lambda: {"a": loader(Samples(24), shuffle=True), "b": loader(Samples(24), 8, shuffle=True)},
        trainer={"overfit_batches": 1, "max_epochs": 3},
    ),
    "several_validation_loaders": Row(val=lambda: [loader(Samples(6), 4), loader(Samples(9), 5)]),
    "datamodule": Row(data=Data),
    "reloaded_every_epoch": Row(data=Data, trainer={"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}),
    "random_numbers_of_samples": drawing(lambda: loader(Augmented())),
    "random_numbers_verified": drawing(lambda: loader(Augmented()), verify=True),
    "random_numbers_without_retries": drawing(lambda: loader(Augmented()), on_oom="raise"),
    "random_numbers_of_a_stream": drawing(lambda: loader(reference.StreamOf(Augmented()))),
    "random_numbers_of_groups": drawing(
        lambda: loader(Augmented(), 1, batch_sampler=BatchSampler(SequentialSampler(range(SIZE)), 4, False))
    ),
    "random_numbers_of_two_loaders": drawing(
        lambda: CombinedLoader({name: loader(Augmented(16)) for name in "ab"}, "min_size")
    ),
    "random_numbers_of_unequal_loaders": drawing(
        lambda: {"a": loader(Augmented(16), 4), "b": loader(Augmented(48), 12)}
    ),
    "random_numbers_of_a_worker": drawing(lambda: loader(Augmented(), num_workers=1)),
    "random_numbers_of_workers_that_stay": drawing(lambda: loader(Augmented(), num_workers=2, persistent_workers=True)),
    **each_callback(
        checkpoint_every_two_steps=partial(saving, every_n_train_steps=2, save_top_k=-1),
        checkpoint_of_the_best=partial(saving, monitor="val", save_top_k=2, save_last=True),
        checkpoint_of_the_best_in_training=partial(saving, monitor="loss_epoch", filename="{epoch}-{step}"),
        checkpoint_of_the_last=partial(saving, save_last="link"),
        checkpoint_at_the_end_of_training_epochs=partial(saving, save_on_train_epoch_end=True, save_top_k=-1),
        early_stopping=lambda folder: stock.EarlyStopping("val", patience=0, min_delta=0.2),
        early_stopping_of_training=lambda folder: stock.EarlyStopping("loss_epoch", patience=0, min_delta=0.2),
        early_stopping_in_mid_epoch=lambda folder: stock.EarlyStopping("val", stopping_threshold=1e9),
        averaging_stochastically=lambda folder: stock.StochasticWeightAveraging(0.05, swa_epoch_start=2),
        averaging_exponentially=lambda folder: stock.EMAWeightAveraging(decay=0.8),
        requires_grad_toggled=lambda folder: stock.LambdaCallback(
            on_train_epoch_start=lambda trainer, module: module.net[0].requires_grad_(trainer.current_epoch % 2 == 0)
        ),
        averaging_by_step=lambda folder: stock.WeightAveraging(),
    ),
    "logged_and_returned": Row(
        lambda: Net(step=log_and_return), callback=lambda folder: stock.LambdaCallback(on_train_batch_end=log_outputs)
    ),
    "frozen_at_first": Row(
        lambda: Net(partial(SGD, lr=0.1, momentum=0.5)), callback=lambda folder: Thaw(), trainer={"max_epochs": 3}
    ),
    "learning_rates_monitored": Row(
        lambda: Net(partial(SGD, lr=0.1, momentum=0.9), step_lr, interval="step"),
        callback=lambda folder: stock.LearningRateMonitor(log_momentum=True, log_weight_decay=True),
        modes=OF_BATCHES[:3],  # it writes a row for each pass of a window
    ),
    "evaluated_before_and_after_the_fit": Row(train=evaluated_before_and_after_the_fit),
    "fitted_twice": Row(train=fitted_again),
    "fitted_for_more_epochs": Row(train=partial(fitted_again, max_epochs=4)),
    "evaluated_from_a_checkpoint": Row(train=evaluated_from_a_checkpoint),
    # Stock Lightning reads the data from the start again, so a training that was not interrupted is the oracle.
    **{
        f"resumed_{place}_of_{who}_by_us": Row(
            train=partial(resumed, *when),
            with_callback=by,
            oracle=f"not_interrupted_for_{place}",
            trainer={"accumulate_grad_batches": when[1]},
        )
        for place, when in PLACES.items()
        for who, by in (("stock", (1,)), ("us", (0, 1)))
    },
    **{
        f"not_interrupted_for_{place}": Row(
            adam_by_step,
            lambda: loader(Samples(48)),
            trainer={"max_epochs": 3, "accumulate_grad_batches": factor},
            modes=(),
        )
        for place, (_, factor) in PLACES.items()
    },
    **{
        f"resumed_after_an_epoch_of_{name}": Row(train=partial(resumed, 0, 1), with_callback=by)
        for name, by in {"stock_by_us": (1,), "us_by_us": (0, 1), "us_by_stock": (0,)}.items()
    },
}

WITH_DEFAULTS = (
    *("sgd", "random_numbers_in_the_step", "less_than_a_batch", "own_hooks_of_the_transfer", "stream", "batch_norm"),
    *("averaging_stochastically", "a_dict_of_loaders", "random_numbers_of_unequal_loaders", "checkpoint_of_the_best"),
    *("step_skips_batches", "frozen_at_first", "random_numbers_of_workers_that_stay", "random_numbers_of_a_stream"),
    *("ready_batches", "resumed_after_an_epoch_of_us_by_us", "fitted_twice", "random_numbers_in_the_transfer"),
)
"""Scenarios that are also run with nothing set, so with probe and measurement, which take their time."""


WRONG = {
    "no_training_step": Row(pl.LightningModule),
    "interval_above_the_epoch": Row(trainer={"val_check_interval": 9}),
    "monitor_of_nothing": Row(callback=lambda folder: stock.EarlyStopping("nothing")),
    "sequential_loaders": Row(data=lambda: CombinedLoader([loader(), loader()], "sequential")),
    "clipping_of_two_kinds": Row(trainer={"gradient_clip_algorithm": "other"}),
}
"""Trainings that stock Lightning refuses."""
