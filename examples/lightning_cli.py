"""The callback under LightningCLI: everything, ``AutoAccumulate`` too, stands in ``lightning_cli.yaml``.

Run it: ``python examples/lightning_cli.py fit --config examples/lightning_cli.yaml``, with any value
overridden, such as ``--trainer.max_epochs 3``. Needs ``pip install "jsonargparse[signatures]"``.
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from own_model import Digits
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsData(pl.LightningDataModule):
    """scikit-learn's digits, 1,797 images of 8 × 8."""

    def __init__(self, batch_size: int = 128) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        dataset = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
        self.train, self.val = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=256)


if __name__ == "__main__":
    LightningCLI(Digits, DigitsData, save_config_callback=None)
