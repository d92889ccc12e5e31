"""Sets by name: scikit-learn's digits, MNIST, Fashion-MNIST and CIFAR-10 in the files that are published, and noise.

Beside these: 21,844 English definitions of nouns, 6 to 431 characters long, that timm ships: text of unequal length.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import torchvision
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor
from torchvision.datasets.utils import extract_archive

from lightning_ga.data.images import ImageData, Labelled, Loaded, Splits
from lightning_ga.errors import UserError

DEBIAN_FOLDER = "usr/share/datasets/fashion-mnist"  # of the package dataset-fashion-mnist
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
AT_ONCE = 1024  # pictures that are drawn in 32 bits at a time


class Digits(ImageData):
    """A stratified split of scikit-learn's digits: 1,797 handwritten ones of 8×8 pixels that need no download.

    Args:
        test_fraction: Share of all samples that is kept for the test.
        **arguments: See :class:`ImageData`.
    """

    name = "digits"
    class_names = tuple("0123456789")

    def __init__(self, *, test_fraction: float = 0.2, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.test_fraction = test_fraction

    def read(self) -> Splits:
        """Read the copy that is part of scikit-learn."""
        digits = load_digits()
        grey = torch.from_numpy(digits.images / 16 * 255).round().to(torch.uint8)
        samples = Labelled(grey.unsqueeze(1), torch.from_numpy(digits.target).long())
        rest, test = self.hold_out(samples, self.test_fraction)
        return Splits(*self.hold_out(rest, self.val_fraction), test)


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
        if (len(images), len(test_images)) != (len(labels), len(test_labels)):
            raise UserError(f"{str(folder)!r} has other numbers of pictures than of labels: download its files again.")
        train, val = self.hold_out(Labelled(images.unsqueeze(1), labels.long()), self.val_fraction)
        return Splits(train, val, Labelled(test_images.unsqueeze(1), test_labels.long()))

    def folder(self) -> Path | None:
        """Where all four files are, or nothing."""
        here = (folder for folder in self.folders() if all(idx_path(folder, file).is_file() for file in FILES))
        return next(here, None)

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


class CIFAR10(ImageData):
    """60,000 colour pictures of 32×32 of ten kinds of things and animals; 10,000 are the test set."""

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


class Synthetic(ImageData):
    """Pictures of any size and number: each class is a random pattern, its samples the pattern under noise.

    Args:
        samples: Training samples; validation and test sets of a quarter of that are added.
        noise: Share of noise in a picture, 0 to 1.
        **arguments: See :class:`ImageData`; ``split_seed`` seeds the pictures too.
    """

    name = "synthetic"

    def __init__(self, *, samples: int = 1024, noise: float = 0.5, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.samples, self.noise = samples, noise
        self.num_classes = self.num_classes or 10

    def read(self) -> Splits:
        """Draw the patterns, then the samples."""
        generator = torch.Generator().manual_seed(self.split_seed)
        shape = (self.num_classes or 10, self.channels, self.image_size, self.image_size)
        patterns = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        held_out = max(1, self.samples // 4)
        needed, free = (self.samples + 2 * held_out) * patterns[0].numel(), psutil.virtual_memory().available
        if needed > free:
            raise UserError(
                f"data.samples={self.samples} take {needed:,} bytes, of which {free:,} are free: use fewer."
            )
        return Splits(*(self._draw(count, patterns, generator) for count in (self.samples, held_out, held_out)))

    def _draw(self, count: int, patterns: torch.Tensor, generator: torch.Generator) -> Labelled:
        labels = torch.arange(count) % len(patterns)
        images = torch.empty(count, *patterns.shape[1:], dtype=torch.uint8)
        for part, classes in zip(torch.split(images, AT_ONCE), torch.split(labels, AT_ONCE)):
            noise = torch.randint(256, part.shape, generator=generator, dtype=torch.uint8)
            part.copy_(torch.lerp(patterns[classes].float(), noise.float(), self.noise))
        return Labelled(images, labels)


def idx_path(folder: Path, file: str) -> Path:
    """The file as it is, or compressed."""
    compressed = folder / f"{file}.gz"
    return compressed if compressed.is_file() else folder / file


def read_idx(path: Path) -> Tensor:
    """The tensor of an idx file, read by torchvision; a compressed one is unpacked for that."""
    with TemporaryDirectory() as folder:
        try:
            plain = extract_archive(str(path), folder) if path.suffix == ".gz" else str(path)
            values: Tensor = read_sn3_pascalvincent_tensor(plain)
        except (AssertionError, KeyError, ValueError, IndexError, EOFError, OSError, RuntimeError) as error:
            raise UserError(f"{str(path)!r} is no whole idx file: download it again.") from error
    return values


def missing(name: str, root: str) -> UserError:
    """The error for a set whose files are not there, or not whole, with the way to get them."""
    return UserError(
        f"data={name} is not, or not whole, in data.root={root!r}: add data.download=true to the same line to fetch it "
        "(in Python, download=True), or say where it is."
    )


def fetch(name: str, root: str, download: Callable[[], object]) -> None:
    """Run a download; if it fails, the network's own message is in the error."""
    try:
        download()
    except (OSError, RuntimeError) as error:  # no network, or no mirror that answers
        reason = str(error).strip().split("\n")[0].rstrip(":")
        raise UserError(
            f"data={name} could not be downloaded ({reason}); check the network, or copy its files into "
            f"data.root={root!r}."
        ) from error


