"""Datamodules, each small enough to read: real images and texts, generated images, and your own folders."""

from lightning_ga.data.image_folder import ImageFolder
from lightning_ga.data.images import ImageData, QuarterTurn
from lightning_ga.data.sets import CIFAR10, MNIST, Definitions, Digits, FashionMNIST, Synthetic

__all__ = [
    "CIFAR10",
    "MNIST",
    "Definitions",
    "Digits",
    "FashionMNIST",
    "ImageData",
    "ImageFolder",
    "QuarterTurn",
    "Synthetic",
]
