"""Losses that compare the samples of a batch with each other."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def clip(one: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    logits, labels = temperature.exp() * normalize(one) @ normalize(other).T, torch.arange(len(one))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def simclr(one: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    both = normalize(torch.cat([one, other]))
    logits = (temperature.exp() * both @ both.T).masked_fill(torch.eye(len(both), dtype=torch.bool), -torch.inf)
    return cross_entropy(logits, torch.arange(len(both)).roll(len(one)))


def barlow_twins(one: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    one, other = ((each - each.mean(0)) / each.std(0) for each in (one, other))
    return temperature * (one.T @ other / len(one) - torch.eye(one.shape[1], dtype=one.dtype)).square().sum()


LOSSES: dict[str, Loss] = {each.__name__: each for each in (clip, simclr, barlow_twins)}
