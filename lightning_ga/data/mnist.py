"""MNIST and Fashion-MNIST, in the idx files in which both are published."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torchvision
from torch import Tensor
from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor
from torchvision.datasets.utils import extract_archive

from lightning_ga.data.download import fetch, missing
from lightning_ga.data.images import ImageData, Labelled, Splits
from lightning_ga.errors import UserError

DEBIAN_FOLDER = "usr/share/datasets/fashion-mnist"  # of the package dataset-fashion-mnist
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class MNIST(ImageData):
    """70,000 handwritten digits of 28×28, grey; the last 10,000 are the test set."""

    name = "mnist"
    class_names: tuple[str, ...] = tuple("0123456789")
    source: type[torchvision.datasets.MNIST] = torchvision.datasets.MNIST

    def prepare_data(self) -> None:
        """Fetch the files with torchvision if they are missing and ``download`` is set."""
        if self.download and self.folder() is None:
            fetch(self.name, self.root, lambda: self.source(self.root, download=True))

    def read(self) -> Splits:
        """Read the four idx files."""
        folder = self.folder()
        if folder is None:
            raise missing(self.name, self.root)
        images, labels, test_images, test_labels = (read_idx(idx_path(folder, file)) for file in FILES)
        train, val = self.hold_out(Labelled(images.unsqueeze(1), labels.long()), self.val_fraction)
        return Splits(train, val, Labelled(test_images.unsqueeze(1), test_labels.long()))

    def folder(self) -> Path | None:
        """Where all four files are, or nothing."""
        for folder in self.folders():
            if all(idx_path(folder, file).exists() for file in FILES):
                return folder
        return None

    def folders(self) -> list[Path]:
        """Where the files may be: the root itself, or torchvision's folder below it."""
        return [Path(self.root), Path(self.root) / self.source.__name__ / "raw"]


class FashionMNIST(MNIST):
    """70,000 grey pictures of clothes, in MNIST's format and split."""

    name = "fashion_mnist"
    class_names = tuple(torchvision.datasets.FashionMNIST.classes)
    source = torchvision.datasets.FashionMNIST

    def folders(self) -> list[Path]:
        """Also where Debian's package puts them, unpacked below the root or installed."""
        return [*super().folders(), Path(self.root) / DEBIAN_FOLDER, Path("/") / DEBIAN_FOLDER]


def idx_path(folder: Path, file: str) -> Path:
    """The file as it is, or compressed."""
    compressed = folder / f"{file}.gz"
    return compressed if compressed.exists() else folder / file


def read_idx(path: Path) -> Tensor:
    """The tensor of an idx file, read by torchvision; a compressed one is unpacked for that."""
    with TemporaryDirectory() as folder:
        try:
            plain = extract_archive(str(path), folder) if path.suffix == ".gz" else str(path)
            values: Tensor = read_sn3_pascalvincent_tensor(plain)
        except (AssertionError, KeyError, ValueError, IndexError, EOFError, OSError, RuntimeError) as error:
            raise UserError(f"{str(path)!r} is no whole idx file: download it again.") from error
    return values
