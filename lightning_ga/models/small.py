"""Small classifiers: a perceptron, exact to the last digits when accumulated, and a table of hashed patches."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn

from lightning_ga.models.classifier import Classifier

LEVELS, PATCH, STRIDE = 4, 3, 2  # grey levels; pixels of a patch, and from one patch to the next
SPREAD = 2_654_435_761, 40_503  # odd numbers without a factor in common with usual sizes of tables


class MLPClassifier(Classifier):
    """Flattened pixels, ReLU layers, logits; 784-512-256-128-10 for MNIST at 28×28.

    Args:
        hidden: Width of each hidden layer.
        num_classes: Number of classes.
        in_channels: Channels of an image.
        image_size: Height and width of an image, in pixels.
        **training: ``optimizer``, ``lr_scheduler`` and ``label_smoothing`` of :class:`Classifier`.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (512, 256, 128),
        *,
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int = 28,
        **training: Any,
    ) -> None:
        hidden = list(hidden)
        widths = [in_channels * image_size**2, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        net = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))
        super().__init__(net, num_classes, **training)
        self.save_hyperparameters("hidden", "num_classes", "in_channels", "image_size")


class HashedPatches(nn.Module):
    """Give each patch of a picture, at its place, a number of a table by the hashing trick.

    Pixels are rounded to a few grey levels, so that patches that look alike are the same patch. Different patches
    may share one of the ``rows``.

    Examples:
        >>> HashedPatches(1000)(torch.zeros(2, 1, 5, 5)).shape  # two rows of two patches
        torch.Size([2, 4])
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, images: Tensor) -> Tensor:
        """Return row numbers ``(batch, patches)`` of images ``(batch, channels, height, width)`` from 0 to 1."""
        grey = images.detach().float().mean(dim=1, keepdim=True)
        level = (grey * LEVELS).floor().clamp(0, LEVELS - 1)
        patches = F.unfold(level, PATCH, stride=STRIDE).long()  # (batch, pixels of a patch, patches)
        digits = LEVELS ** torch.arange(PATCH**2, device=images.device)
        looks = (patches * digits[:, None]).sum(dim=1)
        places = torch.arange(looks.shape[1], device=images.device)
        return (looks * SPREAD[0] + places * SPREAD[1]) % self.rows


class HashedPatchClassifier(Classifier):
    """The mean of the embeddings of a picture's patches, and a linear layer.

    A batch touches a small part of the table: with ``sparse`` its gradient holds these rows alone, and the
    optimizer has to take such gradients (SGD without momentum and weight decay, Adagrad).

    Args:
        rows: Rows of the table.
        features: Width of the table.
        sparse: Whether the table's gradient is sparse.
        num_classes: Number of classes.
        **training: ``optimizer``, ``lr_scheduler`` and ``label_smoothing`` of :class:`Classifier`.
    """

    def __init__(
        self, rows: int = 200_000, features: int = 64, *, sparse: bool = True, num_classes: int = 10, **training: Any
    ) -> None:
        table = nn.EmbeddingBag(rows, features, mode="mean", sparse=sparse)
        net = nn.Sequential(HashedPatches(rows), table, nn.Linear(features, num_classes))
        super().__init__(net, num_classes, **training)
        self.save_hyperparameters("rows", "features", "sparse", "num_classes")
