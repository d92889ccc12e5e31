"""Contrastive learning on handwritten digits: 1,024 pictures in one loss, in memory that holds 64 of them.

Run it: ``python examples/contrastive.py``. Three encoders are trained without labels: on whole batches, with the same
batches in a memory budget (``whole=("encoder",)``), and by plain accumulation of micro-batches of 64, whose loss
compares 64 pictures at a time. A linear classifier on the outputs says what each has learned.
"""

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, normalize
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate
from lightning_ga.testing import limit_memory

WINDOW, FITS = 1024, 64
NO_BUDGET = "64GiB"
TRAINED = 1437  # pictures; the others test


class Contrastive(pl.LightningModule):
    """InfoNCE (arXiv 1807.03748, equation 4) between two random views of each picture."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, stride=2),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * 16, 64),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        one, other = (normalize(self.head(self.encoder(view_of(batch[0])))) for _ in range(2))
        loss = cross_entropy(one @ (other / 0.2).T, torch.arange(len(one), device=one.device))
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def view_of(images: Tensor) -> Tensor:
    """Turn, shear, scale and move each picture in its own way."""
    moves = torch.eye(2, 3).to(images) + 0.2 * torch.randn(len(images), 2, 3).to(images)
    return grid_sample(images, affine_grid(moves, list(images.shape), align_corners=False), align_corners=False)


def trained(
    images: Tensor, epochs: int, callback: AutoAccumulate, budget: int | None = None, *more: pl.Callback
) -> tuple[Contrastive, int]:
    """Train an encoder from the same weights, on the same batches; beside it the most bytes of tensors that lived."""
    pl.seed_everything(0, verbose=False)
    module, quiet = Contrastive(), {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    callbacks = [callback, *more]
    trainer = pl.Trainer(max_epochs=epochs, callbacks=callbacks, enable_progress_bar=False, accelerator="cpu", **quiet)
    size = WINDOW if len(images) >= WINDOW else FITS  # a window of ``whole=`` is one batch of the loader
    loader = DataLoader(TensorDataset(images), batch_size=size, shuffle=True, drop_last=True)
    with limit_memory(NO_BUDGET if budget is None else budget) as meter:
        trainer.fit(module, loader)
    return module, int(meter.peak_bytes)


def peak_of_a_step(images: Tensor) -> int:
    """Measure what plain training takes with as many pictures as are to fit."""
    return trained(images[: 2 * FITS], 1, AutoAccumulate(FITS, micro_batch_size=FITS, verify=False))[1]


def accuracy(module: Contrastive, images: Tensor, labels: Any) -> float:
    """Fit a linear classifier to the outputs for the training pictures, and score it on the others."""
    with torch.no_grad():
        features = module.encoder(images).numpy()
    classifier = LogisticRegression(max_iter=2000).fit(features[:TRAINED], labels[:TRAINED])
    return float(classifier.score(features[TRAINED:], labels[TRAINED:]))


def smooth(losses: list[float], window: int) -> list[float]:
    """Average the losses of the passes of each window."""
    return [sum(losses[start : start + window]) / window for start in range(0, len(losses) - window + 1, window)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--picture", type=Path, help="where to save the curves, such as contrastive.png")
    arguments = parser.parse_args()
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    budget = peak_of_a_step(images)
    whole = AutoAccumulate(whole=("encoder",), cache=False)
    runs: dict[str, tuple[AutoAccumulate, int | None, int]] = {
        "whole batch": (AutoAccumulate(WINDOW, micro_batch_size=WINDOW, verify=False), None, 1),
        'whole=("encoder",)': (whole, budget, 1),
        "accumulation": (AutoAccumulate(WINDOW, micro_batch_size=FITS, verify=False), budget, WINDOW // FITS),
    }
    title = f"{WINDOW:,} pictures in one step; a budget of {budget / 2**20:.1f} MiB holds {FITS}"
    table = Table("training", "peak", "last loss", "accuracy", "seconds", title=title)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss", title=title)
    for name, (callback, bytes_, passes) in runs.items():
        started = time.perf_counter()
        module, peak = trained(images[:TRAINED], arguments.epochs, callback, bytes_)
        losses = smooth(module.losses[-arguments.epochs * passes :], passes)
        right, seconds = accuracy(module, images, labels), time.perf_counter() - started
        table.add_row(name, f"{peak / 2**20:.1f} MiB", f"{losses[-1]:.3f}", f"{right:.3f}", f"{seconds:.0f}")
        axes.plot(losses, "--" if name.startswith("whole=") else "-", label=name)
    axes.legend()
    Console().print(table)
    print(f"{whole.plan}; found in {whole.probe.steps if whole.probe else 0} steps")
    if arguments.picture:
        figure.savefig(arguments.picture, dpi=150)


if __name__ == "__main__":
    main()
