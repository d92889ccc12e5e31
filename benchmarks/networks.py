"""Layers that several benchmarks build their networks from, made of timm's blocks."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class NaiveAttention(Attention):  # type: ignore[misc]
    """Causal self-attention written out: it keeps three ``(length, length)`` matrices a head."""

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        future = torch.ones(2 * hidden.shape[1:2], dtype=torch.bool, device=hidden.device).triu(1)
        scores = (query @ key.transpose(-2, -1) / self.head_dim**0.5).masked_fill(future, float("-inf"))
        mixed: Tensor = self.proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return mixed


class CausalBlocks(nn.ModuleList):
    """The blocks of a GPT on ``(batch, length, width)``, each run again in the backward pass if ``checkpointed``."""

    def __init__(self, width: int, heads: int, depth: int, *, naive: bool = False, checkpointed: bool = False) -> None:
        attention = NaiveAttention if naive else Attention
        super().__init__(Block(width, heads, qkv_bias=True, attn_layer=attention) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self:
            if self.checkpointed:
                hidden = checkpoint(block, hidden, is_causal=True, use_reentrant=False)
            else:
                hidden = block(hidden, is_causal=True)
        return hidden


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Any) -> Tensor:
        return self.function(inputs)


def perceptron(widths: Sequence[int], activation: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), activation()]
    return nn.Sequential(*layers[:-1])
