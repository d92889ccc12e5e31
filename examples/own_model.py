"""One line in a script of your own: a digit classifier with an effective batch of 256 in whatever memory there is.

Run it: ``python examples/own_model.py``. On a CPU it may take 4 MiB; give it ``--memory-budget 64MiB``,
and the same training takes fewer, larger micro-batches. On a GPU it takes what is free.
"""

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_ga import AutoAccumulate


class Digits(pl.LightningModule):
    """A small convolutional network with GroupNorm, for which accumulation is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 32, 3, padding=1),
            torch.nn.GroupNorm(4, 32),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, padding=1, stride=2),
            torch.nn.GroupNorm(8, 64),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(64 * 16, 10),
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    on_gpu = torch.accelerator.is_available()
    parser.add_argument("--memory-budget", default=None if on_gpu else "4MiB", help="what a training step may take")
    parser.add_argument("--effective-batch-size", type=int, default=256)
    parser.add_argument("--max-epochs", type=int, default=10)
    arguments = parser.parse_args()

    pl.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    train, val = random_split(dataset, [0.8, 0.2])

    accumulate = AutoAccumulate(arguments.effective_batch_size, memory_budget=arguments.memory_budget)
    trainer = pl.Trainer(
        max_epochs=arguments.max_epochs,
        callbacks=[accumulate],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=256))
    print(f"{accumulate.plan}; validation accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
