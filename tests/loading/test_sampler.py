"""The micro-batches of one rank, from any window on."""

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
