"""Losses that are a mean over tokens, steps that are skipped, sparse gradients: exact all the same."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import cut, fit, flat_gradient, worst_error
from torch.utils.data import DataLoader, Dataset

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.plan.weights import AttentionMaskTokens, TargetTokens

LENGTH, WORDS = 9, 11


class Sequences(Dataset):
    """Sequences of 0 to 9 targets; a few have none."""

    def __init__(self, size: int, empty: Sequence[int] = ()) -> None:
        generator = torch.Generator().manual_seed(2)
        self.words = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (size, 1), generator=generator)
        lengths[list(empty)] = 0
        self.mask = torch.arange(LENGTH) < lengths

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words, mask = self.words[index], self.mask[index]
        return {"words": words, "labels": torch.where(mask, words, -100), "attention_mask": mask.long()}


class Tagger(pl.LightningModule):
    """Its loss is a mean over targets, by PyTorch's own reduction or by hand; ``skip``: passes that return None."""

    def __init__(self, by_hand: bool = False, sparse: bool = False, skip: Sequence[int] = ()) -> None:
        super().__init__()
        self.net = tagger(sparse)
        self.by_hand, self.skip = by_hand, skip
        self.passes = 0
        self.gradients: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        self.passes += 1
        return None if self.passes - 1 in self.skip else token_loss(self.net, batch, self.by_hand)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.net[0].weight.grad is not None:
            self.gradients.append(flat_gradient(self.net))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def tagger(sparse: bool = False) -> torch.nn.Sequential:
    """The same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(WORDS, 6, sparse=sparse), torch.nn.Linear(6, WORDS)).double()


def token_loss(net: torch.nn.Module, batch: Any, by_hand: bool) -> torch.Tensor:
    """A mean over targets."""
    logits, labels = net(batch["words"]).flatten(0, 1), batch["labels"].flatten()
    if not by_hand:
        return torch.nn.functional.cross_entropy(logits, labels)
    losses = torch.nn.functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    mask = (labels != -100).double()
    return (losses * mask).sum() / mask.sum()


def plain_tagger(dataset: Sequences, windows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Plain SGD, each window in one batch."""
    net = tagger()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gradients = []
    for window in windows:
        optimizer.zero_grad()
        batch = torch.utils.data.default_collate([dataset[index] for index in window])
        token_loss(net, batch, by_hand=False).backward()
        gradients.append(flat_gradient(net))
        optimizer.step()
    return gradients


@pytest.mark.parametrize("counter", [TargetTokens(), AttentionMaskTokens(), lambda b: (b["labels"] >= 0).sum()])
@pytest.mark.parametrize("micro_batch", [1, 3, 5, 16])
def test_a_mean_over_tokens_is_exact(counter: Any, micro_batch: int) -> None:
    """Whatever the counts are, ragged windows included."""
    dataset = Sequences(43)
    module, _ = fit(
        DataLoader(dataset, batch_size=16),
        AutoAccumulate(micro_batch_size=micro_batch, normalize=counter),
        module=Tagger(),
        max_epochs=2,
    )
    assert worst_error(module.gradients, plain_tagger(dataset, cut(range(43), 16) * 2)) <= 1e-12


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("empty", [(0, 1), (2, 3), (6, 7)])
def test_a_micro_batch_without_tokens_is_left_out(by_hand: bool, empty: Sequence[int]) -> None:
    """First, between and last in its window, and where a mean over nothing is NaN."""
    dataset = Sequences(16, empty)
    module, _ = fit(
        DataLoader(dataset, batch_size=8),
        AutoAccumulate(micro_batch_size=2, normalize=TargetTokens()),
        module=Tagger(by_hand),
        max_epochs=1,
    )
    assert worst_error(module.gradients, plain_tagger(dataset, cut(range(16), 8))) <= 1e-12


def test_a_window_without_tokens_is_an_error() -> None:
    """Rather than a step of NaN."""
    with pytest.raises(UserError, match="counted 0 in all micro-batches of a window"):
        fit(
            DataLoader(Sequences(16, range(8)), batch_size=8),
            AutoAccumulate(micro_batch_size=2, normalize=TargetTokens()),
            module=Tagger(),
        )
