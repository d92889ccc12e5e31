"""MONAI: a UNet on volumes of which each yields several random crops, as in its segmentation tutorials."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from monai.data import DataLoader, Dataset, create_test_image_3d, list_data_collate
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    RandCropByPosNegLabeld,
    RandRotate90d,
    ScaleIntensityd,
    ToTensord,
)
from monai.utils import set_determinism

from clients.program import Program, train

SIZE, CROPS = 24, 4
KEYS = ("img", "seg")


def volumes(number: int = 20) -> list[dict[str, Any]]:
    """Balls in noise, and where they are."""
    made = [
        create_test_image_3d(SIZE, SIZE, SIZE, rad_max=6, num_seg_classes=1, random_state=np.random.RandomState(i))
        for i in range(number)
    ]
    return [{"img": image, "seg": mask} for image, mask in made]


def crops() -> Compose:
    """Random crops around and beside the balls."""
    return Compose(
        [
            EnsureChannelFirstd(keys=KEYS, channel_dim="no_channel"),
            ScaleIntensityd(keys="img"),
            RandCropByPosNegLabeld(
                keys=KEYS, label_key="seg", spatial_size=[16, 16, 16], pos=1, neg=1, num_samples=CROPS
            ),
            RandRotate90d(keys=KEYS, prob=0.5, spatial_axes=(0, 2)),
            ToTensord(keys=KEYS, dtype=torch.get_default_dtype()),
        ]
    )


def loader(batch: int) -> DataLoader:
    """Volumes by the batch, each a list of crops that are collated to one batch."""
    return DataLoader(Dataset(volumes(), crops()), batch_size=batch, num_workers=0, collate_fn=list_data_collate)


class Net(LightningModule):
    """The tutorials' UNet, small; without biases, whose gradients before a norm are rounding that Adam blows up."""

    def __init__(self) -> None:
        super().__init__()
        self.model = UNet(3, in_channels=1, out_channels=1, channels=(4, 8, 16), strides=(2, 2), bias=False)
        self.loss_function = DiceLoss(sigmoid=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss_function(self.model(batch["img"]), batch["seg"])
        self.log("train_loss", loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def fit(batch: int, callbacks: Sequence[Any]) -> LightningModule:
    """Train with MONAI's own seeds."""
    set_determinism(seed=0)
    try:
        return train(Net, partial(loader, batch), callbacks)
    finally:
        set_determinism(None)


PROGRAMS = [Program("monai", "UNet, four crops a volume", fit, 8)]
