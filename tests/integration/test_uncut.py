"""Training data that cannot be cut anew are cut in the step, with one line that says so."""

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference import Regression, Samples, fit, plain_loop, worst_error
from torch.utils.data import DataLoader, IterableDataset

from lightning_ga import AutoAccumulate, UserError


class Batches:
    """Any iterable of batches: 8, 8, 8, 8 and 5 samples."""

    def __init__(self, size: int = 37) -> None:
        self.samples = Samples(size)

    def __iter__(self) -> Iterator[Any]:
        indices = torch.arange(len(self.samples))
        return (self.batch(part) for part in indices.split(8))

    def batch(self, part: torch.Tensor) -> Any:
        return self.samples.inputs[part], self.samples.targets[part], part


class Sized(Batches):
    def __len__(self) -> int:
        return -(-len(self.samples) // 8)


class WholeBatches(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(Batches())


LOADERS = {
    "an iterable": Batches,
    "a sized iterable": Sized,
    "batch_size=None": lambda: DataLoader(WholeBatches(), batch_size=None),
}
WINDOWS = [list(range(0, 16)), list(range(16, 32)), list(range(32, 37))] * 2


@pytest.mark.parametrize("kind", LOADERS)
def test_gradients_are_those_of_whole_windows(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Two batches a window, each in micro-batches of three at most; the last window is ragged."""
    callback = AutoAccumulate(micro_batch_size=3)
    with caplog.at_level(logging.INFO):
        module, trainer = fit(LOADERS[kind](), callback, accumulate_grad_batches=2)
    assert worst_error(module.gradients, plain_loop(Samples(37), WINDOWS)) <= 1e-12
    assert module.windows == WINDOWS
    assert max(len(indices) for _, indices in module.micro_batches) == 3
    assert trainer.global_step == 6
    assert callback.plan.chunks == ((3, 3, 2, 3, 3, 2),)
    assert callback.plan.effective_batch_size == 16
    assert callback.exactness.cause == "exact"
    assert sum("cuts batches in the training step" in record.message for record in caplog.records) == 1


def test_the_batch_that_the_probe_looked_at_is_let_go() -> None:
    """Else a batch would lie in memory for all of training."""
    looked_at: list[Any] = []

    class Watched(Batches):
        def batch(self, part: torch.Tensor) -> Any:
            batch = super().batch(part)
            looked_at.append(weakref.ref(batch[0]))
            return batch

    class Watching(Regression):
        alive: int | None = None

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.alive = sum(reference() is not None for reference in looked_at)
            return super().training_step(batch, batch_idx)

    module, _ = fit(Watched(), AutoAccumulate(micro_batch_size=3), module=Watching(), max_epochs=1)
    assert module.alive == 1


def test_an_effective_batch_must_be_a_whole_number_of_batches() -> None:
    with pytest.raises(UserError, match=r"effective_batch_size=12 is no whole number of batches: .* of 8 samples"):
        fit(Sized(), AutoAccumulate(12, micro_batch_size=4))
    module, trainer = fit(Sized(), AutoAccumulate(24, micro_batch_size=4, verify=False))
    assert [len(window) for window in module.windows] == [24, 13] * 2
    assert trainer.accumulate_grad_batches == 3
