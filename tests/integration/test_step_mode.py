"""``micro_batching="step"``: batches are cut in the training step; tests/differential compares what is seen of it."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import Regression, Samples, fit, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

SAMPLES, BATCH = 45, 8  # a ragged batch, in a ragged window where the factor is 2 or 4


def in_step(micro_batch: int, **arguments: Any) -> AutoAccumulate:
    return AutoAccumulate(micro_batch_size=micro_batch, micro_batching="step", verify=False, **arguments)


def loader(size: int = SAMPLES, batch_size: int = BATCH, **settings: Any) -> "DataLoader[Any]":
    return DataLoader(Samples(size), batch_size=batch_size, **settings)


def test_a_batch_without_such_hooks_stays_on_the_host_and_travels_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    real = pl.LightningModule._apply_batch_transfer_handler

    def noted(module: Any, batch: Any, *arguments: Any, **settings: Any) -> Any:
        moved.append(len(batch[0]))
        return real(module, batch, *arguments, **settings)

    monkeypatch.setattr(pl.LightningModule, "_apply_batch_transfer_handler", noted)
    fit(loader(), in_step(3), max_epochs=1)
    # On a CPU there is nothing to move: the batch is there.
    assert moved == ([3, 3, 2] * 5 + [3, 2] if torch.cuda.is_available() else [8] * 5 + [5])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_steps_that_return_nothing() -> None:
    """For a piece: the mean is over the others. For a batch: it is passed over, as in stock Lightning."""

    class Skipping(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kept = not set(batch[2].tolist()) & self.skipped
            return super().training_step(batch, batch_idx) if kept else None

    module = Skipping()
    module.skipped = {3, 4, 5, *range(8, 16)}  # the second piece, and a whole batch
    fit(loader(), in_step(3), module=module, max_epochs=1, accumulate_grad_batches=2)
    windows = [[0, 1, 2, 6, 7], list(range(16, 32)), list(range(32, 45))]
    assert worst_error(module.gradients, plain_loop(Samples(SAMPLES), windows)) <= 1e-12
