"""The models that limits are searched for: two sizes of images, two kinds of attention, and a large limit."""

from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn

CLASSES, WORDS, LENGTH = 10, 256, 128
POOL = 8  # distinct samples that batches are filled with

Samples = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal self-attention on ``(batch, length, width)``, by a fused kernel or written out."""

    def __init__(self, width: int, heads: int, *, naive: bool) -> None:
        super().__init__()
        self.heads, self.naive = heads, naive
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("future", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend to earlier positions; naive keeps three ``(length, length)`` matrices a head."""
        batch, length, width = hidden.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.inputs(hidden).view(shape).permute(2, 0, 3, 1, 4)
        if self.naive:
            scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
            mixed = scores.masked_fill(self.future, float("-inf")).softmax(-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One layer of a GPT: attention and a perceptron, each on a normalized residual stream."""

    def __init__(self, width: int, heads: int, *, naive: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, naive=naive)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden))
        return hidden + self.perceptron(self.second(hidden))


class GPT(nn.Module):
    """A small language model: words ``(batch, length)`` to logits ``(batch, length, words)``."""

    def __init__(self, *, naive: bool, layers: int = 8, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads, naive=naive) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, WORDS))

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.words(words) + self.positions))
        return logits


def resnet() -> nn.Module:
    """21 million parameters: with Adam, most of a small budget."""
    return timm.create_model("resnet34d", num_classes=CLASSES)


def vit() -> nn.Module:
    """Twelve layers on 144 patches; narrow, so that steps of 2 GiB are cheap on a CPU."""
    return timm.models.VisionTransformer(
        img_size=96, patch_size=8, embed_dim=96, depth=12, num_heads=3, num_classes=CLASSES
    )


def perceptron() -> nn.Module:
    """Wide inputs, narrow layers: a sample takes little, so that limits are in the thousands."""
    layers = (nn.Linear(3 * 128 * 128, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    return nn.Sequential(nn.Flatten(), *layers)


def images(size: int) -> Samples:
    """Images and classes."""
    return torch.randn(POOL, 3, size, size), torch.arange(POOL) % CLASSES


def sentences() -> Samples:
    """Words, and the words that follow them."""
    words = torch.randint(WORDS, (POOL, LENGTH + 1))
    return words[:, :-1], words[:, 1:]


@dataclass(frozen=True, slots=True)
class Model:
    """A network and samples for it."""

    build: Callable[[], nn.Module]
    samples: Callable[[], Samples]
    peers_to_gib: float = 2
    quick_gib: float = 0.25


MODELS = {
    "resnet34d 32": Model(resnet, lambda: images(32), peers_to_gib=0.5, quick_gib=0.4),
    "resnet34d 224": Model(resnet, lambda: images(224), peers_to_gib=0.5, quick_gib=0.5),
    "ViT": Model(vit, lambda: images(96), peers_to_gib=1),
    "GPT, SDPA": Model(lambda: GPT(naive=False), sentences),
    "GPT, naive": Model(lambda: GPT(naive=True), sentences),
    "MLP": Model(perceptron, lambda: images(128)),
}


def loss_of(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over samples, or over all words of all samples."""
    return F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten())
