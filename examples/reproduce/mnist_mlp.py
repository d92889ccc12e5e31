"""The perceptron 784-512-256-128-10 in batches of 32, four of them to an optimizer step."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from examples.reproduce import data
from examples.reproduce.command_line import built, curve, trained
from examples.reproduce.pictures import losses
from examples.reproduce.recipe import Column, Measured, Result, Setup, Task
from examples.reproduce.windows import Batch, cut_text, evaluated, gradient_share, sample_cost, window_peak
from lightning_ga import plan_accumulation
from lightning_ga.models import MLPClassifier

NAME = "mnist_mlp"
TITLE = "MNIST: four batches of 32 to a step"
COLUMNS = {
    "steps": Column("steps", "{:,}"),
    "full": Column("share, full window", "{:.2f}"),
    "ragged": Column("share, last window", "{:.2f}"),
    "loss": Column("test loss", "{:.3f}"),
    "accuracy": Column("test accuracy", "{:.3f}"),
    "peak": Column("peak MiB", "{:.1f}"),
    "cost": Column("µs a sample", "{:.0f}"),
}
ALONE, OURS_4, WHOLE = "Adam: 32", "Adam: 4 × 32", "Adam: 128"
SUMMED = "Adam: 4 × 32, summed by hand"
SGD_4, SGD_SUMMED = "SGD: 4 × 32", "SGD: 4 × 32, summed by hand"
SGD_DROPPED = "SGD: 4 × 32, full windows only"
SGD_DIVIDED = "SGD: 4 × 32, divided by 4 by hand"
SGD_RATE = f"{SGD_DIVIDED}, learning rate × 4"
BATCH, FACTOR = 32, 4
LARGE, MICRO_BATCHES = 4096, (4096, 1024, 256, 64)
IMAGE = (1, 28, 28)
RATE = 0.05
SHARES = "shares.json"


def data_used(setup: Setup) -> str:
    """Name the set that is at hand."""
    return data.described(setup.data, at_hand(setup), train=trained_on(setup))


def at_hand(setup: Setup) -> str:
    """Find MNIST, or what stands in for it."""
    return data.first_at_hand(setup.data, "mnist", "fashion_mnist")


def trained_on(setup: Setup) -> int | None:
    """Choose the number of training images, so that the last window of an epoch has one micro-batch and a part."""
    return setup.pick(quick=1180, medium=12060, full=None)


def rows(setup: Setup) -> list[Task]:
    """List trainings of the command line and of hand-written loops, then single windows of 4,096."""
    shared = [
        *data.subset(setup.data, at_hand(setup), train=trained_on(setup)),
        *(f"trainer.max_epochs={setup.pick(quick=3, medium=5, full=5)}", "trainer.limit_val_batches=0"),
        *("optimized_metric=train/loss", "lr_scheduler=none"),
        *setup.pick(quick=["trainer.limit_test_batches=32"], medium=[], full=[]),
    ]
    sgd = [*shared, "optimizer=sgd", "optimizer.momentum=0", f"optimizer.lr={RATE}"]
    alone, cut = (f"experiment={experiment}" for experiment in (NAME, f"{NAME}_accumulate4"))
    return [
        by_command(ALONE, [alone, *shared]),
        by_command(OURS_4, [cut, *shared]),
        by_command(WHOLE, [alone, *shared, f"data.batch_size={BATCH * FACTOR}"]),
        by_hand(SUMMED, [cut, *shared], divide=False),
        by_command(SGD_4, [cut, *sgd]),
        by_command(SGD_DROPPED, [cut, *sgd, f"trainer.limit_train_batches={full_windows(setup) * FACTOR}"]),
        by_hand(SGD_SUMMED, [cut, *sgd], divide=False),
        by_hand(SGD_RATE, [cut, *sgd[:-1], f"optimizer.lr={FACTOR * RATE}"], divide=True),
        by_hand(SGD_DIVIDED, [cut, *sgd], divide=True),
        *(single_window(micro_batch) for micro_batch in MICRO_BATCHES),
    ]


def full_windows(setup: Setup) -> int:
    """Count the windows of an epoch that have all their micro-batches."""
    known, wanted = data.samples(setup.data, at_hand(setup)), trained_on(setup)
    trained = int(0.9 * known) if data.is_all(wanted, known) or wanted is None else wanted
    return trained // (BATCH * FACTOR)


def by_command(name: str, overrides: list[str]) -> Task:
    """Train with the command line."""
    return Task(name, {"overrides": overrides}, partial(ours, overrides=overrides))


def ours(folder: Path, overrides: list[str]) -> Measured:
    """Read what a training of the command line has left, and what a callback found of its first windows."""
    watch = f"+callbacks.share._target_={GradientShare.__module__}.{GradientShare.__name__}"
    run = trained(folder, [*overrides, watch])
    chunks = run.plan["plan"]["chunks"][0]
    steps, _ = curve(run, "train/loss")[-1]
    shares = json.loads((run.folder / SHARES).read_text())
    values = {"loss": run.result["test/loss"], "accuracy": run.result["test/acc"], "steps": steps, **shares}
    return Measured(values | takes(chunks, overrides), {"train": curve(run, "train/loss")})


class GradientShare(Callback):
    """Measures the first and the last window of the first epoch; see :func:`gradient_share`."""

    def __init__(self) -> None:
        self._window: list[Batch] = []
        self._shares: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._window = []
        self._window.append(batch)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        first = trainer.global_step == 0
        if trainer.current_epoch == 0 and (first or trainer.is_last_batch):
            self._shares["full" if first else "ragged"] = gradient_share(pl_module.net, self._window)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (Path(trainer.default_root_dir) / SHARES).write_text(json.dumps(self._shares))


def by_hand(name: str, overrides: list[str], *, divide: bool) -> Task:
    """Train with the loop that is usually written."""
    settings = {"overrides": overrides, "divide": divide}
    return Task(name, settings, partial(usual, overrides=overrides, divide=divide))


def usual(_folder: Path, overrides: list[str], divide: bool) -> Measured:
    """Train with the loop that is usually written: the last window of an epoch is flushed.

    Args:
        _folder: Unused.
        overrides: Of the command line, for the same data, model and optimizer.
        divide: Whether losses are divided by the number of micro-batches.
    """
    fit = built(overrides)
    net, loader = fit.module.net, fit.data.train_dataloader()
    optimizer = fit.module.make_optimizer(net.parameters())
    shares: dict[str, float] = {}
    losses: list[float] = []
    window: list[Batch] = []
    for epoch in range(fit.config.trainer.max_epochs):
        for number, (images, targets) in enumerate(loader, start=1):
            loss = cross_entropy(net(images), targets)
            (loss / FACTOR if divide else loss).backward()
            window.append((images, targets))
            if number % FACTOR == 0 or number == len(loader):
                if epoch == 0 and number in (FACTOR, len(loader)):
                    shares["full" if number == FACTOR else "ragged"] = gradient_share(net, window)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                window = []
    limit = fit.config.trainer.limit_test_batches
    loss, accuracy = evaluated(net.eval(), islice(fit.data.test_dataloader(), limit if limit > 1 else None))
    values = {"loss": loss, "accuracy": accuracy, "steps": len(losses), **shares}
    return Measured(values, {"train": list(enumerate(losses, start=1))})


def takes(chunks: Sequence[int], overrides: Sequence[str]) -> dict[str, float]:
    """Measure peak memory and processor time of a window on random pixels."""
    make = partial(torch.optim.SGD, lr=RATE) if "optimizer=sgd" in overrides else torch.optim.Adam
    return {
        "peak": window_peak(MLPClassifier().net, make, chunks, IMAGE),
        "cost": sample_cost(MLPClassifier().net, make, chunks, IMAGE),
    }


def single_window(micro_batch: int) -> Task:
    """Measure a window of 4,096 samples in micro-batches of one size."""
    plan = plan_accumulation(LARGE, micro_batch=micro_batch)
    name = f"Adam: {cut_text(plan.chunks[0])}"
    return Task(name, {"micro_batch": micro_batch}, lambda _folder: Measured(takes(plan.chunks[0], [])))


def draw(result: Result) -> Figure:
    """Draw what summing does to SGD, and what accumulation does to memory and time."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    labels = {
        **dict.fromkeys((SGD_4, OURS_4), "the mean of the window"),
        **dict.fromkeys((SGD_SUMMED, SUMMED), "four means summed"),
        SGD_RATE: "the mean, rate × 4",
    }
    losses(left, result, {SGD_4: "C0", SGD_SUMMED: "C3", SGD_RATE: "C1"}, "SGD: training loss", labels=labels)
    losses(middle, result, {OURS_4: "C0", SUMMED: "C3"}, "Adam hides it: training loss", labels=labels)
    windows = [row for row in result.rows if "micro_batch" in row.settings]
    sizes = [row.settings["micro_batch"] for row in windows]
    right.plot(
        sizes, [row.values["peak"] for row in windows], "o-", color="C0", label="peak memory, MiB (CPU, live tensors)"
    )
    right.plot(sizes, [row.values["cost"] for row in windows], "s--", color="C1", label="CPU µs a sample")
    right.set(xlabel="micro-batch, samples", xscale="log", title=f"A window of {LARGE:,} samples")
    right.set_ylim(0, 1.3 * max(float(row.values[key] or 0) for row in windows for key in ("peak", "cost")))
    right.set_xticks(sizes, [f"{size:,}" for size in sizes])
    right.minorticks_off()
    right.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize="small")
    return figure
