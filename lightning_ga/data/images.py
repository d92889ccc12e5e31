"""What all sets share, three splits and plain DataLoaders; image sets also share one chain of transforms.

Tested in tests/data/test_data.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2

from lightning_ga.errors import UserError

FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
Sample = tuple[Tensor, int]
Transform = Callable[[Any], Tensor]


class Labelled(NamedTuple):
    """Images and their classes."""

    images: Any  # a uint8 tensor ``(images, channels, height, width)``, or an array of paths of picture files
    labels: Tensor

    def subset(self, indices: list[int]) -> "Labelled":
        """The samples at some places, in that order."""
        return Labelled(self.images[indices], self.labels[indices])


class Splits(NamedTuple):
    """The three parts of a set."""

    train: Labelled
    val: Labelled
    test: Labelled


class ImageDataset(Dataset[Sample]):
    """Transforms an image when it is asked for."""

    def __init__(self, samples: Labelled, transform: Transform) -> None:
        self.samples = samples
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples.labels)

    def __getitem__(self, index: int) -> Sample:
        image = self.samples.images[index]
        if isinstance(image, str):
            image = read_picture(image)
        return self.transform(image), int(self.samples.labels[index])


def read_picture(path: str) -> Image.Image:
    """Decode a picture by what it holds, whatever its name is; formats that Pillow gives to other programs are none."""
    try:
        with Image.open(path, formats=FORMATS) as picture:
            return picture.convert("RGB")
    except Exception as error:  # Pillow's readers raise errors of many kinds on broken files
        raise UserError(f"{path!r} cannot be read ({error}): remove it, or use data.skip_broken=true.") from error


class QuarterTurn(nn.Module):
    """Turn an image by 0, 90, 180 or 270 degrees at random: for pictures without an up and a down."""

    def forward(self, image: Tensor) -> Tensor:
        """The same image, turned in its last two axes."""
        return torch.rot90(image, int(torch.randint(4, ())), (-2, -1))


def mixed(transform: Callable[..., Any], samples: Sequence[Sample]) -> Sequence[Tensor]:
    """Collate samples and mix each with its neighbour: images, and as targets probabilities ``(batch, classes)``."""
    batch: Sequence[Tensor] = transform(*default_collate(list(samples)))
    return batch


class Loaded(LightningDataModule):
    """Loaders of the ``train``, ``val`` and ``test`` part of a set.

    Args:
        batch_size: Samples of a training batch on one rank, as in any recipe.
        eval_batch_size: Samples of a validation or test batch; it changes speed and memory, and no
            result of a model that looks at each sample alone. ``SimCLR`` compares the samples of a batch.
        num_workers: Processes that load data; 0 loads in the training process.
        val_fraction: Share of the training samples that is kept for validation.
        split_seed: Seed of that choice: the split does not change with the seed of a run.
    """

    def __init__(
        self,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.split_seed = split_seed

    def dataset(self, part: str) -> Dataset[Any]:
        """The samples of a part."""
        raise NotImplementedError

    def collate(self, part: str) -> Callable[..., Any] | None:
        """What makes batches of samples; nothing for PyTorch's own."""
        return None

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of ``batch_size``."""
        return self._loader("train", self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation samples in order."""
        return self._loader("val", self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        """The test samples in order."""
        return self._loader("test", self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test samples in order."""
        return self.test_dataloader()

    def _loader(self, part: str, batch_size: int) -> DataLoader[Any]:
        return DataLoader(
            self.dataset(part),
            batch_size=batch_size,
            shuffle=part == "train",
            collate_fn=self.collate(part),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


class ImageData(Loaded):
    """Train, validation and test loaders over images; a set of its own is a subclass with one method, :meth:`read`.

    Args:
        root: Folder of the set's files, if it has any.
        download: Fetch missing files from the network.
        image_size: Height and width that images are resized to, in pixels.
        channels: 1 for grey images, 3 for colour; images are converted.
        num_classes: Number of classes; counted in the set when left out.
        mean: Mean of the pixels (0 to 1), one number or one per channel.
        std: Standard deviation of the pixels, likewise.
        augment: Transforms of training images, e.g. from ``torchvision.transforms.v2``.
        rand_augment: Magnitude of torchvision's RandAugment behind these, 0 to 30; ``None`` leaves it out.
        mixup: Alpha of mixup: each sample of a training batch is mixed with its neighbour; 0 leaves it out.
        cutmix: Alpha of CutMix, likewise; of the two one is drawn for each batch.
        **loading: See :class:`Loaded`; validation has the same mix of classes.
    """

    name = "images"
    class_names: Sequence[str] = ()  # one for each class

    def __init__(
        self,
        *,
        root: str = "data",
        download: bool = False,
        image_size: int = 32,
        channels: int = 1,
        num_classes: int | None = None,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
        augment: Sequence[Transform] = (),
        rand_augment: int | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.root = root
        self.download = download
        self.image_size = image_size
        self.channels = channels
        self.num_classes = num_classes
        self.mean = mean
        self.std = std
        self.augment = [*augment]
        if rand_augment is not None:
            self.augment.append(v2.RandAugment(magnitude=rand_augment))
        self.mixup = mixup
        self.cutmix = cutmix
        self.splits: Splits | None = None

    def read(self) -> Splits:
        """Load the set into memory, or list its files; a UserError says how to get what is missing."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Read the set once; refuse classes beyond ``num_classes``, on which the loss would fail."""
        if self.splits is not None:
            return
        splits = self.read()
        found = max(int(part.labels.max()) + 1 for part in splits if len(part.labels))
        self.num_classes = self.num_classes or found
        if found > self.num_classes:
            raise UserError(
                f"data.num_classes={self.num_classes} must be at least {found}, the classes of {self.name}."
            )
        self.splits = splits

    def transform(self, augment: Sequence[Transform] = ()) -> Transform:
        """From a raw image to a float tensor ``(channels, image_size, image_size)``."""
        colour = v2.Grayscale() if self.channels == 1 else v2.RGB()
        resize = v2.Resize([self.image_size, self.image_size], antialias=True)
        normalize = v2.Normalize(self._per_channel(self.mean), self._per_channel(self.std))
        to_float = v2.ToDtype(torch.float32, scale=True)
        chain: Transform = v2.Compose([v2.ToImage(), colour, resize, *augment, to_float, normalize, v2.ToPureTensor()])
        return chain

    def hold_out(self, samples: Labelled, fraction: float) -> tuple[Labelled, Labelled]:
        """Split off a share of the samples, in the same mix of classes: what stays, what is held out."""
        places = range(len(samples.labels))
        labels = samples.labels.tolist()
        try:
            kept, held = train_test_split(places, test_size=fraction, stratify=labels, random_state=self.split_seed)
        except ValueError as error:
            raise UserError(
                f"A share of {fraction} of {len(labels)} samples cannot be held out ({error}): add samples, or change "
                "data.val_fraction or data.test_fraction."
            ) from error
        return samples.subset(sorted(kept)), samples.subset(sorted(held))

    def dataset(self, part: str) -> Dataset[Sample]:
        """The samples of a part, those of training augmented."""
        assert self.splits is not None, "setup() comes first"
        augment = self.augment if part == "train" else ()
        return ImageDataset(getattr(self.splits, part), self.transform(augment))

    def collate(self, part: str) -> Callable[..., Any] | None:
        """What mixes the samples of training batches, if anything does."""
        if min(self.mixup or 0, self.cutmix or 0) < 0:  # torch does not look, once it has compiled something
            raise UserError(
                f"data.mixup={self.mixup} and data.cutmix={self.cutmix} must be at least 0; 0 mixes nothing."
            )
        mixers: list[Any] = []
        if self.mixup:
            mixers.append(v2.MixUp(alpha=float(self.mixup), num_classes=self.num_classes))
        if self.cutmix:
            mixers.append(v2.CutMix(alpha=float(self.cutmix), num_classes=self.num_classes))
        if not mixers or part != "train":
            return None
        return partial(mixed, v2.RandomChoice(mixers))

    def _per_channel(self, value: float | Sequence[float]) -> list[float]:
        values = np.ravel(value)
        if len(values) == self.channels:
            return [*values.tolist()]
        return [float(values.mean())]  # which ``Normalize`` takes for every channel
