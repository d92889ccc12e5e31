"""lightly: SimCLR, MoCo and BYOL on generated images, with random augmentations as in its examples.

Each has a BatchNorm in backbone and projection heads. MoCo and BYOL are tried without, too: what is
left then is the state that a step changes, a queue or a teacher.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightly.data import LightlyDataset
from lightly.loss import NegativeCosineSimilarity, NTXentLoss
from lightly.models import ResNetGenerator
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead, MoCoProjectionHead, SimCLRProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import SimCLRTransform
from lightly.utils.scheduler import cosine_schedule
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData

from clients.program import EPOCHS, Program, train
from lightning_ga.models import to_group_norm

FEATURES = 64


def loader(batch: int) -> DataLoader[Any]:
    """Two augmented views of each image."""
    transform = SimCLRTransform(input_size=32, gaussian_blur=0.0)
    dataset = LightlyDataset.from_torch_dataset(FakeData(24, (3, 32, 32)), transform=transform)
    return DataLoader(dataset, batch_size=batch, drop_last=True)


def backbone() -> nn.Module:
    """A narrow ResNet-9 without its classifier."""
    resnet = ResNetGenerator("resnet-9", width=FEATURES / 512)
    return nn.Sequential(*list(resnet.children())[:-1], nn.AdaptiveAvgPool2d(1))


class SimCLR(LightningModule):
    """Positives beside the other samples of the batch."""

    head = partial(SimCLRProjectionHead, FEATURES, FEATURES, 16)
    loss: Callable[[], nn.Module] = NTXentLoss

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.projection_head, self.criterion = backbone(), self.head(), self.loss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        x0, x1 = batch[0]
        return self.criterion(self.forward(x0), self.forward(x1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.06)


class MoCo(SimCLR):
    """Negatives from a memory bank, keys from a momentum encoder, which follows in each step."""

    head = partial(MoCoProjectionHead, FEATURES, FEATURES, 16, batch_norm=True)
    loss = partial(NTXentLoss, memory_bank_size=(64, 16))

    def __init__(self) -> None:
        super().__init__()
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)

    def forward_momentum(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def follow(self) -> None:
        momentum = cosine_schedule(self.current_epoch, EPOCHS, 0.9, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.follow()
        x_query, x_key = batch[0]
        return self.criterion(self.forward(x_query), self.forward_momentum(x_key))


class BYOL(MoCo):
    """A student predicts what its teacher says of the other view."""

    head = partial(BYOLProjectionHead, FEATURES, FEATURES, 16)
    loss = NegativeCosineSimilarity

    def __init__(self) -> None:
        super().__init__()
        self.prediction_head = BYOLPredictionHead(16, FEATURES, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.prediction_head(super().forward(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.follow()
        x0, x1 = batch[0]
        p0, z0 = self.forward(x0), self.forward_momentum(x0)
        p1, z1 = self.forward(x1), self.forward_momentum(x1)
        return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))


def fit(module: Callable[[], LightningModule], batch: int, callbacks: Sequence[Any]) -> LightningModule:
    """Train on augmented images."""
    return train(module, partial(loader, batch), callbacks)


def without_batch_norm(module: Callable[[], LightningModule]) -> LightningModule:
    """The same with GroupNorm, of few groups: a projection normalizes vectors, with no pixels to average over."""
    made = module()
    for part in made.children():
        to_group_norm(part, groups=4)
    return made


PROGRAMS = [
    Program("lightly", "SimCLR", partial(fit, SimCLR), 8, causes=("batch_norm", "coupled")),
    Program("lightly", "MoCo", partial(fit, MoCo), 8, causes=("batch_norm", "stateful")),
    Program("lightly", "BYOL", partial(fit, BYOL), 8, causes=("batch_norm", "stateful")),
    Program("lightly", "SimCLR, GroupNorm", partial(fit, partial(without_batch_norm, SimCLR)), 8, causes=("coupled",)),
    Program("lightly", "MoCo, GroupNorm", partial(fit, partial(without_batch_norm, MoCo)), 8, causes=("stateful",)),
    Program("lightly", "BYOL, GroupNorm", partial(fit, partial(without_batch_norm, BYOL)), 8, causes=("stateful",)),
]
