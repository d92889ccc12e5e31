"""The micro-batches of one rank, from any window on."""

import torch

from lightning_ga.loading.orders import FromSampler
from lightning_ga.loading.sampler import WindowBatchSampler
from lightning_ga.plan.windows import EpochPlan, RegularWindows


def test_a_sampler_that_hooks_have_made_shorter_ends_the_epoch_early() -> None:
    """As in stock Lightning."""
    indices = list(range(10))
    cut = WindowBatchSampler(FromSampler(indices, seed=1), rank=0)
    cut.arrange(0, EpochPlan(RegularWindows(10, 4), 2), start=0, enabled=True)
    del indices[5:]
    assert list(cut) == [[0, 1], [2, 3], [4]]


def test_a_dataset_gets_what_its_sampler_yields() -> None:
    """Tensors, too: it may call ``index.item()``."""
    indices = list(torch.arange(4))
    cut = WindowBatchSampler(FromSampler(indices, seed=1), rank=0)
    cut.arrange(0, EpochPlan(RegularWindows(4, 4), 2), start=0, enabled=True)
    assert [[index.item() for index in batch] for batch in cut] == [[0, 1], [2, 3]]
