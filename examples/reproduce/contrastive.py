"""Contrastive learning on handwritten digits: 1,024 pictures in one loss, in a budget that holds 64 of them."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from examples.contrastive import FITS, TRAINED, WINDOW, accuracy, peak_of_a_step, smooth, trained
from examples.reproduce.gradients import flat_gradient, relative_error
from examples.reproduce.recipe import Column, Measured, Result, Setup, Task
from lightning_ga import AutoAccumulate

NAME = "contrastive"
TITLE = "Digits, contrastive: the loss sees the whole batch"
COLUMNS = {
    "error": Column("gradient error", "{:.1e}"),
    "peak": Column("peak, MiB", "{:.1f}"),
    "loss": Column("last loss", "{:.3f}"),
    "accuracy": Column("accuracy", "{:.3f}"),
}
WHOLE, CHUNKS, MEANS = "whole batch", 'whole=("encoder",)', "accumulation"


class FirstGradient(Callback):
    """Keeps the gradient of the first step, in memory that no budget counts."""

    value: np.ndarray | None = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        if self.value is None:
            self.value = flat_gradient(pl_module).numpy().copy()


def data_used(_: Setup) -> str:
    """Name the pictures."""
    return f"scikit-learn's 1,797 digits ({TRAINED:,} of them for training)"


def rows(setup: Setup) -> list[Task]:
    """List three trainings on the same batches."""
    epochs = setup.pick(quick=10, medium=40, full=200)
    return [Task(name, {"epochs": epochs}, partial(measure, name, epochs)) for name in (WHOLE, CHUNKS, MEANS)]


def measure(name: str, epochs: int, _: Path) -> Measured:
    """Train, and compare the first step's gradient with that of the whole batch."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    budget = None if name == WHOLE else peak_of_a_step(images)
    right, watch = FirstGradient(), FirstGradient()
    trained(images[:TRAINED], 1, training_of(WHOLE), None, right)
    module, peak = trained(images[:TRAINED], epochs, training_of(name), budget, watch)
    passes = WINDOW // FITS if name == MEANS else 1
    losses = smooth(module.losses[-epochs * passes :], passes)
    values = {
        "error": relative_error(torch.tensor(watch.value), torch.tensor(right.value)),
        "peak": peak / 2**20,
        "loss": losses[-1],
        "accuracy": accuracy(module, images, labels),
    }
    return Measured(values, {"loss": [(step + 1.0, loss) for step, loss in enumerate(losses)]})


def training_of(name: str) -> AutoAccumulate:
    """Make the callback of a row."""
    if name == CHUNKS:
        return AutoAccumulate(WINDOW, whole=("encoder",), cache=False)
    return AutoAccumulate(WINDOW, micro_batch_size=WINDOW if name == WHOLE else FITS, verify=False)


def draw(result: Result) -> Figure:
    """Draw the losses, and the memory of each training."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    losses, memory = figure.subplots(1, 2, width_ratios=(2, 1))
    for row in result.rows:
        losses.plot(*zip(*row.curves["loss"]), "--" if row.name == CHUNKS else "-", label=row.name)
        memory.bar(row.name, row.values["peak"])
    losses.set(xlabel="optimizer step", ylabel="loss", title="accumulation has another loss")
    losses.legend()
    memory.set(ylabel="MiB", title="peak of live tensors")
    memory.tick_params(axis="x", labelrotation=20)
    return figure
