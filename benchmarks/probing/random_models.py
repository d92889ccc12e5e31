"""Networks that nobody named: families of models, each with widths, depths and lengths drawn at random."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from random import Random

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from timm.models import MlpMixer, VisionTransformer
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from benchmarks.networks import Apply, CausalBlocks, perceptron
from benchmarks.probing.models import POOL, Model, Samples

Drawn = tuple[str, Model]
convolution = partial(Conv2dNormActivation, bias=True, inplace=False)


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
        self.down = nn.ModuleList(convolution(a, b) for a, b in zip((3, *widths[:-1]), widths))
        self.up = nn.ModuleList(convolution(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1]))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Classes of every pixel."""
        kept = []
        for layer in self.down:
            kept.append(layer(images))
            images = F.max_pool2d(kept[-1], 2)
        images = kept.pop()
        for layer in self.up:
            images = layer(torch.cat((F.interpolate(images, scale_factor=2), kept.pop()), 1))
        return self.head(images)  # type: ignore[no-any-return]


def _images(size: int, classes: int) -> Samples:
    return torch.randn(POOL, 3, size, size), torch.arange(POOL) % classes


def _sentences(words: int, length: int, *, weighted: bool = False) -> Samples:
    drawn = torch.randint(words, (POOL, length + 1))
    return (drawn[:, :-1], drawn[:, 1:], torch.rand(POOL, length)) if weighted else (drawn[:, :-1], drawn[:, 1:])


def mlp(draw: Random) -> Drawn:
    """Perceptrons, narrow to wide."""
    inputs, width, depth = draw.choice((64, 784, 3072, 20000)), draw.choice((128, 500, 1024, 4096)), draw.randint(1, 12)
    dropout, activation = draw.random() < 0.5, draw.choice((nn.ReLU, nn.GELU, nn.SiLU))

    def build() -> nn.Module:
        layers = perceptron((inputs, *[width] * depth, 10), activation)
        return Classifier(*layers[:-1], nn.Dropout(0.1), layers[-1]) if dropout else Classifier(*layers)

    samples = lambda: (torch.randn(POOL, inputs), torch.arange(POOL) % 10)  # noqa: E731
    return f"MLP {inputs}, {depth} × {width}", Model(build, samples)


