"""Sparse embeddings accumulate sparse, without growing with the factor; random trainings compare their weights."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import fit
from torch.utils.data import DataLoader, Dataset

from lightning_ga import AutoAccumulate
from lightning_ga.loading.largest import SAMPLES_KEPT
from lightning_ga.testing import limit_memory

MICRO_BATCH, TOKENS = 8, 64
TOUCHED = MICRO_BATCH * TOKENS  # rows, all of them by every micro-batch
LARGE = (100_000, 64)  # rows, columns


class Words(Dataset):
    """Any eight samples in a row have the same 512 words of a large vocabulary, each in an order of its own."""

    def __init__(self, size: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        words = torch.randperm(rows, generator=generator)[:TOUCHED]
        groups = [words[torch.randperm(TOUCHED, generator=generator)] for _ in range(-(-size // MICRO_BATCH))]
        self.words = torch.cat(groups).view(-1, TOKENS)[:size]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.words[index]


class Lookup(pl.LightningModule):
    """One embedding, each row of which is pulled towards a point of its own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.table = torch.nn.Embedding(*LARGE, sparse=True)

    def training_step(self, words: torch.Tensor, batch_idx: int) -> torch.Tensor:
        embedded = self.table(words)
        wanted = torch.linspace(-1, 1, embedded[0].numel()).view(embedded.shape[1:])
        return (embedded - wanted).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = self.table.weight.grad
        assert gradient.is_sparse
        assert gradient.is_coalesced()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.1, eps=1e-100)


class Meter(pl.Callback):
    """Most bytes alive in training steps beyond parameters, optimizer state and the batch."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.bytes = self.batch_bytes = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and not self.batch_bytes:
            self.batch_bytes = batch.nbytes
            self.memory.start()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        state = trainer.optimizers[0].state.values()
        tensors = [*module.parameters(), *(x for one in state for x in one.values() if isinstance(x, torch.Tensor))]
        assert len(tensors) == 3
        self.bytes = self.memory.peak_bytes - sum(tensor.nbytes for tensor in tensors) - self.batch_bytes


def trained(window: int, **arguments: Any) -> tuple[Meter, AutoAccumulate]:
    """A fit of two windows of so many samples on the large embedding; the second is metered."""
    data = Words(2 * window, LARGE[0])
    with limit_memory("10GiB") as memory:
        meter, callback = Meter(memory), AutoAccumulate(**arguments)
        fit(DataLoader(data, window), callback, meter, module=Lookup(), max_epochs=1)
    return meter, callback


def test_the_peak_does_not_grow_with_the_factor() -> None:
    """Weighed by tokens, too."""
    arguments: dict[str, Any] = {"micro_batch_size": MICRO_BATCH, "normalize": torch.numel}
    two, many = (trained(factor * MICRO_BATCH, **arguments)[0].bytes for factor in (2, 32))
    assert many <= 1.1 * two
    assert many < LARGE[0] * LARGE[1] * 4 / 10


@pytest.mark.parametrize("most", [MICRO_BATCH, 1])
def test_the_probe_asks_for_little_more_than_training_takes(most: int) -> None:
    """The gradient in a trial is coalesced, and has no more rows than a window of samples that share them can have."""
    window = 16 * MICRO_BATCH
    budget = "1GiB"  # so that the limit is looked for, whatever fits
    meter, callback = trained(window, max_micro_batch_size=most, memory_budget=budget, verify=False, cache=False)
    asked = callback.probe.peak_bytes - 3 * LARGE[0] * LARGE[1] * 4
    rows = TOUCHED * window // SAMPLES_KEPT  # of the samples that are looked at
    batch = Words(window, LARGE[0]).words.nbytes  # whole, where it is cut in the step
    assert meter.bytes <= asked <= 7 * rows * (LARGE[1] * 4 + 8) + batch  # SparseAdam makes six of these
