"""Networks that nobody named: families of models, each with widths, depths and lengths drawn at random."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.probing.models import POOL, Model

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A model that was drawn."""

    name: str
    build: Callable[[], nn.Module]
    samples: Callable[[], Batch]


class Blocks(nn.Module):
    """Blocks one after another, each run again in the backward pass if ``checkpointed``."""

    def __init__(self, blocks: Sequence[nn.Module], *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks, self.checkpointed = nn.ModuleList(blocks), checkpointed

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return hidden


class Residual(nn.Module):
    """Adds what a part makes of its normalized input."""

    def __init__(self, width: int, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(width), part

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.part(self.norm(hidden))


class Attention(nn.Module):
    """Self-attention, by a fused kernel or written out."""

    def __init__(self, width: int, heads: int, *, naive: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.naive, self.causal = heads, naive, causal
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:2], 3, self.heads, -1)
        query, key, value = self.inputs(hidden).view(shape).permute(2, 0, 3, 1, 4)
        if self.naive:
            mixed = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Mixing(nn.Module):
    """Mixes the positions of ``(batch, length, width)`` by a perceptron."""

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        self.perceptron = perceptron((length, hidden, length))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.perceptron(hidden.transpose(1, 2)).transpose(1, 2)


class Patches(nn.Module):
    """Images as sequences of patches: by a convolution, or cut out and projected."""

    def __init__(self, patch: int, width: int, *, by_convolution: bool) -> None:
        super().__init__()
        self.patch = patch
        kind = nn.Conv2d(3, width, patch, patch) if by_convolution else nn.Linear(3 * patch * patch, width)
        self.project = kind

    def forward(self, images: Tensor) -> Tensor:
        if isinstance(self.project, nn.Conv2d):
            return self.project(images).flatten(2).transpose(1, 2)
        return self.project(F.unfold(images, self.patch, stride=self.patch).transpose(1, 2))


class Classifier(nn.Module):
    """The mean cross-entropy of what layers make of the input; targets may be weighted one by one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        logits: Tensor = self.layers(inputs)
        if targets.ndim == 3:
            return F.cross_entropy(logits, targets)
        if weights is None:
            return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()


class MeanOf(nn.Module):
    """The mean over the length of ``(batch, length, width)``."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(1)


class Recurrent(nn.Module):
    """An LSTM or GRU without its state."""

    def __init__(self, kind: str, width: int, layers: int) -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(width, width, layers, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.cells(hidden)[0]  # type: ignore[no-any-return]


class Towers(nn.Module):
    """Every sample of a batch against every other: a matrix of similarities that grows with the batch's square."""

    def __init__(self, first: nn.Module, second: nn.Module, *, normalized: bool, both_ways: bool) -> None:
        super().__init__()
        self.first, self.second, self.normalized, self.both_ways = first, second, normalized, both_ways

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, other = self.first(left), self.second(right)
        if self.normalized:
            one, other = F.normalize(one, dim=-1), F.normalize(other, dim=-1)
        similarities = one @ other.T / 0.07
        classes = torch.arange(len(similarities), device=similarities.device)
        loss = F.cross_entropy(similarities, classes)
        return loss + F.cross_entropy(similarities.T, classes) if self.both_ways else loss


class UNet(nn.Module):
    """Halves images again and again, then doubles them, with connections between equal sizes."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        inputs = (3, *widths[:-1])
        self.down = nn.ModuleList(convolution(a, b) for a, b in zip(inputs, widths))
        pairs = zip(widths[:0:-1], widths[-2::-1])
        self.up = nn.ModuleList(convolution(a + b, b) for a, b in pairs)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Classes of every pixel."""
        kept = []
        for layer in self.down:
            images = layer(images)
            kept.append(images)
            images = F.max_pool2d(images, 2)
        images = kept.pop()
        for layer in self.up:
            images = F.interpolate(images, scale_factor=2)
            images = layer(torch.cat((images, kept.pop()), 1))
        return self.head(images)  # type: ignore[no-any-return]


class Fields(nn.Module):
    """Embeddings of many columns, and a perceptron on them."""

    def __init__(self, words: int, width: int, columns: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.perceptron = perceptron((columns * width, hidden, hidden, 2))

    def forward(self, columns: Tensor) -> Tensor:
        return self.perceptron(self.table(columns).flatten(1))  # type: ignore[no-any-return]


def perceptron(widths: Sequence[int], activation: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers with activations between."""
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), activation()]
    return nn.Sequential(*layers[:-1])


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A convolution with its normalization."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU())


def _transformer(
    draw: Random, width: int, depth: int, *, causal: bool, length: int = 0, checkpointed: bool = False
) -> Blocks:
    naive, heads, hidden = draw.random() < 0.4, draw.choice((2, 4, 8)), draw.choice((2, 4)) * width
    blocks: list[nn.Module] = []
    for _ in range(depth):
        mixing = Mixing(length, hidden) if length else Attention(width, heads, naive=naive, causal=causal)
        parts = Residual(width, mixing), Residual(width, perceptron((width, hidden, width)))
        blocks.append(nn.Sequential(*parts))
    return Blocks(blocks, checkpointed=checkpointed)


def _images(size: int, classes: int) -> Batch:
    return torch.randn(POOL, 3, size, size), torch.arange(POOL) % classes


def _vectors(width: int, classes: int) -> Batch:
    return torch.randn(POOL, width), torch.arange(POOL) % classes


def _pairs(width: int) -> Batch:
    return torch.randn(POOL, width), torch.randn(POOL, width)


def _sentences(words: int, length: int, *, weighted: bool = False) -> Batch:
    drawn = torch.randint(words, (POOL, length + 1))
    return (drawn[:, :-1], drawn[:, 1:], torch.rand(POOL, length)) if weighted else (drawn[:, :-1], drawn[:, 1:])


def _maps(size: int, classes: int) -> Batch:
    return torch.randn(POOL, 3, size, size), torch.randint(classes, (POOL, size, size))


def mlp(draw: Random) -> Drawn:
    """Perceptrons, narrow to wide."""
    inputs, width, depth = draw.choice((64, 784, 3072, 20000)), draw.choice((128, 500, 1024, 4096)), draw.randint(1, 12)
    dropout, activation = draw.random() < 0.5, draw.choice((nn.ReLU, nn.GELU, nn.SiLU))

    def build() -> nn.Module:
        layers = perceptron((inputs, *[width] * depth, 10), activation)
        return Classifier(*layers[:-1], nn.Dropout(0.1), layers[-1]) if dropout else Classifier(*layers)

    return Drawn(f"MLP {inputs}, {depth} × {width}", build, partial(_vectors, inputs, 10))


def conv(draw: Random) -> Drawn:
    """Convolutional nets."""
    size, width, depth = draw.choice((128, 160, 224)), draw.choice((16, 24, 48)), draw.randint(2, 5)

    def build() -> nn.Module:
        widths = [width * 2**stage for stage in range(depth)]
        stages = [nn.Sequential(convolution(a, b, 2), convolution(b, b)) for a, b in zip((3, *widths), widths)]
        return Classifier(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    return Drawn(f"conv {size}², {depth} stages from {width}", build, partial(_images, size, 10))


def vit(draw: Random) -> Drawn:
    """Transformers and mixers on patches."""
    size, patch = draw.choice((64, 96, 224)), draw.choice((8, 16))
    width, depth, mixer = draw.choice((96, 192, 384)), draw.randint(2, 14), draw.random() < 0.4
    by_convolution, seed = draw.random() < 0.5, draw.random()

    def build() -> nn.Module:
        length = (size // patch) ** 2 if mixer else 0
        blocks = _transformer(Random(seed), width, depth, causal=False, length=length)
        patches = Patches(patch, width, by_convolution=by_convolution)
        return Classifier(patches, blocks, MeanOf(), nn.Linear(width, 100))

    return Drawn(
        f"{'mixer' if mixer else 'ViT'} {size}²/{patch}, {depth} × {width}", build, partial(_images, size, 100)
    )


def gpt(draw: Random, *, weighted: bool = False, checkpointed: bool = False) -> Drawn:
    """Language models; with weighted tokens, of large vocabularies."""
    words = draw.choice((8_000, 32_000, 50_257) if weighted else (256, 2_000, 16_000))
    length, width, depth = draw.choice((64, 200, 512, 1024)), draw.choice((64, 192, 512)), draw.randint(1, 12)
    seed = draw.random()

    def build() -> nn.Module:
        blocks = _transformer(Random(seed), width, depth, causal=True, checkpointed=checkpointed)
        return Classifier(nn.Embedding(words, width), blocks, nn.LayerNorm(width), nn.Linear(width, words))

    kind = "weighted tokens" if weighted else "checkpointed GPT" if checkpointed else "GPT"
    return Drawn(
        f"{kind} {words} words, {length}, {depth} × {width}",
        build,
        partial(_sentences, words, length, weighted=weighted),
    )


def similarities(draw: Random) -> Drawn:
    """Two towers, or one twice, under a contrastive loss."""
    inputs, width = draw.choice((64, 512, 3072)), draw.choice((256, 1024))
    depth, shared = draw.randint(1, 8), draw.random() < 0.5
    normalized, both_ways = draw.random() < 0.7, draw.random() < 0.5

    def build() -> nn.Module:
        widths = (inputs, *[width] * depth, 128)
        first = perceptron(widths)
        return Towers(first, first if shared else perceptron(widths), normalized=normalized, both_ways=both_ways)

    return Drawn(f"similarities {inputs}, {depth} × {width}", build, partial(_pairs, inputs))


def unet(draw: Random) -> Drawn:
    """Segmentation with connections that skip."""
    size, width, depth = draw.choice((96, 128, 256)), draw.choice((8, 16, 32)), draw.randint(2, 4)
    widths = [width * 2**stage for stage in range(depth)]
    return Drawn(f"U-Net {size}², {depth} from {width}", lambda: Classifier(UNet(widths, 21)), partial(_maps, size, 21))


def recurrent(draw: Random) -> Drawn:
    """LSTM and GRU over words."""
    kind, words = draw.choice(("LSTM", "GRU")), draw.choice((256, 10_000))
    length, width, layers = draw.choice((32, 64, 128)), draw.choice((128, 256, 512)), draw.randint(1, 3)

    def build() -> nn.Module:
        return Classifier(nn.Embedding(words, width), Recurrent(kind, width, layers), nn.Linear(width, words))

    return Drawn(f"{kind} {words} words, {length}, {layers} × {width}", build, partial(_sentences, words, length))


def embeddings(draw: Random) -> Drawn:
    """Tables that are larger than what is computed on them."""
    words, width = draw.choice((100_000, 1_000_000)), draw.choice((16, 64))
    columns, hidden = draw.choice((8, 26)), draw.choice((256, 1024))
    samples = lambda: (torch.randint(words, (POOL, columns)), torch.arange(POOL) % 2)  # noqa: E731
    return Drawn(
        f"embeddings {words} × {width}, {columns} columns",
        lambda: Classifier(Fields(words, width, columns, hidden)),
        samples,
    )


FAMILIES: tuple[Callable[[Random], Drawn], ...] = (
    mlp,
    conv,
    vit,
    vit,
    gpt,
    partial(gpt, weighted=True),
    partial(gpt, checkpointed=True),
    similarities,
    similarities,
    unet,
    recurrent,
    embeddings,
)


def draw_model(draw: Random) -> tuple[str, Model]:
    """Draw a model of any family, and say which it is."""
    drawn = draw.choice(FAMILIES)(draw)
    return drawn.name, Model(drawn.build, drawn.samples)


def size_of(model: Model) -> int:
    """Return the bytes of a model's parameters, without making them."""
    with torch.device("meta"):
        net = model.build()
    return sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
