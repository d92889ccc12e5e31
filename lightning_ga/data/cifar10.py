"""CIFAR-10: 60,000 colour pictures of 32×32, read and downloaded by torchvision."""

import torch
import torchvision

from lightning_ga.data.download import fetch, missing
from lightning_ga.data.images import ImageData, Labelled, Splits


class CIFAR10(ImageData):
    """Ten kinds of things and animals; 10,000 pictures are the test set."""

    name = "cifar10"
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def prepare_data(self) -> None:
        """Fetch the files if ``download`` is set; torchvision skips what is there."""
        if self.download:
            fetch(self.name, self.root, lambda: torchvision.datasets.CIFAR10(self.root, download=True))

    def read(self) -> Splits:
        """Read the batches of the python version."""
        train, val = self.hold_out(self._part(train=True), self.val_fraction)
        return Splits(train, val, self._part(train=False))

    def _part(self, *, train: bool) -> Labelled:
        try:
            source = torchvision.datasets.CIFAR10(self.root, train=train)
        except RuntimeError as error:  # "Dataset not found or corrupted."
            raise missing(self.name, self.root) from error
        return Labelled(torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(source.targets))
