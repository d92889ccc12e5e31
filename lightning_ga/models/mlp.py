"""A multi-layer perceptron: every sample is independent, so accumulation is exact to the last digits."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from lightning_ga.models.classifier import Classifier


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
