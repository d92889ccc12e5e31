"""torchvision: detectors, which take lists of images and targets and return a dictionary of losses."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from clients.program import Program, train

CHANNELS, CLASSES, SIZE = 8, 3, 64
Sizes = Sequence[tuple[int, int]]
SIZES = ((64, 64), (64, 96), (80, 64))


def picture(index: int, *, sizes: Sizes) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Noise with one to three boxes."""
    corners = torch.rand(1 + index % 3, 2) * SIZE / 2
    boxes = torch.cat([corners, corners + 8 + torch.rand(len(corners), 2) * SIZE / 3], dim=1)
    return torch.rand(3, *sizes[index % len(sizes)]), {
        "boxes": boxes,
        "labels": torch.randint(1, CLASSES, (len(boxes),)),
    }


def collate(batch: Any) -> Any:
    """The references' collate function."""
    return tuple(zip(*batch))


def loader(batch: int, sizes: Sizes) -> DataLoader[Any]:
    """Pictures of one size, or of several."""
    pictures = [picture(index, sizes=sizes) for index in range(20)]
    return DataLoader(pictures, batch_size=batch, collate_fn=collate)  # type: ignore[arg-type]


def backbone() -> nn.Module:
    """Features at an eighth of the size."""
    layers: list[nn.Module] = []
    for channels in (3, CHANNELS, CHANNELS):
        layers += [nn.Conv2d(channels, CHANNELS, 3, stride=2, padding=1), nn.ReLU()]
    features: Any = nn.Sequential(*layers)
    features.out_channels = CHANNELS
    return features


def retina_net() -> nn.Module:
    """A detector of one stage, as in the library's documentation."""
    anchors = AnchorGenerator(sizes=((16, 32),), aspect_ratios=((0.5, 1.0, 2.0),))
    return RetinaNet(backbone(), CLASSES, min_size=SIZE, max_size=2 * SIZE, anchor_generator=anchors)


def faster_rcnn() -> nn.Module:
    """A detector of two stages, which draws the anchors that count."""
    return FasterRCNN(
        backbone(),
        CLASSES,
        min_size=SIZE,
        max_size=2 * SIZE,
        rpn_pre_nms_top_n_train=100,
        rpn_post_nms_top_n_train=50,
        box_batch_size_per_image=16,
        rpn_anchor_generator=AnchorGenerator(sizes=((16, 32),), aspect_ratios=((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(featmap_names=["0"], output_size=3, sampling_ratio=2),
    )


class Detector(LightningModule):
    """The sum of the losses that a detector returns."""

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, targets = batch
        loss_dict = self.model(images, targets)
        self.log_dict(loss_dict, batch_size=len(images))
        return sum(loss_dict.values())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.005, momentum=0.9, weight_decay=0.0005)


def fit(model: Callable[[], nn.Module], sizes: Sizes, batch: int, callbacks: Sequence[Any]) -> LightningModule:
    """Train a detector."""
    return train(partial(Detector, model), partial(loader, batch, sizes), callbacks)


PROGRAMS = [
    Program("torchvision", "RetinaNet", partial(fit, retina_net, SIZES[:1]), 8),
    Program("torchvision", "RetinaNet, sizes", partial(fit, retina_net, SIZES), 8, causes=("exact", "coupled")),
    Program(
        "torchvision",
        "Faster R-CNN, sizes",
        partial(fit, faster_rcnn, SIZES),
        8,
        causes=("random", "weighted", "coupled"),
    ),
]
