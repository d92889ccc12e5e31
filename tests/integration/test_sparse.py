"""Sparse embeddings accumulate sparse, without growing with the factor, and train as dense ones do."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import fit
from torch.utils.data import DataLoader, Dataset

from lightning_ga import AutoAccumulate
from lightning_ga.loading.largest_samples import SAMPLES_KEPT
from lightning_ga.testing import limit_memory

MICRO_BATCH, TOKENS = 8, 64
TOUCHED = MICRO_BATCH * TOKENS  # rows, all of them by every micro-batch
LARGE = (100_000, 64)  # rows, columns


class Words(Dataset):
    """Any eight samples in a row hold the same 512 words of a large vocabulary, each in an order of its own."""

    def __init__(self, size: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        words = torch.randperm(rows, generator=generator)[:TOUCHED]
        groups = [words[torch.randperm(TOUCHED, generator=generator)] for _ in range(-(-size // MICRO_BATCH))]
        self.words = torch.cat(groups).view(-1, TOKENS)[:size]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.words[index]


def mean_square(embedded: torch.Tensor) -> torch.Tensor:
    """Pulls every row that is touched towards a point of its own."""
    wanted = torch.linspace(-1, 1, embedded[0].numel(), dtype=embedded.dtype).view(embedded.shape[1:])
    return (embedded - wanted).square().mean()


class Lookup(pl.LightningModule):
    """One embedding."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table

    def training_step(self, words: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return mean_square(self.table(words))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = next(self.parameters()).grad
        assert gradient.is_sparse
        assert gradient.is_coalesced()
        assert gradient._nnz() == TOUCHED

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.1, eps=1e-100)


def embedding(rows: int, columns: int, sparse: bool = True) -> torch.nn.Embedding:
    """The same rows on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Embedding(rows, columns, sparse=sparse)


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


def peak_beyond_parameters(factor: int, normalize: Any) -> int:
    """Of the second window of ``factor`` micro-batches on the large embedding."""
    window = factor * MICRO_BATCH
    data = Words(2 * window, LARGE[0])
    with limit_memory("10GiB") as memory:
        meter = Meter(memory)
        fit(
            DataLoader(data, batch_size=window),
            AutoAccumulate(micro_batch_size=MICRO_BATCH, normalize=normalize),
            meter,
            module=Lookup(embedding(*LARGE)),
            max_epochs=1,
        )
    return meter.bytes


@pytest.mark.parametrize("normalize", ["samples", torch.numel], ids=["samples", "tokens"])
def test_the_peak_does_not_grow_with_the_factor(normalize: Any) -> None:
    two, many = (peak_beyond_parameters(factor, normalize) for factor in (2, 32))
    assert many <= 1.1 * two
    assert many < LARGE[0] * LARGE[1] * 4 / 10


class LookupOfAny(Lookup):
    """Touches rows of any number in a step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert next(self.parameters()).grad.is_coalesced()


@pytest.mark.parametrize("most", [MICRO_BATCH, 1])
def test_the_probe_asks_for_little_more_than_training_takes(most: int) -> None:
    """The gradient in a trial is coalesced, and has no more rows than a window of samples that share them can have."""
    window = 16 * MICRO_BATCH
    with limit_memory("10GiB") as memory:
        callback = AutoAccumulate(max_micro_batch_size=most, verify=False, cache=False)
        meter = Meter(memory)
        data = DataLoader(Words(2 * window, LARGE[0]), batch_size=window)
        fit(data, callback, meter, module=LookupOfAny(embedding(*LARGE)), max_epochs=1)
    state = 3 * LARGE[0] * LARGE[1] * 4
    asked = callback.probe.peak_bytes - state
    rows = TOUCHED * window // SAMPLES_KEPT  # of the samples that are looked at
    batch = data.dataset.words[:window].nbytes  # type: ignore[attr-defined]  # whole, where it is cut in the step
    assert meter.bytes <= asked <= 7 * rows * (LARGE[1] * 4 + 8) + batch  # SparseAdam makes six of these
