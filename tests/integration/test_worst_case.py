"""Samples of many sizes: at the limit found, no batch of an epoch runs out of memory, and no larger limit would do."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from reference import StreamOf, fit
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_ga import AutoAccumulate
from lightning_ga.testing import limit_memory

SHORTEST, LONGEST = 6, 431
SIZE = 700
HIDDEN = 3  # a look at 64 samples from all over the data set sees multiples of 11 and the last
DIM = 8


def lengths(size: int = SIZE, *, longest_at: int = HIDDEN, seed: int = 0) -> list[int]:
    """From 6 to 431, the longest but one much shorter than the longest."""
    drawn = np.random.default_rng(seed).integers(SHORTEST, 200, size)
    drawn[longest_at] = LONGEST
    return [int(length) for length in drawn]


class Sequences(Dataset):
    """Sample i holds one sequence of tokens."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.arange(self.lengths[index]) % 50 + 1,)


def padded(samples: list[tuple[torch.Tensor]]) -> list[torch.Tensor]:
    """To the longest of a batch."""
    return [pad_sequence([tokens for (tokens,) in samples], batch_first=True)]


class Model(pl.LightningModule):
    """Embedded tokens, a layer, and a loss that is given."""

    def __init__(self, loss: Callable[["Model", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.layer = torch.nn.Embedding(51, DIM, padding_idx=0), torch.nn.Linear(DIM, DIM)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def attending(net: Model, tokens: torch.Tensor) -> torch.Tensor:
    """The memory of a batch grows with the square of its longest sequence."""
    hidden = net.embed(tokens)
    return net.layer(torch.softmax(hidden @ hidden.transpose(1, 2), -1) @ hidden).square().mean()


def recurrent(net: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Step by step along the longest sequence."""
    state, hidden = torch.zeros(len(tokens), DIM), net.embed(tokens)
    for step in range(0, hidden.shape[1], 20):
        state = torch.tanh(net.layer(state) + hidden[:, step])
    return state.square().mean()


def unpadded(net: Model, tokens: torch.Tensor) -> torch.Tensor:
    """A mask routes tokens: how many there are is known only in the step."""
    return net.layer(torch.relu(net.layer(net.embed(tokens)[tokens != 0]))).square().mean()


def train(
    loss: Any, dataset: Any, budget: int, micro_batch: Any = "auto", steps: int = -1, **settings: Any
) -> AutoAccumulate:
    """The callback after one epoch, or some steps of it, on an emulated device of this size."""
    effective = 64 if micro_batch == "auto" else 4 * micro_batch  # all micro-batches as large as may be, the last too
    callback = AutoAccumulate(effective, micro_batch_size=micro_batch, on_oom="raise", verify=False, cache=False)
    loader = DataLoader(dataset, batch_size=16, collate_fn=padded, **{"shuffle": True, **settings})
    with limit_memory(budget):
        fit(loader, callback, module=Model(loss), max_epochs=1, max_steps=steps)
    return callback


PADDED = {"attention": (attending, 12_000_000), "recurrence": (recurrent, 260_000)}
BUDGET = PADDED["recurrence"][1]
LARGER = pytest.mark.loader_only(
    reason="its micro-batches are larger than the loader's batches, which a step only makes smaller"
)


@LARGER
@pytest.mark.parametrize("kind", PADDED)
def test_the_one_long_sequence_is_found_and_decides(kind: str) -> None:
    """An epoch at the limit never runs out; one sample more does as soon as the longest is among them."""
    loss, budget = PADDED[kind]
    limit = train(loss, Sequences(lengths()), budget).probe.limit
    assert 2 <= limit < 64
    worst = Sequences([LONGEST] * 64)
    train(loss, worst, budget, limit)
    with pytest.raises(torch.OutOfMemoryError):
        train(loss, worst, budget, limit + 1)


@LARGER
def test_where_tokens_count_the_heaviest_samples_are_tried() -> None:
    """No two batches are alike, so sizes are tried one by one; the limit is that of the heaviest samples."""
    loss, budget = unpadded, 1_000_000
    found = train(loss, Sequences(lengths()), budget).probe
    assert found.method != "replay"
    assert 4 < found.limit < 32
    for micro_batch in (found.limit, found.limit + 1):
        first_window = [SHORTEST] * 4 * micro_batch  # after it there is state in the optimizer
        dataset = Sequences([*first_window, *sorted(lengths(), reverse=True)])
        with pytest.raises(torch.OutOfMemoryError) if micro_batch > found.limit else nullcontext():
            train(loss, dataset, budget, micro_batch, shuffle=False)


def test_workers_look_as_well_and_streams_are_read_to_their_end() -> None:
    dataset = Sequences(lengths(300, longest_at=299))
    known = train(recurrent, dataset, BUDGET, steps=1).probe.limit
    assert train(recurrent, dataset, BUDGET, steps=1, num_workers=2).probe.limit == known
    assert train(recurrent, StreamOf(dataset), BUDGET, steps=1, shuffle=None).probe.limit == known


@LARGER
def test_samples_that_there_was_no_time_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do about them; a sorted data set is safe, as its first and last samples are always seen."""
    known = train(recurrent, Sequences(lengths()), BUDGET, steps=1).probe.limit
    monkeypatch.setattr("lightning_ga.loading.largest_samples.LOOK_SECONDS", -1.0)
    with pytest.warns(UserWarning, match=r"time to look at 128 of 700: .*Sort the dataset.*max_micro_batch_size"):
        train(recurrent, Sequences(lengths()), 10**9, steps=1)
    for descending in (False, True):
        with pytest.warns(UserWarning, match="time to look at"):
            found = train(recurrent, Sequences(sorted(lengths(), reverse=descending)), BUDGET, steps=1)
        assert found.probe.limit == known


class Changing(Dataset):
    """Whatever reading may change: counters, caches, random numbers here and in a transform."""

    def __init__(self) -> None:
        self.reads = 0
        self.cache: dict[int, Any] = {}
        self.nested = {"order": [0]}
        self.rng = np.random.default_rng(3)
        self.transform = random.Random(4)
        self.drawn: list[float] = []
        self.lengths = lengths(200)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        self.reads += 1
        self.cache[index] = self.nested["order"].append(index)
        noise = self.rng.random() + random.random() + np.random.rand() + float(torch.rand(())) + self.transform.random()
        self.drawn.append(noise)
        return (torch.arange(self.lengths[index]) % 50 + 1,)


def test_looking_at_samples_changes_nothing_in_a_dataset() -> None:
    """Nor in one that it wraps: neither counters and caches nor any random number that training draws."""
    records = []
    limit: Any = "auto"
    for _ in range(2):
        dataset = Changing()
        limit = train(recurrent, Subset(dataset, range(200)), BUDGET, limit).plan.micro_batch_size
        records.append((dataset.reads, list(dataset.cache), dataset.nested, dataset.drawn))
    assert records[0] == records[1]
    assert records[0][0] >= 192  # whole windows
