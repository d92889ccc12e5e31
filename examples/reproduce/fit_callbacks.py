"""DenseNet-121 under ``Trainer.fit`` with Lightning's own callbacks: 6 × 10 on two ranks, in mixed precision."""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from examples.reproduce import data
from examples.reproduce.recipe import Column, Measured, Result, Row, Setup, Task
from examples.reproduce.windows import gradient_share
from lightning_ga import AutoAccumulate
from lightning_ga.app.run_files import read_curves
from lightning_ga.models import TimmClassifier

NAME = "fit_callbacks"
TITLE = "Trainer.fit with its callbacks: DenseNet-121, 6 × 10, two ranks"
COLUMNS = {
    "full": Column("share, full window", "{:.2f}"),
    "ragged": Column("share, last window", "{:.2f}"),
    "steps": Column("steps"),
    "left": Column("images left over"),
    "epochs": Column("stopped after epoch"),
    "best": Column("best epoch"),
    "checkpoints": Column("checkpoints"),
    "rates": Column("rates logged"),
    "loss": Column("val loss", "{:.3f}"),
    "accuracy": Column("val accuracy", "{:.3f}"),
}
RANKS, MICRO_BATCH, FACTOR = 2, 6, 10
WINDOW = RANKS * MICRO_BATCH * FACTOR
WHOLE, STOCK, OURS = "60 whole", "6 × 10, stock Lightning", "6 × 10, AutoAccumulate"
UNDIVIDED, BY_BATCH, CARRIED = "by hand, not divided", "by hand, divided by 6", "by hand, rest carried over"
BATCH_NORM = "BatchNorm: "
FP32 = "fp32: "
RATE, MIXED = 1e-3, "bf16-mixed"


@dataclass(frozen=True, slots=True)
class Run:
    """One training.

    Attributes:
        how: Who accumulates: a name of a row.
        norm: ``"group"`` or ``"batch"``.
        train: Training images.
        val: Validation images.
        epochs: Most epochs.
        goal: The validation loss at which training stops.
        data: The set.
        net: A model of timm.
    """

    how: str
    norm: str
    train: int
    val: int
    epochs: int
    goal: float
    data: str
    net: str = "densenet121"


def data_used(setup: Setup) -> str:
    """Name the set that is at hand."""
    return data.described(setup.data, at_hand(setup), train=trained_on(setup))


def at_hand(setup: Setup) -> str:
    """Find CIFAR-10, or what stands in for it."""
    return data.first_at_hand(setup.data, "cifar10", "fashion_mnist")


def trained_on(setup: Setup) -> int:
    """Choose the number of training images: an even number, so that the last window of an epoch is smaller."""
    return setup.pick(quick=160, medium=520, full=45_000)


def rows(setup: Setup) -> list[Task]:
    """List six trainings with GroupNorm; at larger scales also two with BatchNorm, as DenseNet is published."""
    size = {
        "train": trained_on(setup),
        "val": setup.pick(quick=60, medium=240, full=5_000),
        "epochs": setup.pick(quick=4, medium=5, full=40),
        "goal": setup.pick(quick=2.2, medium=1.5, full=0.3),
        "data": at_hand(setup),
    }
    group = [Run(how, "group", **size) for how in (WHOLE, STOCK, OURS, UNDIVIDED, BY_BATCH, CARRIED)]
    exact = [fp32(Run(how, "group", **size), setup.data) for how in (WHOLE, OURS)]
    batch = [Run(how, "batch", **size) for how in (WHOLE, OURS) if setup.scale != "quick"]
    named = {(BATCH_NORM if run.norm == "batch" else "") + run.how: run for run in [*group, *batch]}
    return [*(Task(name, asdict(run), partial(on_ranks, run, setup.data)) for name, run in named.items()), *exact]


def fp32(run: Run, root: str) -> Task:
    """Train without mixed precision, so that rounding does not hide whether two trainings are the same."""
    precision = {"precision": "32-true"}
    return Task(f"{FP32}{run.how}", asdict(run) | precision, partial(on_ranks, run, root, **precision))


