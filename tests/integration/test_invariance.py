"""One seed, one course of training, in orders that are computed too; the others are among the random trainings."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
from reference import Regression, Samples, SaveAt, cut, fit, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.loading import sampler
from lightning_ga.loading.sampler import Permutation

SIZE, EFFECTIVE, EPOCHS, SEED = 53, 12, 2, 7  # five windows an epoch, the last of 5 samples
MID_EPOCH = 7  # steps: the second window of the second epoch is done


def run(micro_batch: int, *callbacks: pl.Callback, **settings: int | Path) -> Regression:
    ours = AutoAccumulate(EFFECTIVE, micro_batch_size=micro_batch)
    return fit(DataLoader(Samples(SIZE), 4, shuffle=True), ours, *callbacks, max_epochs=EPOCHS, **settings)[0]


def test_orders_that_are_computed_are_the_same_for_any_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of very large data sets are; and after a resume."""
    monkeypatch.setattr(sampler, "LARGEST_WRITTEN_ORDER", 0)
    orders = [Permutation(SIZE, seed=SEED + epoch)[:].tolist() for epoch in range(EPOCHS)]
    windows = [sorted(window) for order in orders for window in cut(order, EFFECTIVE)]
    whole = run(EFFECTIVE, SaveAt(tmp_path / "mid_epoch.ckpt", MID_EPOCH))
    resumed = run(5, ckpt_path=tmp_path / "mid_epoch.ckpt", seed=1)
    assert [sorted(window) for window in whole.windows] == windows
    assert [sorted(window) for window in resumed.windows[MID_EPOCH:]] == windows[MID_EPOCH:]
    assert worst_error(whole.gradients, plain_loop(Samples(SIZE), windows)) <= 1e-12
    assert worst_error(resumed.gradients, whole.gradients[MID_EPOCH:]) <= 1e-12
