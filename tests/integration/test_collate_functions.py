"""The gradients of a plain loop, whatever the collate function does with samples; the loader cuts."""

from typing import Any

import pytest
from reference import Samples, fit, worst_error
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_ga import AutoAccumulate


class ReadyMade(Dataset[Any]):
    """Batches of three samples."""

    def __init__(self, size: int) -> None:
        self.samples = Samples(3 * size)

    def __len__(self) -> int:
        return len(self.samples) // 3

    def __getitem__(self, index: int) -> Any:
        return default_collate([self.samples[3 * index + row] for row in range(3)])


def first_of(batch: list[Any]) -> Any:
    return batch[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_that_takes_the_first_of_its_samples(workers: int) -> None:
    """Samples of several batches are not given to it at once: it would leave all but one out."""
    loader = DataLoader(ReadyMade(12), batch_size=1, collate_fn=first_of, num_workers=workers)
    stock, _ = fit(loader, accumulate_grad_batches=4, max_epochs=1)
    accumulate = AutoAccumulate()
    ours, _ = fit(loader, accumulate, accumulate_grad_batches=4, max_epochs=1)
    assert ours.micro_batches == stock.micro_batches
    assert worst_error(ours.gradients, stock.gradients) <= 1e-12
    assert accumulate.exactness is not None
    assert accumulate.exactness.cause in ("exact", "unmeasured")