def on_ranks(run: Run, root: str, folder: Path, precision: str = MIXED) -> Measured:
    """Train in a process of its own, which forks the ranks, and read what the first one has written."""
    settings = json.dumps({"run": asdict(run), "root": root, "folder": str(folder), "precision": precision})
    done = subprocess.run(
        [sys.executable, "-m", "examples.reproduce.fit_callbacks", settings],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{run.how}: {done.stderr[-2000:]}")
    found = json.loads((folder / "record.json").read_text())
    rates = read_curves(folder / "csv" / "metrics.csv").get("lr-Adam", [])
    last = found["validated"][-1]
    values = {
        **found["shares"],
        "steps": found["steps"],
        "left": found["left"],
        "epochs": len(found["validated"]),
        "best": 1 + min(range(len(found["validated"])), key=lambda epoch: found["validated"][epoch]["val/loss"]),
        "checkpoints": len(list(folder.glob("checkpoints/*.ckpt"))),
        "rates": len(rates),
        "loss": last["val/loss"],
        "accuracy": last["val/acc"],
    }
    curve = [(epoch, one["val/loss"]) for epoch, one in enumerate(found["validated"], 1)]
    return Measured(values, {"val": curve, "rate": rates})


def warm_up(step: int) -> float:
    """Raise the learning rate over four optimizer steps."""
    return min(1.0, (step + 1) / 4)


class ByHand(TimmClassifier):
    """Accumulates in ``training_step``, as it is often answered.

    Args:
        divisor: What each micro-batch's mean loss is divided by.
        carries: Whether what is left of an epoch waits for the next one.
        **arguments: See :class:`TimmClassifier`.

    Attributes:
        waiting: Images on all ranks that have been trained on since the last step.
    """

    def __init__(self, divisor: int, *, carries: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False
        self.divisor, self.carries = divisor, carries
        self.micro_batches = self.waiting = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, classes = batch
        self.manual_backward(cross_entropy(self(images), classes) / self.divisor)
        self.micro_batches += 1
        self.waiting += RANKS * len(classes)
        if self.micro_batches == FACTOR or (self.trainer.is_last_batch and not self.carries):
            self.optimizers().step()
            self.lr_schedulers().step()
            self.optimizers().zero_grad()
            self.micro_batches = self.waiting = 0


class Images(LightningDataModule):
    """Some images of a set in an order that stays, dealt to the ranks in turn."""

    def __init__(self, run: Run, root: str) -> None:
        super().__init__()
        self.batch_size = MICRO_BATCH * (FACTOR if run.how == WHOLE else 1)
        whole = data.SETS[run.data][1](root=root, image_size=32)
        whole.setup("fit")
        self.channels = whole.channels
        train, val = whole.train_dataloader().dataset, whole.val_dataloader().dataset
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
        self.train, self.val = Subset(train, order[: run.train]), Subset(val, range(run.val))

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val, MICRO_BATCH * FACTOR)

    def _loader(self, images: Subset[Any], batch_size: int) -> DataLoader[Any]:
        sampler = DistributedSampler(images, num_replicas=RANKS, rank=self.trainer.global_rank, shuffle=False)
        return DataLoader(images, batch_size=batch_size, sampler=sampler)

    def window(self, number: int) -> list[Tensor]:
        """Load the images of a window of the epoch, those of all ranks."""
        places = range(number * WINDOW, min(len(self.train), (number + 1) * WINDOW))
        images, classes = zip(*(self.train[place] for place in places))
        return [torch.stack(images), torch.tensor(classes)]

    @property
    def last_window(self) -> int:
        """The number of the last window of an epoch, which is smaller."""
        return (len(self.train) - 1) // WINDOW


class Recorder(Callback):
    """Writes what a training measured: the first rank does, when it ends."""

    def __init__(self, path: Path, images: Images) -> None:
        self.path, self.images = path, images
        self.shares: dict[str, float] = {}
        self.validated: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        named = {0: "full", self.images.last_window: "ragged"}
        number = trainer.global_step
        has_batch_norm = any(isinstance(module, torch.nn.BatchNorm2d) for module in pl_module.modules())
        if trainer.is_global_zero and trainer.current_epoch == 0 and number in named and not has_batch_norm:
            with trainer.precision_plugin.forward_context():
                self.shares[named[number]] = gradient_share(pl_module.net, [self.images.window(number)])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            left = getattr(pl_module, "waiting", 0)
            record = {"shares": self.shares, "validated": self.validated, "steps": trainer.global_step, "left": left}
            self.path.write_text(json.dumps(record))


def model(run: Run, channels: int) -> TimmClassifier:
    """Build the model with Adam and a warm-up by optimizer step."""
    arguments = {
        "name": run.net,
        "in_channels": channels,
        "image_size": 32,
        "group_norm": run.norm == "group",
        "optimizer": partial(torch.optim.Adam, lr=RATE),
        "lr_scheduler": partial(LambdaLR, lr_lambda=warm_up),
    }
    divisors = {UNDIVIDED: 1, BY_BATCH: MICRO_BATCH, CARRIED: FACTOR}
    if run.how in divisors:
        return ByHand(divisors[run.how], carries=run.how == CARRIED, **arguments)
    return TimmClassifier(**arguments)


def callbacks(folder: Path, goal: float) -> list[Callback]:
    """Make those of Lightning that watch a training."""
    checkpoints = partial(ModelCheckpoint, folder / "checkpoints", save_weights_only=True)
    return [
        checkpoints(filename="best", monitor="val/loss"),
        checkpoints(filename="{step}", every_n_train_steps=2, save_top_k=-1),
        EarlyStopping("val/loss", patience=2, stopping_threshold=goal),
        LearningRateMonitor("step"),
    ]


def train(run: Run, root: str, folder: Path, precision: Any) -> None:
    """Train on two forked gloo ranks."""
    seed_everything(0, verbose=False)
    images = Images(run, root)
    ours = [AutoAccumulate(micro_batch_size=MICRO_BATCH)] if run.how == OURS else []
    trainer = Trainer(
        max_epochs=run.epochs,
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(start_method="fork", process_group_backend="gloo"),
        precision=precision,
        accumulate_grad_batches=FACTOR if run.how in (STOCK, OURS) else 1,
        callbacks=[*ours, *callbacks(folder, run.goal), Recorder(folder / "record.json", images)],
        logger=CSVLogger(folder, name="csv", version=""),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model(run, images.channels), images)


def draw(result: Result) -> Figure:
    """Draw the monitored loss of each training, by precision and norm."""
    panels: dict[str, list[Row]] = {}
    for row in result.rows:
        kind = next((prefix for prefix in (FP32, BATCH_NORM) if row.name.startswith(prefix)), "bf16: ")
        panels.setdefault(kind, []).append(row)
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (kind, rows) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items()):
        for number, row in enumerate(rows):
            style = {"linestyle": "--", "marker": "o"} if number else {"linestyle": "-", "linewidth": 4, "alpha": 0.3}
            axes.plot(*zip(*row.curves["val"]), label=row.name.removeprefix(kind), **style)
        axes.set(title=kind.rstrip(": "), xlabel="epoch", ylabel="validation loss")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    return figure


def main(arguments: Sequence[str]) -> int:
    """Do one training: what :func:`on_ranks` starts."""
    settings = json.loads(arguments[0])
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    train(Run(**settings["run"]), settings["root"], Path(settings["folder"]), settings.get("precision", MIXED))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
