"""Sequences of unequal length: a dataset, its padded batches, and a model that is masked rightly."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from reference import Regression, flat_gradient
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

WORDS, WIDTH, LONGEST = 11, 6, 24


class Texts(Dataset):
    """Samples of words, a target for each, and a number. Most are short; halves of a first batch differ in words."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        skewed = torch.rand(size, generator=generator).pow(3)
        self.lengths = [1 + int((LONGEST - 1) * share) for share in skewed]
        self.lengths[size // 2] = LONGEST
        words = [torch.randint(1, WORDS, (length,), generator=generator) for length in self.lengths]
        targets = [torch.randint(0, WORDS, (length,), generator=generator) for length in self.lengths]
        self.samples = [{"words": w, "labels": t, "number": i} for i, (w, t) in enumerate(zip(words, targets))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def pad(texts: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest text."""
    columns = {"words": 0, "labels": -100}
    padded = {
        name: pad_sequence([text[name] for text in texts], batch_first=True, padding_value=fill)
        for name, fill in columns.items()
    }
    return {**padded, "number": torch.tensor([text["number"] for text in texts])}


class Reader(torch.nn.Module):
    """Attention over the words that are no padding; the logits of each word's target."""

    def __init__(self, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.mix, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.embed(words)).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2)).masked_fill((words == 0)[:, None], float("-inf"))
        return self.out(scores.softmax(-1) @ value)

    def losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each word; zero for padding."""
        logits = self(batch["words"]).transpose(1, 2)
        return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


def reader() -> Reader:
    """The same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Reader().double()


def mean_loss(net: Reader, batch: dict[str, torch.Tensor], by: str) -> torch.Tensor:
    """A mean over samples, each the mean of its words, or over all words."""
    losses, real = net.losses(batch), batch["labels"] != -100
    return losses.sum() / real.sum() if by == "words" else (losses.sum(1) / real.sum(1)).mean()


class Reading(Regression):
    """Keeps the shape of every micro-batch, too."""

    def __init__(self, by: str = "samples") -> None:
        super().__init__()
        self.net, self.by = reader(), by
        self.shapes: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.micro_batches.append((self.global_step, batch["number"].tolist()))
        self.shapes.append(tuple(batch["words"].shape))
        return mean_loss(self.net, batch, self.by)


def plain_gradients(data: Texts, windows: Iterable[Sequence[int]], by: str = "samples") -> list[torch.Tensor]:
    """Gradients of plain SGD in which each window is one padded batch."""
    net, gradients = reader(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for window in windows:
        optimizer.zero_grad()
        mean_loss(net, pad([data[number] for number in window]), by).backward()
        gradients.append(flat_gradient(net))
        optimizer.step()
    return gradients
