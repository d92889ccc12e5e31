"""Is the limit found in cells that nobody named? ``python -m benchmarks.random_cells --cells 32 --seeds 3``.

Models, precisions, optimizers, budgets and settings of the allocator are drawn at random, the same for the same seed,
and measured as in ``benchmarks.allocator``. ``--numbers`` (1000 × seed + place) shows the trials of single cells, and
writes nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.allocator import Setting, measured, targets, under
from benchmarks.networks import Apply, perceptron
from benchmarks.output import Record, benchmark, plain, shown
from benchmarks.probe import prepare
from benchmarks.probing.devices import GIB
from benchmarks.probing.training import POOL, Model, Training, images, sentences

Drawn = tuple[str, Model]  # and what it is called


class Checkpointed(nn.Sequential):
    """Blocks that are each run again in the backward pass."""

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden


class Residual(nn.Module):
    def __init__(self, width: int, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(width), part

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.part(self.norm(hidden))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, naive: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.naive, self.causal = heads, naive, causal
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.inputs(hidden).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.naive:
            mixed = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).flatten(2))


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
    """Halves images again and again, then doubles them, with connections between equal sizes; classes of each pixel."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(convolution(a, b) for a, b in pairwise((3, *widths)))
        self.up = nn.ModuleList(convolution(a + b, b) for a, b in pairwise(widths[::-1]))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
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


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU())


turned = Apply(lambda hidden: hidden.transpose(1, 2))


def mixer(length: int, hidden: int) -> nn.Sequential:
    """Mixes the positions of ``(batch, length, width)`` by a perceptron."""
    return nn.Sequential(turned, perceptron((length, hidden, length)), turned)


def patches(patch: int, width: int, *, by_convolution: bool) -> nn.Sequential:
    """Images as sequences of patches: by a convolution, or cut out and projected."""
    if by_convolution:
        return nn.Sequential(nn.Conv2d(3, width, patch, patch), nn.Flatten(2), turned)
    return nn.Sequential(nn.Unfold(patch, stride=patch), turned, nn.Linear(3 * patch * patch, width))


def _transformer(
    draw: Random, width: int, depth: int, *, causal: bool, length: int = 0, checkpointed: bool = False
) -> nn.Sequential:
    naive, heads, hidden = draw.random() < 0.4, draw.choice((2, 4, 8)), draw.choice((2, 4)) * width

    def block() -> nn.Sequential:
        mixing = mixer(length, hidden) if length else Attention(width, heads, naive=naive, causal=causal)
        return nn.Sequential(Residual(width, mixing), Residual(width, perceptron((width, hidden, width))))

    return (Checkpointed if checkpointed else nn.Sequential)(*(block() for _ in range(depth)))


def mlp(draw: Random) -> Drawn:
    inputs, width, depth = draw.choice((64, 784, 3072, 20000)), draw.choice((128, 500, 1024, 4096)), draw.randint(1, 12)
    dropout, activation = draw.random() < 0.5, draw.choice((nn.ReLU, nn.GELU, nn.SiLU))

    def build() -> nn.Module:
        layers = perceptron((inputs, *[width] * depth, 10), activation)
        return Classifier(*layers[:-1], nn.Dropout(0.1), layers[-1]) if dropout else Classifier(*layers)

    return f"MLP {inputs}, {depth} × {width}", Model(
        build, lambda: (torch.randn(POOL, inputs), torch.arange(POOL) % 10)
    )


