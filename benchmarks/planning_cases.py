"""The training steps that plans for another device are compared on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import timm
import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.networks import Apply, CausalBlocks, perceptron

CLASSES, TOKENS, WIDTH, IMAGE = 10, 64, 64, 32

Loss = Callable[[Any, Any], Tensor]


def convolutions() -> nn.Sequential:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)]
    layers += [nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def of_tokens(*layers: nn.Module) -> nn.Sequential:
    """Layers between an embedding and logits by token."""
    head = nn.Linear(WIDTH, CLASSES), Apply(lambda logits: logits.transpose(1, 2))
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), *layers, *head)


def transformer(*, checkpointed: bool = False) -> nn.Sequential:
    return of_tokens(CausalBlocks(WIDTH, 4, 3, checkpointed=checkpointed))


def recurrent() -> nn.Sequential:
    return of_tokens(nn.LSTM(WIDTH, WIDTH, batch_first=True), Apply(lambda outputs: outputs[0]))


def images(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 3, IMAGE, IMAGE), torch.randint(0, CLASSES, (samples,)))


def tokens(samples: int) -> TensorDataset:
    return TensorDataset(*torch.randint(0, CLASSES, (2, samples, TOKENS)))


def plain(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module.net(batch[0]), batch[1])


def reading(module: Any, batch: Any) -> Tensor:
    """Logs, reads a scalar, and keeps a metric."""
    logits = module.net(batch[0])
    loss = F.cross_entropy(logits, batch[1])
    module.accuracy(logits, batch[1])
    module.log_dict({"loss": loss, "accuracy": module.accuracy})
    return loss if loss.item() < 1e9 else 0 * loss


def masked(module: Any, batch: Any) -> Tensor:
    """A mean over the tokens under a mask, here all of them."""
    logits, mask = module.net(batch[0]).transpose(1, 2), batch[1] >= 0
    return F.cross_entropy(logits[mask], batch[1][mask])


adam = partial(torch.optim.Adam, lr=1e-3)
sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    net: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    loss: Loss = plain
    optimizer: Callable[..., torch.optim.Optimizer] = adam
    settings: Callable[[], dict[str, Any]] = field(default=dict)


fp16 = partial(pl.plugins.MixedPrecision, "16-mixed", "cpu")
mlp = lambda: nn.Sequential(nn.Flatten(), *perceptron((3 * IMAGE**2, 256, CLASSES), nn.ReLU))  # noqa: E731
resnet = partial(timm.create_model, "resnet18", num_classes=CLASSES)

CASES: tuple[Case, ...] = (
    Case("perceptron, Adam", mlp, images),
    Case("perceptron, Adam foreach", mlp, images, optimizer=partial(adam, foreach=True)),
    Case("convolutions, BatchNorm, dropout", convolutions, images),
    Case("the same, SGD momentum", convolutions, images, optimizer=sgd),
    Case("the same, metric, log, item", convolutions, images, loss=reading),
    Case("ResNet-18, Adam foreach", resnet, images, optimizer=partial(adam, foreach=True)),
    Case("ResNet-18, clipped, SGD", resnet, images, optimizer=sgd, settings=lambda: {"gradient_clip_val": 1}),
    Case("transformer, SDPA", transformer, tokens),
    Case("the same, clipped by value", transformer, tokens, settings=lambda: {
        "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
    Case("the same, bf16-mixed", transformer, tokens, settings=lambda: {"precision": "bf16-mixed"}),
    Case("the same, fp16, GradScaler", transformer, tokens, settings=lambda: {
        "plugins": [fp16(torch.amp.GradScaler("cpu", init_scale=2.0))]}),
    Case("the same, checkpointed", partial(transformer, checkpointed=True), tokens),
    Case("the same, boolean mask", transformer, tokens, loss=masked),
    Case("LSTM (listed as unreliable)", recurrent, tokens),
)  # fmt: skip
