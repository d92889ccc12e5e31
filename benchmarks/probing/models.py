"""The models that limits are searched for: two sizes of images, two kinds of attention, and a large limit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import timm
import torch
from torch import Tensor, nn

from benchmarks.networks import CausalBlocks, perceptron

CLASSES, WORDS, LENGTH = 10, 256, 128
POOL = 8  # distinct samples that batches are filled with

Samples = tuple[Tensor, ...]


class GPT(nn.Module):
    """A small language model: words ``(batch, length)`` to logits ``(batch, length, words)``."""

    def __init__(self, *, naive: bool, layers: int = 8, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = CausalBlocks(width, heads, layers, naive=naive)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, WORDS))

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.words(words) + self.positions[: words.shape[1]]))
        return logits


def vit() -> nn.Module:
    """Twelve layers on 144 patches; narrow, so that steps of 2 GiB are cheap on a CPU."""
    return timm.models.VisionTransformer(
        img_size=96, patch_size=8, embed_dim=96, depth=12, num_heads=3, num_classes=CLASSES
    )


def mlp() -> nn.Module:
    """Wide inputs, narrow layers: a sample takes little, so that limits are in the thousands."""
    return nn.Sequential(nn.Flatten(), *perceptron((3 * 128 * 128, 64, 64, CLASSES), nn.ReLU))


def images(size: int, classes: int = CLASSES) -> Samples:
    return torch.randn(POOL, 3, size, size), torch.arange(POOL) % classes


def sentences(words: int = WORDS, length: int = LENGTH) -> Samples:
    """Words, and the words that follow them."""
    drawn = torch.randint(words, (POOL, length + 1))
    return drawn[:, :-1], drawn[:, 1:]


@dataclass(frozen=True, slots=True)
class Model:
    """A network and samples for it."""

    build: Callable[[], nn.Module]
    samples: Callable[[], Samples]
    peers_to_gib: float = 2
    quick_gib: float = 0.25


resnet = partial(timm.create_model, "resnet34d", num_classes=CLASSES)  # with Adam, most of a small budget

MODELS = {
    "resnet34d 32": Model(resnet, partial(images, 32), peers_to_gib=0.5, quick_gib=0.4),
    "resnet34d 224": Model(resnet, partial(images, 224), peers_to_gib=0.5, quick_gib=0.5),
    "ViT": Model(vit, partial(images, 96), peers_to_gib=1),
    "GPT, SDPA": Model(partial(GPT, naive=False), sentences),
    "GPT, naive": Model(partial(GPT, naive=True), sentences),
    "MLP": Model(mlp, partial(images, 128)),
}
