"""A mean over samples that does not hide numbers that are not finite."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class SampleMean(Metric):
    """Mean of values that are means over some samples each.

    ``torchmetrics.MeanMetric`` leaves NaN out, so that a training that diverged looks well; told not to, it
    forgets the weights (1.9).

    Examples:
        >>> mean = SampleMean()
        >>> mean.update(torch.tensor(1.0), 3)
        >>> mean.update(torch.tensor(2.0), 1)
        >>> mean.compute()
        tensor(1.2500)
    """

    full_state_update = False
    total: Tensor
    samples: Tensor

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor, samples: int) -> None:
        """Count a mean over so many samples."""
        self.total += value * samples
        self.samples += samples

    def compute(self) -> Tensor:
        """The mean over all samples."""
        return self.total / self.samples
