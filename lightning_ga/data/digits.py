"""scikit-learn's digits: 1,797 real handwritten digits of 8×8 pixels that need no download."""

from typing import Any

import torch
from sklearn.datasets import load_digits

from lightning_ga.data.images import ImageData, Labelled, Splits


class Digits(ImageData):
    """A stratified train/validation/test split of scikit-learn's digits.

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
