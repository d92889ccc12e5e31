"""Models and steps of ``benchmarks.checkpointing``: six that its rules were tuned on, and two that were not."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, normalize

from lightning_ga.models.gpt import Decoder

Make = Callable[[], "Model"]


class Model(nn.Module):
    """A network and the loss of a step on so many samples, the same each time."""

    def __init__(self, net: nn.Module, samples: int, loss: Callable[[nn.Module, int], Tensor]) -> None:
        super().__init__()
        self.net, self.samples, self._loss = net, samples, loss
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.0)

    def step(self, samples: int | None = None) -> None:
        """Run forward and backward, and the optimizer's step, which changes nothing."""
        count = samples or self.samples
        torch.manual_seed(count)
        self.optimizer.zero_grad()
        self._loss(self.net, count).backward()
        self.optimizer.step()

    def gradient(self, samples: int | None = None) -> list[Tensor]:
        self.step(samples)
        return [p.grad.clone() for p in self.parameters() if p.grad is not None]


def of_tokens(net: nn.Module, samples: int, *, length: int = 64, vocabulary: int = 256) -> Tensor:
    tokens = torch.randint(vocabulary, (samples, length + 1))
    return cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def of_images(net: nn.Module, samples: int, *, side: int, classes: int = 10) -> Tensor:
    return cross_entropy(net(torch.randn(samples, 3, side, side)), torch.randint(classes, (samples,)))


def of_masks(net: nn.Module, samples: int, *, side: int = 48) -> Tensor:
    return cross_entropy(net(torch.randn(samples, 3, side, side)), torch.randint(4, (samples, side, side)))


def of_views(net: nn.Module, samples: int, *, length: int = 32, width: int = 64) -> Tensor:
    views = torch.randn(2, samples, length, width)
    one, other = (normalize(net(view).mean(1), dim=1) for view in views)
    return cross_entropy(one @ other.T / 0.1, torch.arange(samples))


def of_pairs(net: nn.Module, samples: int, *, width: int = 64) -> Tensor:
    source, target = torch.randn(samples, 48, width), torch.randn(samples, 32, width)
    return (net(source, target) - torch.randn(samples, 32, width)).square().mean()


class Halves(nn.Module):
    """Two convolutions with BatchNorm, and a way round them."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)),
            *(nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


class UNet(nn.Module):
    """A U-Net: what comes down is kept for the way up."""

    def __init__(self, width: int = 16, depth: int = 3, classes: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(Halves(a, b) for a, b in zip([3, *widths], widths))
        self.up = nn.ModuleList(Halves(a + b, a) for a, b in zip(widths[-2::-1], widths[:0:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            image = block(image if level == 0 else nn.functional.max_pool2d(image, 2))
            kept.append(image)
        kept.pop()
        for block in self.up:
            image = block(torch.cat([kept.pop(), interpolate(image, scale_factor=2.0)], 1))
        return self.head(image)


class Recurrent(nn.Module):
    """LSTMs, one on the other."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.head(hidden)


def encoder(width: int = 64, depth: int = 3) -> nn.Module:
    layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(depth))
    return nn.Sequential(*layers)


def image_model(name: str, samples: int, side: int, **settings: Any) -> Model:
    return Model(timm.create_model(name, num_classes=10, **settings), samples, partial(of_images, side=side))


MODELS: Mapping[str, Make] = {
    "GPT": lambda: Model(Decoder(256, 64, 64, 6, 4), 16, of_tokens),
    "ViT-Ti": lambda: image_model("vit_tiny_patch16_224", 16, 96, img_size=96),
    "DenseNet-121": lambda: image_model("densenet121", 6, 64),
    "U-Net": lambda: Model(UNet(), 8, of_masks),
    "two towers": lambda: Model(encoder(), 16, of_views),
    "4 LSTMs": lambda: Model(Recurrent(), 16, of_tokens),
}
"""Models on which the rules of choosing were tuned."""

HELD_BACK: Mapping[str, Make] = {
    "ConvNeXt": lambda: image_model("convnext_atto", 8, 64),
    "seq2seq": lambda: Model(nn.Transformer(64, 4, 3, 3, 256, batch_first=True), 16, of_pairs),
}
"""Models on which nothing was tuned."""
