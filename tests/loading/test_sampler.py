"""The micro-batches of one rank, from any window on, and the seeds that are drawn for them."""

import pytest
import torch

from lightning_ga.loading.orders import FromSampler, Sequential
from lightning_ga.loading.sampler import WindowBatchSampler
from lightning_ga.plan.windows import EpochPlan, RegularWindows


@pytest.mark.parametrize("own", [False, True])
def test_seeds_of_data_workers_are_drawn_once_for_each_iteration(own: bool) -> None:
    """From the loader's generator or the global one; an iteration that yielded nothing gives its seed back."""
    generator = torch.Generator() if own else None
    cut = WindowBatchSampler(Sequential(4), rank=0, seed=1, generator=generator)
    assert cut.take_seed_back() is None

    def seed(drawn_from: torch.Generator | None) -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=drawn_from).item())

    with torch.random.fork_rng():
        assert list(cut) == []
        first = seed(generator)
        assert list(cut) == []
        assert seed(generator) != first
        again = cut.take_seed_back()
        assert seed(again) == first
        assert cut.take_seed_back() is None
        cut.arrange(0, EpochPlan(RegularWindows(4, 4), 2), start=0, enabled=True)
        assert list(cut) == [[0, 1], [2, 3]]
        assert cut.take_seed_back() is None


def test_a_sampler_that_hooks_have_made_shorter_ends_the_epoch_early() -> None:
    """As in stock Lightning."""
    indices = list(range(10))
    cut = WindowBatchSampler(FromSampler(indices), rank=0, seed=1)
    cut.arrange(0, EpochPlan(RegularWindows(10, 4), 2), start=0, enabled=True)
    del indices[5:]
    assert list(cut) == [[0, 1], [2, 3], [4]]
