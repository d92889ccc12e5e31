"""Small learning tasks whose loss is a mean over samples, over tokens, or couples the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from lightning_ga.plan.weights import TargetTokens

FEATURES, CLASSES = 32, 10
LENGTH, WORDS = 12, 50
IGNORED = -100  # what cross_entropy leaves out unless told otherwise

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]


class Rows(Dataset):
    """Rows of tensors, drawn in fp32 so that every precision sees the same numbers."""

    def __init__(self, *columns: Tensor, dtype: torch.dtype) -> None:
        self.columns = [column.to(dtype) if column.is_floating_point() else column for column in columns]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.columns)


@dataclass(frozen=True, slots=True)
class Task:
    """Data, network and loss; a function of the seed alone."""

    rows: Callable[[int, int, torch.dtype], Rows]
    layers: Callable[[], nn.Module]
    loss: Loss
    normalize: Any = "samples"

    def network(self, seed: int, dtype: torch.dtype, held_in: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.layers().to(held_in).to(dtype)


def images(samples: int, seed: int, dtype: torch.dtype) -> Rows:
    """Features and a class that depends on them."""
    generator = torch.Generator().manual_seed(1000 + seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    noise = torch.randn(samples, CLASSES, generator=generator)
    return Rows(inputs, (inputs[:, :CLASSES] + noise).argmax(1), dtype=dtype)


def sentences(samples: int, seed: int, dtype: torch.dtype) -> Rows:
    """Words and targets; a sentence has 1 to 12 targets, the rest is padding."""
    generator = torch.Generator().manual_seed(2000 + seed)
    words = torch.randint(WORDS, (samples, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
    targets = (words * 7 + 3) % WORDS
    return Rows(words, torch.where(torch.arange(LENGTH) < lengths, targets, IGNORED), dtype=dtype)


def bags(samples: int, seed: int, dtype: torch.dtype) -> Rows:
    """A few words of a large vocabulary, and a class."""
    generator = torch.Generator().manual_seed(3000 + seed)
    words = torch.randint(1000, (samples, 4), generator=generator)
    return Rows(words, words.sum(1) % CLASSES, dtype=dtype)


class Scores(nn.Module):
    """The mean of some word vectors, read as logits."""

    def forward(self, vectors: Tensor) -> Tensor:
        return vectors.mean(1)


def perceptron() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def normed_perceptron() -> nn.Module:
    """The same with BatchNorm, which couples the samples of a micro-batch."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, CLASSES))


def tagger() -> nn.Module:
    """A prediction for each word."""
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.Tanh(), nn.Linear(16, WORDS))


def sparse_bag() -> nn.Module:
    """An embedding with sparse gradients and nothing else: SparseAdam takes no dense ones."""
    return nn.Sequential(nn.Embedding(1000, CLASSES, sparse=True), Scores())


def cross_entropy(net: nn.Module, batch: Batch) -> Tensor:
    """Mean over samples or, where each has many targets, over all targets that count."""
    inputs, targets = batch
    return nn.functional.cross_entropy(net(inputs).flatten(0, -2), targets.flatten())


TASKS = {
    "samples": Task(images, perceptron, cross_entropy),
    "tokens": Task(sentences, tagger, cross_entropy, normalize=TargetTokens(key=1)),
    "sparse": Task(bags, sparse_bag, cross_entropy),
    "batch norm": Task(images, normed_perceptron, cross_entropy),
}


def collate(rows: Rows, indices: Sequence[int]) -> Batch:
    """The batch that a DataLoader makes of these samples."""
    return default_collate([rows[index] for index in indices])