def conv(draw: Random) -> Drawn:
    """Convolutional nets."""
    size, width, depth = draw.choice((128, 160, 224)), draw.choice((16, 24, 48)), draw.randint(2, 5)

    def build() -> nn.Module:
        widths = [width * 2**stage for stage in range(depth)]
        stages = [nn.Sequential(convolution(a, b, 3, 2), convolution(b, b)) for a, b in zip((3, *widths), widths)]
        return Classifier(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    return f"conv {size}², {depth} stages from {width}", Model(build, partial(_images, size, 10))


def vit(draw: Random) -> Drawn:
    """Transformers and mixers on patches."""
    size, patch = draw.choice((64, 96, 224)), draw.choice((8, 16))
    width, depth, mixer = draw.choice((96, 192, 384)), draw.randint(2, 14), draw.random() < 0.4
    naive, heads, ratio = draw.random() < 0.4, draw.choice((2, 4, 8)), draw.choice((2, 4))

    def build() -> nn.Module:
        given = {"img_size": size, "patch_size": patch, "embed_dim": width, "num_classes": 100}
        if mixer:
            return Classifier(MlpMixer(num_blocks=depth, mlp_ratio=(ratio, ratio), **given))
        net = VisionTransformer(depth=depth, num_heads=heads, mlp_ratio=ratio, **given)
        for block in net.blocks:
            block.attn.fused_attn = not naive
        return Classifier(net)

    name = f"{'mixer' if mixer else 'ViT'} {size}²/{patch}, {depth} × {width}"
    return name, Model(build, partial(_images, size, 100))


def gpt(draw: Random, *, weighted: bool = False, checkpointed: bool = False) -> Drawn:
    """Language models; with weighted tokens, of large vocabularies."""
    words = draw.choice((8_000, 32_000, 50_257) if weighted else (256, 2_000, 16_000))
    length, width, depth = draw.choice((64, 200, 512, 1024)), draw.choice((64, 192, 512)), draw.randint(1, 12)
    naive, heads, ratio = draw.random() < 0.4, draw.choice((2, 4, 8)), draw.choice((2, 4))

    def build() -> nn.Module:
        blocks = CausalBlocks(width, heads, depth, naive=naive, checkpointed=checkpointed, ratio=ratio)
        return Classifier(nn.Embedding(words, width), blocks, nn.LayerNorm(width), nn.Linear(width, words))

    kind = "weighted tokens" if weighted else "checkpointed GPT" if checkpointed else "GPT"
    name = f"{kind} {words} words, {length}, {depth} × {width}"
    return name, Model(build, partial(_sentences, words, length, weighted=weighted))


def similarities(draw: Random) -> Drawn:
    """Two towers, or one twice, under a contrastive loss."""
    inputs, width = draw.choice((64, 512, 3072)), draw.choice((256, 1024))
    depth, shared = draw.randint(1, 8), draw.random() < 0.5
    normalized, both_ways = draw.random() < 0.7, draw.random() < 0.5

    def build() -> nn.Module:
        widths = (inputs, *[width] * depth, 128)
        first = perceptron(widths)
        return Towers(first, first if shared else perceptron(widths), normalized=normalized, both_ways=both_ways)

    samples = lambda: tuple(torch.randn(2, POOL, inputs))  # noqa: E731
    return f"similarities {inputs}, {depth} × {width}", Model(build, samples)


def unet(draw: Random) -> Drawn:
    """Segmentation with connections that skip."""
    size, width, depth = draw.choice((96, 128, 256)), draw.choice((8, 16, 32)), draw.randint(2, 4)
    widths = [width * 2**stage for stage in range(depth)]
    samples = lambda: (torch.randn(POOL, 3, size, size), torch.randint(21, (POOL, size, size)))  # noqa: E731
    return f"U-Net {size}², {depth} from {width}", Model(lambda: Classifier(UNet(widths, 21)), samples)


def recurrent(draw: Random) -> Drawn:
    """LSTM and GRU over words."""
    kind, words = draw.choice(("LSTM", "GRU")), draw.choice((256, 10_000))
    length, width, layers = draw.choice((32, 64, 128)), draw.choice((128, 256, 512)), draw.randint(1, 3)

    def build() -> nn.Module:
        cells = getattr(nn, kind)(width, width, layers, batch_first=True), Apply(itemgetter(0))
        return Classifier(nn.Embedding(words, width), *cells, nn.Linear(width, words))

    return f"{kind} {words} words, {length}, {layers} × {width}", Model(build, partial(_sentences, words, length))


def embeddings(draw: Random) -> Drawn:
    """Tables that are larger than what is computed on them."""
    words, width = draw.choice((100_000, 1_000_000)), draw.choice((16, 64))
    columns, hidden = draw.choice((8, 26)), draw.choice((256, 1024))

    def build() -> nn.Module:
        layers = perceptron((columns * width, hidden, hidden, 2))
        return Classifier(nn.Embedding(words, width), nn.Flatten(), *layers)

    samples = lambda: (torch.randint(words, (POOL, columns)), torch.arange(POOL) % 2)  # noqa: E731
    return f"embeddings {words} × {width}, {columns} columns", Model(build, samples)


LANGUAGE = (gpt, partial(gpt, weighted=True), partial(gpt, checkpointed=True))
FAMILIES: tuple[Callable[[Random], Drawn], ...] = (
    *(mlp, conv, vit, vit, *LANGUAGE, similarities, similarities, unet, recurrent, embeddings),
)


def draw_model(draw: Random) -> Drawn:
    """Draw one of any family, and its name."""
    return draw.choice(FAMILIES)(draw)


def size_of(model: Model) -> int:
    """Bytes of the parameters."""
    with torch.device("meta"):
        net = model.build()
    return sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
