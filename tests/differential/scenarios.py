"""Trainings that users write, each to be run with the callback and without it.

A scenario is a function that is given a ``Run`` and trains with it; ``SCENARIOS`` is the table of all. To add one,
write a function with ``@scenario()`` before it. ``Run.fit`` takes whatever the Trainer takes.
"""

import contextlib
import random
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from recorder import Journal, Record, Rows, Told, Watcher, end_of, watched
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler
from torch.utils.data import WeightedRandomSampler as Weighted

from lightning_ga import AutoAccumulate

FEATURES, BATCH, CUT, SIZE = 5, 8, 3, 20


@dataclass(frozen=True)
class Mode:
    """One way to run a scenario."""

    name: str
    cut: bool = False
    micro_batching: str | None = None
    settings: tuple[tuple[str, Any], ...] = (("verify", False),)
    fails: bool = False  # memory runs out once, in the second step or so


STOCK = Mode("stock")
DEFAULTS = Mode("defaults", micro_batching="loader", settings=())
NEUTRAL_LOADER, NEUTRAL_STEP = (Mode(f"neutral-{where}", micro_batching=where) for where in ("loader", "step"))
CUT_LOADER, CUT_STEP = (Mode(f"cut-{where}", cut=True, micro_batching=where) for where in ("loader", "step"))
CUT_MODES = CUT_LOADER, CUT_STEP
AFTER = {mode: Mode(f"oom-{mode.micro_batching}", True, mode.micro_batching, fails=True) for mode in CUT_MODES}
FAILS_AT = 60  # operations of training steps and their backward passes
NEUTRAL = NEUTRAL_LOADER, NEUTRAL_STEP
ALL = NEUTRAL + CUT_MODES


@dataclass(frozen=True)
class Scenario:
    """One training."""

    name: str
    train: Callable[["Run"], None]
    modes: tuple[Mode, ...] = ALL
    batch: int = BATCH
    cut: int = CUT
    tolerance: float = 1e-9
    ours: Mapping[str, Any] | None = None
    with_callback: tuple[int, ...] | None = None
    oracle: str | None = None


SCENARIOS: dict[str, Scenario] = {}


def scenario(**settings: Any) -> Callable[[Callable[["Run"], None]], Callable[["Run"], None]]:
    """Put a function into the table."""

    def register(train: Callable[[Run], None]) -> Callable[[Run], None]:
        add(train.__name__, train, **settings)
        return train

    return register


def add(name: str, train: Callable[["Run"], None], **settings: Any) -> None:
    """Put a training into the table under a name."""
    assert name not in SCENARIOS, f"two scenarios are called {name}"
    SCENARIOS[name] = Scenario(name, train, **settings)


