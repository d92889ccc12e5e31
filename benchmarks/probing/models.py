"""The models that limits are searched for: two sizes of images, two kinds of attention, and a large limit."""

from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
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


def resnet() -> nn.Module:
    """21 million parameters: with Adam, most of a small budget."""
    return timm.create_model("resnet34d", num_classes=CLASSES)


def vit() -> nn.Module:
    """Twelve layers on 144 patches; narrow, so that steps of 2 GiB are cheap on a CPU."""
    return timm.models.VisionTransformer(
        img_size=96, patch_size=8, embed_dim=96, depth=12, num_heads=3, num_classes=CLASSES
    )


def mlp() -> nn.Module:
    """Wide inputs, narrow layers: a sample takes little, so that limits are in the thousands."""
    return nn.Sequential(nn.Flatten(), *perceptron((3 * 128 * 128, 64, 64, CLASSES), nn.ReLU))


def images(size: int) -> Samples:
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
    "MLP": Model(mlp, lambda: images(128)),
}


def loss_of(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over samples, or over all words of all samples."""
    return F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten())
