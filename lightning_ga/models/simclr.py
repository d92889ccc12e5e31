"""SimCLR: a loss that compares all images of a batch, which plain accumulation changes and ``whole=`` does not.

Tested in tests/app/test_train.py.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn

from lightning_ga.models.group_norm import to_group_norm
from lightning_ga.models.reference import ReferenceModule
from lightning_ga.models.timm import build_timm


class SimCLR(ReferenceModule):
    """NT-Xent (arXiv 2002.05709, equation 1) over two random views of each image.

    ``val/acc`` is the share of views whose other view is the nearest of the batch.

    Args:
        name: The encoder, a model of timm; its BatchNorm layers become GroupNorm.
        in_channels: Channels of an image.
        image_size: Height and width of an image, in pixels.
        width: Outputs of the projection head.
        temperature: Divides the similarities.
        move: How far views are turned, sheared, scaled and moved at random, as a share of the image.
        **training: ``optimizer`` and ``lr_scheduler`` of :class:`~lightning_ga.models.reference.ReferenceModule`.
    """

    def __init__(
        self,
        name: str = "resnet18",
        *,
        in_channels: int = 3,
        image_size: int = 224,
        width: int = 64,
        temperature: float = 0.2,
        move: float = 0.2,
        **training: Any,
    ) -> None:
        super().__init__(("loss", "acc"), **training)
        encoder: Any = build_timm(name, image_size=image_size, num_classes=0, in_chans=in_channels)
        self.encoder = to_group_norm(encoder)
        outputs = int(encoder.num_features)
        self.head = nn.Sequential(nn.Linear(outputs, outputs), nn.ReLU(), nn.Linear(outputs, width))
        self.temperature = temperature
        self.move = move
        self.save_hyperparameters("name", "in_channels", "image_size", "width", "temperature", "move")

    def forward(self, images: Tensor) -> Tensor:
        """Return the encoder's outputs, ``(batch, features)``."""
        features: Tensor = self.encoder(images)
        return features

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of all images of the batch."""
        loss, accuracy = self._compare(batch[0])
        self.record({"loss": loss, "acc": accuracy}, len(batch[0]))
        return loss

    def evaluate(self, batch: Any, stage: str) -> None:
        """Log ``loss`` and ``acc``."""
        loss, accuracy = self._compare(batch[0])
        values = {f"{stage}/loss": loss, f"{stage}/acc": accuracy}
        self.log_dict(values, batch_size=len(batch[0]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the encoder's outputs, ``(batch, features)``."""
        return self(batch[0])

    def _compare(self, images: Tensor) -> tuple[Tensor, Tensor]:
        one = self.head(self.encoder(self._view(images)))
        other = self.head(self.encoder(self._view(images)))
        outputs = F.normalize(torch.cat([one, other]))
        similarities = (outputs @ (outputs / self.temperature).T).fill_diagonal_(-torch.inf)
        others = torch.arange(len(outputs), device=outputs.device).roll(len(images))
        nearest = similarities.detach().argmax(dim=1)
        return F.cross_entropy(similarities, others), (nearest == others).float().mean()

    def _view(self, images: Tensor) -> Tensor:
        """Turn, shear, scale and move each image in its own way."""
        moves = torch.eye(2, 3).to(images) + self.move * torch.randn(len(images), 2, 3).to(images)
        grid = F.affine_grid(moves, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False)