FILE = "_info/imagenet_synset_to_definition.txt"  # of timm.data; WordNet's names of ImageNet's 21,844 classes
END = 0  # the byte before and behind a text; none has it inside
IGNORED = -100  # a label that is padding, as in torch.nn.CrossEntropyLoss

Text = dict[str, Tensor]


class Definitions(Loaded):
    """Train, validation and test loaders over texts as bytes, each batch padded to its longest text.

    A batch is a mapping: ``tokens`` ``(batch, length)``, and ``labels``, the token after each, -100 where padded.
    ``lightning_ga.weights.TargetTokens()`` counts the tokens that the loss is a mean over.

    Args:
        batch_size: Texts of a training batch on one rank.
        eval_batch_size: Texts of a validation or test batch; it changes speed and memory, no result.
        num_workers: Processes that load data; 0 loads in the training process.
        max_length: Most tokens of a text, the end included; the rest of a longer text is left out.
        val_fraction: Share of the texts that is kept for validation.
        test_fraction: Share of the texts that is kept for the test.
        split_seed: Seed of that choice: the split does not change with the seed of a run.
    """

    name = "definitions"

    def __init__(
        self,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        num_workers: int = 0,
        max_length: int = 512,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        if val_fraction + test_fraction >= 1:
            raise UserError(
                f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction} leave nothing to train on: "
                "their sum must be below 1."
            )
        self.batch_size, self.eval_batch_size, self.num_workers = batch_size, eval_batch_size, num_workers
        self.max_length = max_length
        self.fractions, self.split_seed = (val_fraction, test_fraction), split_seed
        self.splits: dict[str, Sequence[str]] = {}

    def setup(self, stage: str) -> None:
        """Read the texts once, and part them."""
        if not self.splits:
            texts = read_definitions()
            order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(self.split_seed)).tolist()
            val, test = (int(fraction * len(texts)) for fraction in self.fractions)
            places = {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}
            self.splits = {part: [texts[place] for place in sorted(chosen)] for part, chosen in places.items()}

    def dataset(self, part: str) -> Dataset[Text]:
        """The texts of a part."""
        return TextDataset(self.splits[part], self.max_length)

    def collate(self, part: str) -> Callable[..., Text]:
        """What pads texts to one length."""
        return pad


class TextDataset(Dataset[Text]):
    """Texts as bytes: the tokens, and the token after each as its label."""

    def __init__(self, texts: Sequence[str], max_length: int) -> None:
        self.texts = texts
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Text:
        content = torch.tensor([END, *self.texts[index].encode(), END][: self.max_length + 1])
        return {"tokens": content[:-1], "labels": content[1:]}


def pad(texts: Sequence[Mapping[str, Tensor]]) -> Text:
    """Return a batch as long as its longest text."""
    fills = {"tokens": END, "labels": IGNORED}
    return {
        name: pad_sequence([text[name] for text in texts], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
    }


def read_definitions() -> list[str]:
    """Return timm's definitions, one for each of its synsets, in their order."""
    content = (files("timm.data") / FILE).read_text(encoding="utf-8")
    return [line.partition("\t")[2] for line in content.splitlines()]
