"""Sets by name: scikit-learn's digits, MNIST, Fashion-MNIST and CIFAR-10 as published, noise, and English texts.

Tested in tests/data/test_data.py.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torchvision
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from torchvision.datasets.utils import extract_archive

from lightning_ga.data.images import ImageData, Labelled, Loaded, Splits
from lightning_ga.errors import UserError

DEBIAN_FOLDER = "usr/share/datasets/fashion-mnist"  # of the package dataset-fashion-mnist
RAW = "FashionMNIST/raw"  # where torchvision reads its files
FILE = "_info/imagenet_synset_to_definition.txt"  # of timm.data; WordNet's names of ImageNet's 21,844 classes
END = 0  # the byte before and behind a text; none has it inside
IGNORED = -100  # a label that is padding, as in torch.nn.CrossEntropyLoss

Text = dict[str, Tensor]


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


class Published(ImageData):
    """A set in the files that are published, which torchvision fetches and reads."""

    source: Any  # torchvision's class

    def prepare_data(self) -> None:
        """Fetch the files if ``download`` is set; torchvision skips what is there."""
        if self.download:
            try:
                self.source(self.root, download=True)
            except (OSError, RuntimeError) as error:  # torchvision has tried all mirrors
                reason = " ".join(str(error).split())
                raise UserError(
                    f"data={self.name} could not be fetched into data.root={self.root!r} ({reason}): check the "
                    "network, or copy its files there; data=digits needs no download."
                ) from error

    def read(self, root: str | None = None) -> Splits:
        """Read training and test images, from another root if one is given; a share of the first is held out."""
        train = self._part(root or self.root, train=True)
        test = self._part(root or self.root, train=False)
        return Splits(*self.hold_out(train, self.val_fraction), test)

    def _part(self, root: str, *, train: bool) -> Labelled:
        try:
            source = self.source(root, train=train)
        except (RuntimeError, ValueError, AssertionError) as error:  # missing, or cut off
            raise UserError(
                f"data={self.name} is not, or not whole, in data.root={self.root!r}: add data.download=true to the "
                "same line to fetch it (in Python, download=True), or say where it is."
            ) from error
        images = torch.as_tensor(source.data)  # grey: three dimensions; colour: channels last
        images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
        return Labelled(images, torch.as_tensor(source.targets).long())


class MNIST(Published):
    """70,000 handwritten digits of 28×28, grey, in ``root/MNIST/raw``; the last 10,000 are the test set."""

    name = "mnist"
    class_names = tuple("0123456789")
    source = torchvision.datasets.MNIST


class FashionMNIST(Published):
    """70,000 grey pictures of clothes, in MNIST's format and split, in ``root/FashionMNIST/raw``.

    Debian's package ``dataset-fashion-mnist`` is found too, installed or unpacked below the root.
    """

    name = "fashion_mnist"
    class_names = tuple(torchvision.datasets.FashionMNIST.classes)
    source = torchvision.datasets.FashionMNIST

    def read(self, root: str | None = None) -> Splits:
        """Read torchvision's files, or else Debian's, unpacked for that."""
        package = Path(self.root) / DEBIAN_FOLDER
        if not package.is_dir():
            package = Path("/") / DEBIAN_FOLDER
        if not package.is_dir() or (Path(self.root) / RAW).is_dir():
            return super().read(root)
        with TemporaryDirectory() as unpacked:
            (Path(unpacked) / RAW).mkdir(parents=True)
            for archive in package.glob("*.gz"):
                extract_archive(str(archive), str(Path(unpacked) / RAW))
            return super().read(unpacked)


class CIFAR10(Published):
    """60,000 colour pictures of 32×32 of ten kinds of things and animals; 10,000 are the test set."""

    name = "cifar10"
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    source = torchvision.datasets.CIFAR10


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
        self.samples = samples
        self.noise = noise
        self.num_classes = self.num_classes or 10

    def read(self) -> Splits:
        """Draw the patterns, then the samples."""
        generator = torch.Generator().manual_seed(self.split_seed)
        shape = (self.num_classes or 10, self.channels, self.image_size, self.image_size)
        patterns = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        held_out = max(1, self.samples // 4)
        train = self._draw(self.samples, patterns, generator)
        return Splits(train, self._draw(held_out, patterns, generator), self._draw(held_out, patterns, generator))

    def _draw(self, count: int, patterns: torch.Tensor, generator: torch.Generator) -> Labelled:
        labels = torch.arange(count) % len(patterns)
        noise = torch.randint(256, (count, *patterns.shape[1:]), generator=generator, dtype=torch.uint8)
        return Labelled(torch.lerp(patterns[labels].half(), noise.half(), self.noise).byte(), labels)


class Definitions(Loaded):
    """Train, validation and test loaders over texts as bytes, each batch padded to its longest text.

    They are the 21,844 English definitions of nouns, 6 to 431 characters long, that timm ships.
    A batch is a mapping: ``tokens`` ``(batch, length)``, and ``labels``, the token after each, -100 for padding.
    ``lightning_ga.counters.TargetTokens()`` counts the tokens that the loss is a mean over.

    Args:
        max_length: Most tokens of a text, the end included; the rest of a longer text is left out.
        test_fraction: Share of the texts that is kept for the test.
        **loading: See :class:`~lightning_ga.data.images.Loaded`.
    """

    name = "definitions"

    def __init__(
        self, *, max_length: int = 512, val_fraction: float = 0.05, test_fraction: float = 0.05, **loading: Any
    ) -> None:
        super().__init__(val_fraction=val_fraction, **loading)
        self.max_length = max_length
        self.test_fraction = test_fraction
        self.splits: dict[str, Sequence[str]] = {}

    def setup(self, stage: str) -> None:
        """Read timm's definitions once, and part them."""
        if self.splits:
            return
        texts = [
            line.partition("\t")[2] for line in (files("timm.data") / FILE).read_text(encoding="utf-8").splitlines()
        ]
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(self.split_seed)).tolist()
        val = int(self.val_fraction * len(texts))
        test = int(self.test_fraction * len(texts))
        places = {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}
        for part, chosen in places.items():
            self.splits[part] = [texts[place] for place in sorted(chosen)]

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
    return {
        "tokens": pad_sequence([text["tokens"] for text in texts], batch_first=True, padding_value=END),
        "labels": pad_sequence([text["labels"] for text in texts], batch_first=True, padding_value=IGNORED),
    }
