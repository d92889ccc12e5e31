"""The micro-batches of one rank, from any window on, and the seeds that are drawn for them."""

import pytest
import torch

from lightning_ga.loading.orders import FromSampler, Sequential, Shuffled
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


def test_a_shuffled_order_draws_its_seed_once_an_epoch() -> None:
    """As torch's own sampler, and not again when the epoch goes on after an error."""
    cut = WindowBatchSampler(Shuffled(8), rank=0, seed=1, draws=True)
    plan = EpochPlan(RegularWindows(8, 4), 2)
    states = []
    with torch.random.fork_rng():
        for epoch, start in ((0, 0), (0, 1), (1, 0)):
            cut.arrange(epoch, plan, start=start, enabled=True)
            before = torch.get_rng_state()
            assert len(list(cut)) == 4 - 2 * start
            states.append(torch.equal(torch.get_rng_state(), before))
    assert states == [False, True, False]


def test_a_sampler_that_hooks_have_made_shorter_ends_the_epoch_early() -> None:
    """As in stock Lightning."""
    indices = list(range(10))
    cut = WindowBatchSampler(FromSampler(indices), rank=0, seed=1)
    cut.arrange(0, EpochPlan(RegularWindows(10, 4), 2), start=0, enabled=True)
    del indices[5:]
    assert list(cut) == [[0, 1], [2, 3], [4]]
