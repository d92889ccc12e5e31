"""Data of your own: here 442 patients, part of scikit-learn."""

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split


class Diabetes(LightningDataModule):
    """Ten measurements of a patient, and how far the illness came within a year."""

    def __init__(self, batch_size: int = 32, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.train_set: Subset | None = None

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        samples, targets = (torch.tensor(values, dtype=torch.float32) for values in load_diabetes(return_X_y=True))
        whole = TensorDataset(samples / samples.std(dim=0), (targets - targets.mean()) / targets.std())
        draw = torch.Generator().manual_seed(self.hparams.seed)
        self.train_set, self.val_set, self.test_set = random_split(whole, [0.7, 0.15, 0.15], draw)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader:
        return self._loader(self.test_set)

    predict_dataloader = test_dataloader

    def _loader(self, samples: Subset | None, *, shuffle: bool = False) -> DataLoader:
        assert samples is not None, "setup() comes first"
        workers = self.hparams.num_workers
        return DataLoader(samples, batch_size=self.hparams.batch_size, num_workers=workers, shuffle=shuffle)
