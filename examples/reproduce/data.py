"""Which data are at hand: a recipe's own set, or what stands in for it."""

import math
from functools import cache

from lightning_ga.data import CIFAR10, MNIST, Digits, FashionMNIST, ImageData
from lightning_ga.errors import UserError

SETS: dict[str, tuple[str, type[ImageData]]] = {
    "cifar10": ("CIFAR-10", CIFAR10),
    "mnist": ("MNIST", MNIST),
    "fashion_mnist": ("Fashion-MNIST", FashionMNIST),
    "digits": ("scikit-learn's digits", Digits),
}


@cache
def first_at_hand(root: str, *names: str) -> str:
    """Find the first of some sets whose files are there; digits always are."""
    for name in names:
        try:
            SETS[name][1](root=root).read()
        except UserError:
            continue
        return name
    return "digits"


@cache
def samples(root: str, name: str) -> int:
    """Count the images of a set that training and validation share."""
    splits = SETS[name][1](root=root).read()
    return len(splits.train.labels) + len(splits.val.labels)


def subset(root: str, name: str, *, train: int | None) -> list[str]:
    """Choose a set on the command line, and how many of its images are trained on; validation has the others.

    Args:
        root: Folder in which data sets are looked for.
        name: The set.
        train: Images to train on; ``None``, or more than the set has to spare, leaves the set as it is.
    """
    known = samples(root, name)
    return [f"data={name}", *([] if is_all(train, known) else [f"data.val_fraction={held_out(train, known):.6f}"])]


def described(root: str, name: str, *, train: int | None) -> str:
    """Name a set, and how much of it was trained on."""
    title, known = SETS[name][0], samples(root, name)
    if is_all(train, known):
        return title
    return f"{title} ({trained_on(root, name, train=train):,} of {known:,} training images)"


def trained_on(root: str, name: str, *, train: int | None) -> int:
    """Count the images that are trained on, as scikit-learn splits them; a tenth is held out by default."""
    known = samples(root, name)
    return known - math.ceil((0.1 if is_all(train, known) else held_out(train, known)) * known)


def held_out(train: int, known: int) -> float:
    """Give the share that is validated on, in the digits in which it is typed."""
    return round(1 - train / known, 6)


def is_all(train: int | None, known: int) -> bool:
    """Tell whether so many images are no part of a set that leaves enough to validate on."""
    return train is None or train > 0.9 * known
