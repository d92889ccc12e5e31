"""Datamodules for images, each small enough to read: real data, generated data, and your own folders."""

from lightning_ga.data.cifar10 import CIFAR10
from lightning_ga.data.digits import Digits
from lightning_ga.data.image_folder import ImageFolder
from lightning_ga.data.images import ImageData, QuarterTurn
from lightning_ga.data.mnist import MNIST, FashionMNIST
from lightning_ga.data.synthetic import Synthetic

__all__ = ["CIFAR10", "MNIST", "Digits", "FashionMNIST", "ImageData", "ImageFolder", "QuarterTurn", "Synthetic"]