def conv(draw: Random) -> Drawn:
    size, width, depth = draw.choice((128, 160, 224)), draw.choice((16, 24, 48)), draw.randint(2, 5)

    def build() -> nn.Module:
        widths = [width * 2**stage for stage in range(depth)]
        stages = [nn.Sequential(convolution(a, b, 2), convolution(b, b)) for a, b in zip((3, *widths), widths)]
        return Classifier(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    return f"conv {size}², {depth} stages from {width}", Model(build, partial(images, size, 10))


def vit(draw: Random) -> Drawn:
    size, patch = draw.choice((64, 96, 224)), draw.choice((8, 16))
    width, depth, mixer = draw.choice((96, 192, 384)), draw.randint(2, 14), draw.random() < 0.4
    by_convolution, seed = draw.random() < 0.5, draw.random()

    def build() -> nn.Module:
        length = (size // patch) ** 2 if mixer else 0
        blocks = _transformer(Random(seed), width, depth, causal=False, length=length)
        first, mean = patches(patch, width, by_convolution=by_convolution), Apply(lambda hidden: hidden.mean(1))
        return Classifier(first, blocks, mean, nn.Linear(width, 100))

    kind = "mixer" if mixer else "ViT"
    return f"{kind} {size}²/{patch}, {depth} × {width}", Model(build, partial(images, size, 100))


def gpt(draw: Random, *, weighted: bool = False, checkpointed: bool = False) -> Drawn:
    """Language models; with weighted tokens, of large vocabularies."""
    words = draw.choice((8_000, 32_000, 50_257) if weighted else (256, 2_000, 16_000))
    length, width, depth = draw.choice((64, 200, 512, 1024)), draw.choice((64, 192, 512)), draw.randint(1, 12)
    seed = draw.random()

    def build() -> nn.Module:
        blocks = _transformer(Random(seed), width, depth, causal=True, checkpointed=checkpointed)
        return Classifier(nn.Embedding(words, width), blocks, nn.LayerNorm(width), nn.Linear(width, words))

    kind = "weighted tokens" if weighted else "checkpointed GPT" if checkpointed else "GPT"
    name = f"{kind} {words} words, {length}, {depth} × {width}"
    if weighted:
        return name, Model(build, lambda: (*sentences(words, length), torch.rand(POOL, length)))
    return name, Model(build, partial(sentences, words, length))


def similarities(draw: Random) -> Drawn:
    """Two towers, or one twice, under a contrastive loss."""
    inputs, width = draw.choice((64, 512, 3072)), draw.choice((256, 1024))
    depth, shared = draw.randint(1, 8), draw.random() < 0.5
    normalized, both_ways = draw.random() < 0.7, draw.random() < 0.5

    def build() -> nn.Module:
        widths = (inputs, *[width] * depth, 128)
        first = perceptron(widths)
        return Towers(first, first if shared else perceptron(widths), normalized=normalized, both_ways=both_ways)

    return f"similarities {inputs}, {depth} × {width}", Model(
        build, lambda: (torch.randn(POOL, inputs), torch.randn(POOL, inputs))
    )


def unet(draw: Random) -> Drawn:
    size, width, depth = draw.choice((96, 128, 256)), draw.choice((8, 16, 32)), draw.randint(2, 4)
    widths = [width * 2**stage for stage in range(depth)]
    samples = lambda: (torch.randn(POOL, 3, size, size), torch.randint(21, (POOL, size, size)))  # noqa: E731
    return f"U-Net {size}², {depth} from {width}", Model(lambda: Classifier(UNet(widths, 21)), samples)


def recurrent(draw: Random) -> Drawn:
    kind, words = draw.choice(("LSTM", "GRU")), draw.choice((256, 10_000))
    length, width, layers = draw.choice((32, 64, 128)), draw.choice((128, 256, 512)), draw.randint(1, 3)

    def build() -> nn.Module:
        table, cells = nn.Embedding(words, width), getattr(nn, kind)(width, width, layers, batch_first=True)
        return Classifier(table, cells, Apply(lambda found: found[0]), nn.Linear(width, words))

    return f"{kind} {words} words, {length}, {layers} × {width}", Model(build, partial(sentences, words, length))


def embeddings(draw: Random) -> Drawn:
    words, width = draw.choice((100_000, 1_000_000)), draw.choice((16, 64))
    columns, hidden = draw.choice((8, 26)), draw.choice((256, 1024))

    def build() -> nn.Module:
        table = nn.Embedding(words, width)
        return Classifier(table, nn.Flatten(), perceptron((columns * width, hidden, hidden, 2)))

    samples = lambda: (torch.randint(words, (POOL, columns)), torch.arange(POOL) % 2)  # noqa: E731
    return f"embeddings {words} × {width}, {columns} columns", Model(build, samples)


GPTS = (gpt, partial(gpt, weighted=True), partial(gpt, checkpointed=True))
FAMILIES: tuple[Any, ...] = (mlp, conv, vit, vit, *GPTS, *[similarities] * 2, unet, recurrent, embeddings)


def draw_model(draw: Random) -> Drawn:
    return draw.choice(FAMILIES)(draw)


def size_of(model: Model) -> int:
    with torch.device("meta"):
        net = model.build()
    return sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())


SMALLEST, LARGEST = 1.5, 130.0  # GiB
ROOM = 8  # times the parameters, which a budget has at least: with Adam they take four or five
PRECISIONS = ("32", "bf16-mixed", "16-mixed")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "AdamW, one by one": partial(torch.optim.AdamW, foreach=False),
    "RMSprop": torch.optim.RMSprop,
}
TEXTS = (
    *[""] * 6,
    *["expandable_segments:True"] * 2,
    *("max_split_size_mb:64", "max_split_size_mb:256"),
    *("roundup_power2_divisions:2", "roundup_power2_divisions:16"),
    *("garbage_collection_threshold:0.8", "garbage_collection_threshold:0.5,max_split_size_mb:512"),
    *("expandable_segments:True,roundup_power2_divisions:4", "backend:cudaMallocAsync"),
)