class Run:
    """What a scenario trains with: builds trainers as the mode asks for them and keeps records."""

    def __init__(self, scenario: Scenario, mode: Mode, folder: Path) -> None:
        self.scenario, self.mode, self.folder = scenario, mode, folder
        # Where samples are looked at before training, hooks are called, and what they change of the module is put back.
        verifies = dict(mode.settings, **(scenario.ours or {})).get("verify", True)
        self.journal = Journal(on_module=verifies or "hooks_of_the_transfer" in scenario.name)
        self.ends: list[Record] = []
        self.notes: dict[str, Any] = {}
        self.loggers: list[Rows] = []
        self.trainers = 0
        self.faults = Faults(*([FAILS_AT] if mode.fails else []))

    def trainer(self, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
        """A Trainer with a logger and without checkpoints, unless they are asked for."""
        number, self.trainers = self.trainers, self.trainers + 1
        ours = [] if self.mode is STOCK else [self.ours()]
        if self.scenario.with_callback is not None and number not in self.scenario.with_callback:
            ours = []
        watching = [*ours, *callbacks, Watcher(self.journal), *([Arm(self.faults)] if self.mode.fails and ours else [])]
        if settings.get("barebones"):  # which takes no argument that turns off what it has not
            where = {"accelerator": "cpu", "devices": 1, "default_root_dir": self.folder}
            return pl.Trainer(max_epochs=2, callbacks=watching, **where, **settings)
        self.loggers.append(Rows(self.folder / f"logs{number}"))
        saves = any(isinstance(each, stock.Checkpoint) for each in callbacks)
        ours_by_default = {"logger": self.loggers[-1], "enable_checkpointing": saves, "log_every_n_steps": 1}
        return reference.quiet_trainer(*watching, **{**ours_by_default, "default_root_dir": self.folder, **settings})

    def ours(self) -> AutoAccumulate:
        """The callback, as the mode sets it."""
        settings = dict(self.mode.settings)
        if self.mode is not DEFAULTS:
            size = self.scenario.cut if self.mode.cut else self.scenario.batch
            settings.update(micro_batch_size=size, micro_batching=self.mode.micro_batching)
        return AutoAccumulate(**{**settings, **(self.scenario.ours or {})})

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
        if isinstance(module, Told):
            module.journal = self.journal
        if isinstance(data, pl.LightningDataModule):
            result = getattr(trainer, call)(module, datamodule=data, ckpt_path=ckpt_path)
        elif call == "fit":
            val = DataLoader(Samples(6), batch_size=4) if val is None else val
            data = loader() if data is None else data
            result = trainer.fit(module, data, val, ckpt_path=ckpt_path)
        else:
            result = getattr(trainer, call)(module, loader() if data is None else data, ckpt_path=ckpt_path)
        self.ends.append(end_of(trainer, module, result))
        return trainer


def record(scenario: Scenario, mode: Mode, folder: Path) -> Record:
    """Run a scenario and keep all that is left of it."""
    run = Run(scenario, mode, folder)
    with watched(run.journal, folder, run.ends, run.notes) as records:
        pl.seed_everything(7, verbose=False)
        try:
            with run.faults if mode.fails else contextlib.nullcontext():
                scenario.train(run)
        finally:
            run.notes["rows"] = [row for logger in run.loggers for row in logger.rows]
    survived = any("Memory ran out in training" in text for _, text in records[0]["warnings"])
    assert survived == (mode.fails and run.faults.count >= FAILS_AT)
    return records[0]


# --- what scenarios are made of --------------------------------------------------------------------


class Samples(reference.Samples):
    """Twenty samples, unless it is said how many."""

    def __init__(self, size: int = SIZE, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(size, dtype)


class As(Samples):
    """The same, each sample made into another type."""

    def __init__(self, kind: Callable[[torch.Tensor, torch.Tensor, int], Any]) -> None:
        super().__init__()
        self.kind = kind

    def __getitem__(self, index: int) -> Any:
        return self.kind(*super().__getitem__(index))


class Ready(Dataset):
    """Ready batches, as ``batch_size=None`` reads them."""

    def __init__(self) -> None:
        samples = Samples()
        parts = samples.inputs, samples.targets, torch.arange(len(samples))
        self.batches = list(zip(*(part.split(BATCH) for part in parts)))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def loader(dataset: Any = None, batch_size: int | None = BATCH, **settings: Any) -> DataLoader:
    """The samples in order."""
    return DataLoader(Samples() if dataset is None else dataset, batch_size=batch_size, **settings)


def network(dtype: torch.dtype = torch.float64, *layers: torch.nn.Module) -> torch.nn.Sequential:
    """The same weights on every call; ``layers`` come after the first."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, last = torch.nn.Linear(FEATURES, 7), torch.nn.Linear(7, 1)
        return torch.nn.Sequential(first, *layers, torch.nn.Tanh(), last).to(dtype)


def unpack(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a batch of any type that is used here."""
    if isinstance(batch, dict):
        return batch["inputs"], batch["targets"]
    if hasattr(batch, "inputs"):
        return batch.inputs, batch.targets
    return batch[0], batch[1]


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1)


class Net(Told):
    """A regression that logs its loss by step and by epoch and validates itself."""

    def __init__(
        self,
        optimizer: Callable[..., Optimizer] = sgd,
        schedule: Callable[[Optimizer], Any] | None = None,
        net: torch.nn.Module | None = None,
        **config: Any,
    ) -> None:
        super().__init__()
        self.net = network() if net is None else net
        self.make, self.schedule, self.config = optimizer, schedule, config

    def losses(self, batch: Any) -> torch.Tensor:
        """The loss of each sample."""
        inputs, targets = unpack(batch)
        return (self.net(inputs) - targets).square().flatten()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tell("training_step", batch, batch_idx)
        loss = self.losses(batch).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.tell("validation_step", batch, batch_idx, dataloader_idx)
        self.log("val", self.losses(batch).mean())

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", self.losses(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.losses(batch)

    def configure_optimizers(self) -> Any:
        self.tell("configure_optimizers")
        optimizer = self.make(self.parameters())
        if self.schedule is None:
            return optimizer
        schedule = self.schedule(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **self.config}}