@dataclass(frozen=True, slots=True)
class RandomCell:  # what was drawn, and from which number its model is drawn again
    number: int
    model: str
    precision: str
    optimizer: str
    clipped: bool
    gib: float
    setting: Setting


def draw_cell(number: int) -> RandomCell:
    """Draw a cell; the same number gives the same one."""
    draw = Random(number)
    name, model = draw_model(draw)
    least = max(SMALLEST, ROOM * size_of(model) / GIB)
    gib = round(least * (LARGEST / least) ** draw.random(), 2)
    text, device = draw.choice(TEXTS), draw.choice(("cuda:0",) * 5 + ("cuda:1",))
    bounded = draw.choice(("budget",) * 4 + ("fraction", "others"))
    if "cudaMallocAsync" in text and bounded == "others":
        bounded = "fraction"  # a simulated device counts what others take among the blocks of its pool
    setting = Setting(text, device, bounded)
    precision, optimizer = draw.choice(PRECISIONS), draw.choice(list(OPTIMIZERS))
    return RandomCell(number, name, precision, optimizer, draw.random() < 0.3, gib, setting)


class RandomTraining(Training):
    def __init__(self, cell: RandomCell) -> None:
        super().__init__(draw_model(Random(cell.number))[1], cell.setting.device)
        self.cell = cell
        self.optimizer = OPTIMIZERS[cell.optimizer](self.net.parameters())
        self.scaler = torch.amp.GradScaler("cuda", enabled=cell.precision == "16-mixed")

    def step(self, size: int) -> None:
        with self.counter.step(size):
            loss = self.loss(size)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            if self.cell.clipped:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def loss(self, size: int) -> Tensor:
        dtype = torch.bfloat16 if self.cell.precision == "bf16-mixed" else torch.float16
        with nullcontext() if self.cell.precision == "32" else torch.autocast("cuda", dtype):
            loss: Tensor = self.net(*self.batch(size))
        return loss


def text(record: Record) -> str:
    families: dict[str, list[Record]] = {}
    for cell in record["cells"]:
        families.setdefault(cell["model"].split()[0], []).append(cell)
    rows = []
    for name, cells in sorted(families.items()):
        least = min(cell["found"] / cell["limit"] for cell in cells)
        most = (str(max(cell[key] for cell in cells)) for key in ("steps", "errors"))
        rows.append((name, str(len(cells)), f"{least:.3f}", *most))
    titles = ("cells", "found ÷ limit, least", "steps, most", "OOMs, most")
    caption = f"{record['device']}: cells drawn at random, seed {', '.join(map(str, record['seeds']))}."
    return shown(("model",), titles, rows, caption)


def of_numbers(numbers: Sequence[int]) -> list[dict[str, Any]]:
    prepare()
    drawn = map(draw_cell, numbers)
    return [{**asdict(cell), **measured(cell.setting, cell.gib, partial(RandomTraining, cell))} for cell in drawn]


def measure(cells: int = 32, seeds: Sequence[int] = (3,), numbers: Sequence[int] = ()) -> dict[str, Any]:
    drawn = [draw_cell(number) for number in numbers or [1000 * s + place for s in seeds for place in range(cells)]]
    found: list[dict[str, Any]] = []
    for setting in sorted({cell.setting.text for cell in drawn}):
        some = [cell for cell in drawn if cell.setting.text == setting and cell.setting.is_here()]
        found += under(setting, of_numbers, [cell.number for cell in some])
    if numbers:
        print(*(f"{cell['number']}: {cell['found']} of {cell['limit']}, {cell['tried']}" for cell in found), sep="\n")
    by_seed: dict[int, list[Record]] = {}
    for cell in found:
        by_seed.setdefault(cell["number"] // 1000, []).append(cell)
    record = {
        "device": torch.cuda.get_device_name(),
        "partial": bool(numbers),
        "seeds": sorted(by_seed),
        "cells": found,
    }
    return {**record, "targets": plain(targets({str(seed): some for seed, some in by_seed.items()}))}


main = benchmark("random_cells", __doc__, measure, text, needs_cuda=True)

if __name__ == "__main__":
    raise SystemExit(main())