class Stepping(Net):
    """A net whose training step is a function."""

    def __init__(self, step: Callable[..., Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tell("training_step", batch, batch_idx)
        return self.step(self, batch, batch_idx)


def add_fits(modules: Mapping[str, Callable[[], Any]], **table: Mapping[str, Any]) -> None:
    """Add scenarios that differ in the module, or in arguments of the Trainer."""
    for name, module in modules.items():
        add(name, lambda run, module=module: run.fit(module()))
    for name, settings in table.items():
        add(name, lambda run, settings=settings: run.fit(**settings))


# --- optimizers, gradients and schedules -----------------------------------------------------------


def step_lr(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def lambda_lr(optimizer: Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))


def plateau(optimizer: Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


add_fits(
    {
        "sgd": Net,
        "adam_with_weight_decay": lambda: Net(partial(Adam, lr=0.05, weight_decay=0.1)),
        "sgd_with_momentum": lambda: Net(partial(SGD, lr=0.1, momentum=0.9, nesterov=True)),
        "fp64_parameters_and_buffers": lambda: Net(net=network(torch.float64, torch.nn.LayerNorm(7))),
        "schedule_by_step": lambda: Net(schedule=step_lr, interval="step"),
        "schedule_by_epoch": lambda: Net(schedule=step_lr, interval="epoch"),
        "schedule_by_function": lambda: Net(schedule=lambda_lr, interval="step", name="mine"),
        "schedule_by_plateau": lambda: Net(schedule=plateau, monitor="val"),
        "schedule_by_plateau_of_training": lambda: Net(schedule=plateau, monitor="loss_epoch"),
    },
    gradient_clipping_by_norm={"gradient_clip_val": 0.1},
    gradient_clipping_by_value={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    gradient_clipping_of_windows={"data": loader(Samples(32)), "gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    limit_by_count={"limit_train_batches": 2},
    limit_by_fraction={"limit_train_batches": 0.5},
    no_training_batches={"limit_train_batches": 0},
    no_validation={"limit_val_batches": 0},
    max_steps_in_mid_epoch={"max_steps": 4, "max_epochs": -1},
    no_steps={"max_steps": 0},
    min_epochs={"min_epochs": 2, "max_epochs": 3},
    validation_by_count={"val_check_interval": 2},
    validation_by_fraction={"val_check_interval": 0.34},
    validation_over_epochs={"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 3},
    validation_within_windows={"data": loader(Samples(32)), "val_check_interval": 1, "accumulate_grad_batches": 2},
    validation_of_windows_by_fraction={
        **{"data": loader(Samples(48)), "val_check_interval": 0.5, "accumulate_grad_batches": 2},
        "check_val_every_n_epoch": 2,
    },
    validation_of_windows_over_epochs={
        **{"data": loader(Samples(32)), "val_check_interval": 6, "accumulate_grad_batches": 2},
        **{"check_val_every_n_epoch": None, "max_epochs": 3},
    },
    validation_of_a_part={"limit_train_batches": 2, "val_check_interval": 1},
    sanity_check={"num_sanity_val_steps": 2},
    overfitting_by_count={"overfit_batches": 2},
    fast_dev_run={"fast_dev_run": True},
    log_every_two_steps={"log_every_n_steps": 2},
    barebones={"barebones": True},
    precision_64={"precision": "64-true"},
    no_inference_mode={"inference_mode": False},
)


@scenario()
def schedule_by_step_with_a_frequency_under_accumulation(run: Run) -> None:
    net = Net(schedule=step_lr, interval="step", frequency=2)
    run.fit(net, loader(Samples(48)), accumulate_grad_batches=3)


@scenario()
def schedule_of_one_cycle(run: Run) -> None:
    def one_cycle(optimizer: Optimizer) -> Any:
        run.notes["estimate"] = module.trainer.estimated_stepping_batches
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(run.notes["estimate"]))

    module = Net(schedule=one_cycle, interval="step")
    run.fit(module)


@scenario()
def schedule_stepped_by_hand(run: Run) -> None:
    class Mine(Net):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.tell("lr_scheduler_step", type(scheduler).__name__, metric)
            scheduler.step(epoch=self.current_epoch + 1)

    run.fit(Mine(schedule=lambda_lr, interval="step"))


@scenario()
def two_schedules(run: Run) -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            optimizer = self.make(self.parameters())
            return [optimizer], [{"scheduler": step_lr(optimizer), "interval": "step"}, lambda_lr(optimizer)]

    run.fit(Two())


def _ragged(factor: int, run: Run) -> None:
    run.fit(data=loader(Samples(36)), accumulate_grad_batches=factor)


for _factor in (2, 3):  # windows of 8 + 8, 8 + 8, 4 and of 8 + 8 + 8, 8 + 4
    add(f"ragged_accumulation_of_{_factor}", partial(_ragged, _factor), modes=NEUTRAL)
    add(
        f"ragged_accumulation_of_{_factor}_as_stock", partial(_ragged, _factor), modes=NEUTRAL, ours={"normalize": None}
    )


add(
    "ragged_windows_cut",
    lambda run: run.fit(data=loader(Samples(36)), accumulate_grad_batches=2),
    modes=CUT_MODES,
    oracle="ragged_windows_whole",
)
add("ragged_windows_whole", lambda run: run.fit(data=loader(Samples(36), 16)), modes=(), batch=16)


@scenario()
def own_gradient_clipping(run: Run) -> None:
    class Mine(Net):
        def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self.tell("configure_gradient_clipping", optimizer, *args, *kwargs.values())
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    run.fit(Mine())


@scenario()
def own_optimizer_step(run: Run) -> None:
    class Mine(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            self.tell("optimizer_step", epoch)
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + self.trainer.global_step)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    run.fit(Mine())


@scenario()
def own_backward_and_zero_grad(run: Run) -> None:
    class Mine(Net):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(*args, **kwargs)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
            self.tell("optimizer_zero_grad", epoch)
            optimizer.zero_grad(set_to_none=False)

    run.fit(Mine(), loader(Samples(32)), accumulate_grad_batches=2)


@scenario()
def gradients_read_by_hooks(run: Run) -> None:
    class Curious(Net):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self.log("norm", torch.stack([each.grad.norm() for each in self.parameters()]).norm())

    run.fit(Curious())


add("lbfgs", lambda run: run.fit(Net(partial(torch.optim.LBFGS, lr=0.1, max_iter=3))))


# --- data ------------------------------------------------------------------------------------------


def add_data(**table: Callable[[], Any]) -> None:
    """Add scenarios that differ in the training data."""
    for name, make in table.items():
        add(name, lambda run, make=make: run.fit(data=make()))


Pair = namedtuple("Pair", "inputs targets")


@dataclass
class Item:
    """A batch that is a dataclass."""

    inputs: torch.Tensor
    targets: torch.Tensor


def collate_items(samples: list[Any]) -> Item:
    return Item(*(torch.stack(part) for part in list(zip(*samples))[:2]))


class Backwards(torch.utils.data.Sampler):
    """An order of the user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE - 1, -1, -1))

    def __len__(self) -> int:
        return SIZE


class Lists:
    """A loader that is no DataLoader."""

    def __len__(self) -> int:
        return len(Ready())

    def __iter__(self) -> Iterator[Any]:
        return iter(Ready().batches)


add_data(
    drop_last=lambda: loader(drop_last=True),
    less_than_a_batch=lambda: loader(Samples(6)),
    exactly_a_batch=lambda: loader(Samples(8)),
    one_sample_left_over=lambda: loader(Samples(17)),
    batch_is_a_dict=lambda: loader(As(lambda x, y, i: {"inputs": x, "targets": y, "name": str(i)})),
    batch_is_a_pair=lambda: loader(As(lambda x, y, i: (x, y))),
    batch_is_a_named_tuple=lambda: loader(As(lambda x, y, i: Pair(x, y))),
    batch_is_a_dataclass=lambda: loader(collate_fn=collate_items),
    stream=lambda: loader(reference.StreamOf(Samples())),
    stream_with_a_length=lambda: loader(reference.SizedStreamOf(Samples())),
    stream_that_drops_the_last=lambda: loader(reference.StreamOf(Samples()), drop_last=True),
    ready_batches=lambda: loader(Ready(), batch_size=None),
    own_sampler=lambda: loader(sampler=Backwards()),
    own_batch_sampler=lambda: loader(
        batch_size=1, batch_sampler=BatchSampler(SequentialSampler(range(SIZE)), BATCH, False)
    ),
    own_class_of_loader=Lists,
)


add("batches_of_one", lambda run: run.fit(data=loader(Samples(4), 1)), batch=1, modes=NEUTRAL)


@scenario(modes=NEUTRAL)
def shuffled_by_a_sampler_of_weights(run: Run) -> None:
    generator = torch.Generator().manual_seed(3)
    run.fit(data=loader(sampler=Weighted(torch.arange(1.0, 21.0), SIZE, generator=generator)))


add("a_worker", lambda run: run.fit(data=loader(num_workers=1, persistent_workers=True)))


class Paired(Net):
    """Trains on several loaders at a time."""

    def losses(self, batch: Any) -> torch.Tensor:
        parts = batch.values() if isinstance(batch, dict) and "inputs" not in batch else batch
        if isinstance(batch, dict) or isinstance(batch[0], (list, tuple)):
            parts = [part for part in parts if part is not None]
            return sum(super(Paired, self).losses(part).mean() for part in parts).reshape(1)
        return super().losses(batch)


for _kind in ("max_size_cycle", "min_size", "max_size"):
    _make = partial(CombinedLoader, mode=_kind)
    _modes = ALL if _kind != "max_size" else NEUTRAL
    add(
        f"combined_{_kind}",
        lambda run, make=_make: run.fit(Paired(), make({"a": loader(Samples(16)), "b": loader(Samples(24))})),
        modes=_modes,
    )


add("a_dict_of_loaders", lambda run: run.fit(Paired(), {"a": loader(Samples(24)), "b": loader(Samples(24), 8)}))


@scenario()
def overfitting_one_batch_of_shuffled_loaders(run: Run) -> None:
    loaders = {"a": loader(Samples(24), shuffle=True), "b": loader(Samples(24), 8, shuffle=True)}
    run.fit(Paired(), loaders, overfit_batches=1, max_epochs=3)


add("several_validation_loaders", lambda run: run.fit(val=[loader(Samples(6), 4), loader(Samples(9), 5)]))


class Data(pl.LightningDataModule):
    """All stages' loaders, and how often they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.batch_size = BATCH  # which BatchSizeFinder asks for

    def prepare_data(self) -> None:
        self.asked.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.asked.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.asked.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.asked.append("train")
        return loader(Samples(SIZE + 4 * self.asked.count("train")))

    def val_dataloader(self) -> Any:
        self.asked.append("val")
        return loader(Samples(6), 4)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": list(self.asked)}


@scenario()
def datamodule(run: Run) -> None:
    data = Data()
    run.fit(data=data)
    run.notes["asked"] = data.asked


@scenario()
def reloaded_every_epoch(run: Run) -> None:
    data = Data()
    run.fit(data=data, reload_dataloaders_every_n_epochs=1, max_epochs=3)
    run.notes["asked"] = data.asked


@scenario()
def own_hooks_of_the_transfer(run: Run) -> None:
    class Mine(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.tell("on_before_batch_transfer", len(batch[0]), dataloader_idx)
            return [2 * batch[0], *batch[1:]]

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            self.tell("transfer_batch_to_device", batch, str(device), dataloader_idx)
            return super().transfer_batch_to_device([3 * batch[0], *batch[1:]], device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.tell("on_after_batch_transfer", batch, dataloader_idx)
            return [0.2 * batch[0], *batch[1:]]

    run.fit(Mine())


# --- callbacks -------------------------------------------------------------------------------------


def add_callbacks(**table: Callable[[Run], Any]) -> None:
    """Add scenarios that differ in the callbacks."""
    for name, make in table.items():
        add(name, lambda run, make=make: run.fit(None, None, make(run), max_epochs=4))


def checkpoint(run: Run, **settings: Any) -> stock.ModelCheckpoint:
    return stock.ModelCheckpoint(run.folder / "checkpoints", **settings)


add_callbacks(
    checkpoint_every_two_steps=lambda run: checkpoint(run, every_n_train_steps=2, save_top_k=-1),
    checkpoint_of_the_best=lambda run: checkpoint(run, monitor="val", save_top_k=2, save_last=True),
    checkpoint_of_the_best_in_training=lambda run: checkpoint(run, monitor="loss_epoch", filename="{epoch}-{step}"),
    checkpoint_of_the_last=lambda run: checkpoint(run, save_last="link"),
    checkpoint_at_the_end_of_training_epochs=lambda run: checkpoint(run, save_on_train_epoch_end=True, save_top_k=-1),
    early_stopping=lambda run: stock.EarlyStopping("val", patience=0, min_delta=0.2),
    early_stopping_of_training=lambda run: stock.EarlyStopping("loss_epoch", patience=0, min_delta=0.2),
    early_stopping_in_mid_epoch=lambda run: stock.EarlyStopping("val", stopping_threshold=1e9),
    averaging_stochastically=lambda run: stock.StochasticWeightAveraging(0.05, swa_epoch_start=2),
    averaging_exponentially=lambda run: stock.EMAWeightAveraging(decay=0.8),
    averaging_by_step=lambda run: stock.WeightAveraging(),
    lambda_callback=lambda run: stock.LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: module.log("seen", 1.0)
    ),
)


@scenario()
def learning_rates_monitored(run: Run) -> None:
    module = Net(partial(SGD, lr=0.1, momentum=0.9), schedule=step_lr, interval="step")
    run.fit(module, None, stock.LearningRateMonitor(log_momentum=True, log_weight_decay=True))


@scenario()
def frozen_at_first(run: Run) -> None:
    class Thaw(stock.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.05)

    class Part(Net):
        def configure_optimizers(self) -> Any:
            return SGD([each for each in self.parameters() if each.requires_grad], lr=0.1, momentum=0.5)

    run.fit(Part(), None, Thaw(), max_epochs=3)


@scenario()
def requires_grad_toggled(run: Run) -> None:
    class Toggling(Net):
        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch % 2 == 0)

    run.fit(Toggling(), max_epochs=3)


@scenario()
def outputs_read_by_callbacks(run: Run) -> None:
    class First(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            module.log("first", outputs["extra"], on_epoch=True, on_step=False, batch_size=len(batch[0]))

    class Second(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.notes.setdefault("losses", []).extend(outputs["each"].tolist())

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        losses = module.losses(batch)
        return {"loss": losses.mean(), "each": losses.detach(), "extra": losses.detach().mean() * 2}

    run.fit(Stepping(step), None, First(), Second())


@scenario()
def simple_profiler(run: Run) -> None:
    profiler = SimpleProfiler(dirpath=run.folder)
    run.fit(profiler=profiler)
    calls = {name: len(times) for name, times in profiler.recorded_durations.items()}
    run.notes["calls"] = {name: count for name, count in sorted(calls.items()) if "AutoAccumulate" not in name}


# --- what steps log and return ---------------------------------------------------------------------


def _log_reduced(module: Any, batch: Any, batch_idx: int) -> Any:
    losses = module.losses(batch)
    module.log("largest", losses.max(), reduce_fx="max", on_epoch=True, on_step=False)
    module.log("smallest", losses.min(), reduce_fx=torch.min, on_epoch=True, on_step=False)
    module.log("total", losses.sum(), reduce_fx="sum", on_epoch=True, on_step=False)
    module.log("mean", losses.mean(), on_epoch=True, on_step=False, batch_size=len(losses))
    return losses.mean()


def _log_by_step(module: Any, batch: Any, batch_idx: int) -> Any:
    losses = module.losses(batch)
    module.log_dict({"a_step": losses.mean(), "b_step": losses.mean() * 2}, prog_bar=True)
    module.log_dict({"a": losses.mean(), "b": losses.mean() * 2}, on_epoch=True, on_step=False)
    return losses.mean()


def _return_dict(module: Any, batch: Any, batch_idx: int) -> Any:
    losses = module.losses(batch)
    return {"loss": losses.mean(), "each": losses.detach(), "name": "a batch"}


def _random(module: Any, batch: Any, batch_idx: int) -> Any:
    return module.losses(batch).mean() * (1 + torch.rand(()) + random.random() + np.random.rand())


def _nothing_logged(module: Any, batch: Any, batch_idx: int) -> Any:
    return module.losses(batch).mean()


add_fits(
    {
        "log_with_other_reductions": lambda: Stepping(_log_reduced),
        "log_dict": lambda: Stepping(_log_by_step),
        "step_returns_a_dict": lambda: Stepping(_return_dict),
        "nothing_logged": lambda: Stepping(_nothing_logged),
    }
)
add("random_numbers_in_the_step", lambda run: run.fit(Stepping(_random)), modes=NEUTRAL)


class Augmented(Samples):
    """Every sample draws from all generators."""

    def __getitem__(self, index: int) -> Any:
        inputs, *rest = super().__getitem__(index)
        return (inputs * (torch.rand(()).item() + np.random.random() + random.random()), *rest)


class SteppingPaired(Stepping, Paired):
    """Draws in its steps, on several loaders at a time."""


def _augmented(make: Callable[..., Any], run: Run) -> None:
    """Let data, dropout, steps and validation draw."""
    run.fit(
        SteppingPaired(_random, net=network(torch.float64, torch.nn.Dropout(0.3))), make(), val=loader(Augmented(6), 4)
    )


_GROUPS = BatchSampler(SequentialSampler(range(SIZE)), 4, False)
_AUGMENTED: dict[str, Callable[..., Any]] = {
    "samples": lambda: loader(Augmented()),
    "a_stream": lambda: loader(reference.StreamOf(Augmented())),
    "groups": lambda: loader(Augmented(), batch_size=1, batch_sampler=_GROUPS),
    "two_loaders": lambda: CombinedLoader({name: loader(Augmented(16)) for name in "ab"}, "min_size"),
    "unequal_loaders": lambda: {"a": loader(Augmented(16), 4), "b": loader(Augmented(48), 12)},
    "a_worker": lambda: loader(Augmented(), num_workers=1),
    "workers_that_stay": lambda: loader(Augmented(), num_workers=2, persistent_workers=True),
}
for _name, _make in _AUGMENTED.items():
    add(f"random_numbers_of_{_name}", partial(_augmented, _make), modes=NEUTRAL, batch=1000)
for _name, _ours in {"as_large": {}, "verified": {"verify": True}, "without_retries": {"on_oom": "raise"}}.items():
    add(f"random_numbers_{_name}", partial(_augmented, _AUGMENTED["samples"]), modes=NEUTRAL, ours=_ours)
add("dropout", lambda run: run.fit(Net(net=network(torch.float64, torch.nn.Dropout(0.3)))), modes=NEUTRAL)
add("batch_norm", lambda run: run.fit(Net(net=network(torch.float64, torch.nn.BatchNorm1d(7)))), modes=NEUTRAL)


@scenario()
def step_skips_batches(run: Run) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        return None if 8 <= int(batch[2][0]) < 16 else module.losses(batch).mean()

    run.fit(Stepping(step))


class Measured(Net):
    """Logs torchmetrics."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.error, self.val_error = torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()
        self.mean, self.largest = torchmetrics.MeanMetric(), torchmetrics.MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses(batch)
        inputs, targets = unpack(batch)
        self.error(self.net(inputs).detach(), targets)
        self.mean.update(losses.detach())
        self.largest(losses.detach())
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        inputs, targets = unpack(batch)
        self.val_error.update(self.net(inputs), targets)
        self.log("val_error", self.val_error)


add("metrics_as_objects", lambda run: run.fit(Measured(), val_check_interval=2), tolerance=2e-05)


@scenario()
def logged_in_every_hook(run: Run) -> None:
    class Logging(Net):
        def on_train_start(self) -> None:
            self.log("at_start", 1.0)

        def on_train_epoch_start(self) -> None:
            self.log("at_epoch_start", float(self.current_epoch))

        def on_train_epoch_end(self) -> None:
            self.log("at_epoch_end", self.trainer.callback_metrics["loss_epoch"] * 2)

        def on_validation_epoch_end(self) -> None:
            self.log("at_validation_end", float(self.trainer.global_step))
            self.logger.log_metrics({"direct": 1.0}, step=self.trainer.global_step)

    run.fit(Logging())


# --- stopping --------------------------------------------------------------------------------------


class Skipping(Net):
    """Leaves out the rest of one epoch, from the batch that begins with a sample."""

    def __init__(self, epoch: int, first: int) -> None:
        super().__init__()
        self.skipped = epoch, first

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, int(batch[2][0])) == self.skipped else None


add("rest_of_the_epoch_is_skipped", lambda run: run.fit(Skipping(0, 8)))
add("whole_epoch_is_skipped", lambda run: run.fit(Skipping(1, 0), max_epochs=3))


@scenario()
def stopped_by_the_step(run: Run) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        if 8 in batch[2].tolist():
            module.trainer.should_stop = True
        return module.losses(batch).mean()

    run.fit(Stepping(step))


def _ended_by(error: type[BaseException], run: Run) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        if module.trainer.global_step == 2:
            raise error("of the user's")
        return module.losses(batch).mean()

    trainer, module = run.trainer(), Stepping(step)
    module.journal = run.journal
    try:
        trainer.fit(module, loader())
    except (ValueError, KeyboardInterrupt, SystemExit) as ended:
        run.notes["error"] = str(ended) if isinstance(ended, ValueError) else None
    run.ends.append(end_of(trainer, module))


add("error_in_the_step", partial(_ended_by, ValueError))
add("interrupted", partial(_ended_by, KeyboardInterrupt))


# --- precision -------------------------------------------------------------------------------------


def _data32() -> DataLoader:
    return loader(Samples(dtype=torch.float32))


def _net32(**settings: Any) -> Net:
    return Net(net=network(torch.float32), **settings)


for _name, _settings, _tolerance in (
    ("precision_32", {}, 2e-05),
    ("precision_bf16_mixed", {"precision": "bf16-mixed"}, 0.02),
    ("precision_bf16_true", {"precision": "bf16-true", "max_epochs": 1}, 0.02),
):
    add(
        _name,
        lambda run, settings=_settings: run.fit(
            _net32(), _data32(), val=loader(Samples(6, torch.float32), 4), **settings
        ),
        tolerance=_tolerance,
    )


def _in_half_precision(scale: float, interval: int, size: int, run: Run, **settings: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    data = loader(Samples(size, torch.float32))
    run.fit(_net32(), data, val=loader(Samples(6, torch.float32), 4), plugins=plugin, **settings)


add("precision_16_mixed", partial(_in_half_precision, 2.0**8, 2, 40, gradient_clip_val=0.5), tolerance=5e-3)
# A gradient in fp16 overflows for the sum over a batch before that over a part of it.
add("precision_16_mixed_that_overflows", partial(_in_half_precision, 2.0**24, 100, 80), modes=NEUTRAL)


# --- several calls ---------------------------------------------------------------------------------


@scenario()
def validated_tested_and_predicted_after_the_fit(run: Run) -> None:
    module = Net()
    trainer = run.fit(module)
    for call in ("validate", "test", "predict"):
        run.fit(module, loader(Samples(11), 4), trainer=trainer, call=call)


@scenario()
def fitted_twice(run: Run) -> None:
    module = Net()
    trainer = run.fit(module)
    run.fit(module, trainer=trainer)


@scenario()
def fitted_for_more_epochs(run: Run) -> None:
    module = Net(partial(SGD, lr=0.1, momentum=0.9), schedule=step_lr)
    trainer = run.fit(module)
    trainer.fit_loop.max_epochs = 4
    run.fit(module, trainer=trainer)


@scenario()
def validated_before_the_fit(run: Run) -> None:
    module = Net()
    trainer = run.trainer()
    run.fit(module, loader(Samples(11), 4), trainer=trainer, call="validate")
    run.fit(module, trainer=trainer)


# --- resumed ---------------------------------------------------------------------------------------


def adam_by_step(run: Run) -> Net:
    return Net(partial(Adam, lr=0.05), schedule=step_lr, interval="step")


def _resumed(steps: int, run: Run, factor: int = 1) -> None:
    """Resume from a checkpoint of the first epoch, which has six batches."""
    saving = stock.ModelCheckpoint(run.folder / "first", every_n_train_steps=steps, save_top_k=-1, filename="{step}")
    run.fit(adam_by_step(run), loader(Samples(48)), saving, max_epochs=1, accumulate_grad_batches=factor)
    path = run.folder / "first" / f"step={steps}.ckpt"
    run.fit(adam_by_step(run), loader(Samples(48)), ckpt_path=path, max_epochs=3, accumulate_grad_batches=factor)


def _resumed_after_an_epoch(run: Run) -> None:
    saving = stock.ModelCheckpoint(run.folder / "first", save_top_k=-1, filename="{epoch}")
    run.fit(adam_by_step(run), loader(), saving, max_epochs=1)
    run.fit(adam_by_step(run), loader(), ckpt_path=run.folder / "first" / "epoch=0.ckpt", max_epochs=3)


def _not_interrupted(run: Run, factor: int = 1) -> None:
    run.fit(adam_by_step(run), loader(Samples(48)), max_epochs=3, accumulate_grad_batches=factor)


WRITTEN_BY_US, READ_BY_US, BOTH_BY_US = (0,), (1,), (0, 1)
PLACES = {"in_mid_epoch": (2, 1), "at_the_last_batch": (6, 1), "in_mid_epoch_with_accumulation": (1, 2)}
for _place, (_steps, _factor) in PLACES.items():
    _oracle = f"not_interrupted_for_{_place}"
    add(_oracle, partial(_not_interrupted, factor=_factor), modes=())
    add(f"resumed_{_place}_of_us_by_stock", partial(_resumed, _steps, factor=_factor), with_callback=WRITTEN_BY_US)
    for _by, _who in (("stock", READ_BY_US), ("us", BOTH_BY_US)):
        # Stock Lightning reads the data from the start again, so the training that was not interrupted is the oracle.
        _train = partial(_resumed, _steps, factor=_factor)
        add(f"resumed_{_place}_of_{_by}_by_us", _train, with_callback=_who, oracle=_oracle)
for _by, _who in (("stock_by_us", READ_BY_US), ("us_by_us", BOTH_BY_US), ("us_by_stock", WRITTEN_BY_US)):
    add(f"resumed_after_an_epoch_of_{_by}", _resumed_after_an_epoch, with_callback=_who)


@scenario()
def evaluated_from_a_checkpoint(run: Run) -> None:
    saving = checkpoint(run, monitor="val", save_top_k=1, filename="best")
    trainer = run.fit(Net(), None, saving)
    run.fit(Net(), loader(Samples(11), 4), trainer=trainer, call="test", ckpt_path="best")


# --- refused ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A training that the callback refuses."""

    train: Callable[[Run], Any]
    sentence: str


class Manual(Net):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Net):
    """Has two optimizers."""

    def configure_optimizers(self) -> Any:
        return [SGD(self.net[0].parameters(), lr=0.1), SGD(self.net[2].parameters(), lr=0.1)]


class Reader(Net):
    """Fetches batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return self.losses(batch).mean()


REFUSED = {
    "step_that_reads_the_loader_itself": Refused(
        lambda run: run.fit(Reader()), "training_step takes a dataloader_iter and so fetches batches on its own"
    ),
    "manual_optimization": Refused(lambda run: run.fit(Manual()), "automatic_optimization=False"),
    "gradient_accumulation_scheduler": Refused(
        lambda run: run.fit(None, None, stock.GradientAccumulationScheduler({0: 2})),
        "AutoAccumulate and GradientAccumulationScheduler, which set the same things",
    ),
    "batch_size_finder": Refused(
        lambda run: run.fit(None, Data(), stock.BatchSizeFinder()),
        "AutoAccumulate and BatchSizeFinder, which set the same things",
    ),
    "sequential_loaders": Refused(
        lambda run: run.fit(data=CombinedLoader([loader(), loader()], "sequential")), "sequential"
    ),
}
WRONG: dict[str, Callable[[Run], Any]] = {
    "two_optimizers": lambda run: run.fit(TwoOptimizers()),
    "no_training_step": lambda run: run.fit(pl.LightningModule()),
    "interval_above_the_epoch": lambda run: run.fit(val_check_interval=9),
    "monitor_of_nothing": lambda run: run.fit(None, None, stock.EarlyStopping("nothing")),
    "clipping_of_two_kinds": lambda run: run.fit(gradient_clip_algorithm="other"),
}
"""Trainings that stock Lightning refuses."""

_NAMES = """
sgd random_numbers_in_the_step less_than_a_batch own_hooks_of_the_transfer stream averaging_stochastically
a_dict_of_loaders random_numbers_of_unequal_loaders checkpoint_of_the_best step_skips_batches frozen_at_first
random_numbers_of_workers_that_stay random_numbers_of_a_stream ready_batches batch_norm
resumed_after_an_epoch_of_us_by_us fitted_twice
"""
WITH_DEFAULTS = tuple(_NAMES.split())
"""Scenarios that are also run with nothing set, so with probe and check of exactness, which take their time."""

TURNS = (
    (NEUTRAL_LOADER, CUT_STEP, AFTER[CUT_LOADER]),
    (NEUTRAL_STEP, AFTER[CUT_LOADER], CUT_STEP),
    (NEUTRAL_LOADER, AFTER[CUT_STEP], CUT_LOADER),
    (NEUTRAL_STEP, CUT_LOADER, AFTER[CUT_STEP]),
)


def cases(number: int, scenario: Scenario) -> Iterator[tuple[Scenario, Mode, bool]]:
    """Yield by turns a mode that changes nothing, one that cuts, and the other one with memory that runs out.

    Of these two one is quick. A scenario that has only some modes is run in all of them.
    """
    if scenario.name in WITH_DEFAULTS:
        yield scenario, DEFAULTS, WITH_DEFAULTS.index(scenario.name) % 2 == 0
    if scenario.modes != ALL:
        yield from ((scenario, mode, place == 0) for place, mode in enumerate(scenario.modes))
        return
    for place, mode in enumerate(TURNS[number % 4]):
        yield scenario, mode, place < 2


CASES = [case for number, scenario in enumerate(SCENARIOS.values()) for case in cases(number, scenario)]
