"""Image classifiers whose loss is a mean over samples, and two small networks."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_ga.models.reference import ReferenceModule

Batch = tuple[Tensor, Tensor]
LEVELS = 4  # of grey
PATCH = 3  # pixels of a hashed patch along each side
STRIDE = 2  # pixels from one patch to the next
SPREAD_LOOKS = 2_654_435_761  # odd numbers without a factor in common with usual sizes of tables
SPREAD_PLACES = 40_503


class Classifier(ReferenceModule):
    """Cross-entropy on logits, with curves by optimizer step and a confusion matrix of the test set.

    Args:
        net: Maps images ``(batch, channels, height, width)`` to logits ``(batch, num_classes)``.
        num_classes: Number of classes.
        label_smoothing: Share of the targets of training that is spread over all classes, 0 to 1.
        **training: ``optimizer`` and ``lr_scheduler`` of :class:`~lightning_ga.models.reference.ReferenceModule`.

    Attributes:
        confusion: After a test, rows of counts ``confusion[target][prediction]``.
    """

    def __init__(self, net: nn.Module, num_classes: int, *, label_smoothing: float = 0.0, **training: Any) -> None:
        super().__init__(("loss", "acc"), **training)
        self.net = net
        self.label_smoothing = label_smoothing
        first = MulticlassAccuracy(num_classes, average="micro")
        first_five = MulticlassAccuracy(num_classes, min(5, num_classes), average="micro")
        # Without groups: the two may be equal on the first batch.
        accuracies = MetricCollection({"acc": first, "top5": first_five}, compute_groups=False)
        self.val_accuracy = accuracies.clone(prefix="val/")
        self.test_accuracy = accuracies.clone(prefix="test/")
        self.test_confusion = MulticlassConfusionMatrix(num_classes)
        self.confusion: list[list[int]] | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, num_classes)``."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of one micro-batch; log the means of the window."""
        images, targets = batch
        logits = self(images)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        if targets.dim() > 1:  # mixed targets are probabilities
            targets = targets.argmax(dim=1)
        accuracy = (logits.detach().argmax(dim=1) == targets).float().mean()
        self.record({"loss": loss, "acc": accuracy}, len(targets))
        return loss

    def evaluate(self, batch: Batch, stage: str) -> None:
        """Log loss, ``acc`` and ``top5``; in a test, count the confusion matrix."""
        images, targets = batch
        logits: Tensor = self(images)
        accuracy = self.val_accuracy if stage == "val" else self.test_accuracy
        accuracy.update(logits, targets)
        if stage == "test":
            self.test_confusion.update(logits, targets)
        self.log(f"{stage}/loss", F.cross_entropy(logits, targets), batch_size=len(targets), sync_dist=True)
        self.log_dict(accuracy, on_step=False, on_epoch=True, batch_size=len(targets))

    def on_test_epoch_end(self) -> None:
        """Keep the confusion matrix, summed over ranks, as plain numbers."""
        self.confusion = self.test_confusion.compute().tolist()
        self.test_confusion.reset()

    def predict_step(self, batch: Batch | list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return ``{"class_probabilities": (batch, num_classes)}``."""
        logits: Tensor = self(batch[0])
        return {"class_probabilities": logits.softmax(dim=1)}


class MLPClassifier(Classifier):
    """Flattened pixels, ReLU layers, logits; 784-512-256-128-10 for MNIST at 28×28.

    Args:
        hidden: Width of each hidden layer.
        num_classes: Number of classes.
        in_channels: Channels of an image.
        image_size: Height and width of an image, in pixels.
        **training: ``optimizer``, ``lr_scheduler`` and ``label_smoothing`` of :class:`Classifier`.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (512, 256, 128),
        *,
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int = 28,
        **training: Any,
    ) -> None:
        hidden = list(hidden)
        widths = [in_channels * image_size**2, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        net = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))
        super().__init__(net, num_classes, **training)
        self.save_hyperparameters("hidden", "num_classes", "in_channels", "image_size")


class HashedPatches(nn.Module):
    """Give each patch of a picture, at its place, one of the ``rows`` of a table by the hashing trick.

    Pixels are rounded to a few grey levels, so that patches that look alike are the same patch.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, images: Tensor) -> Tensor:
        """Return row numbers ``(batch, patches)`` of images ``(batch, channels, height, width)`` from 0 to 1."""
        grey = images.detach().float().mean(dim=1, keepdim=True)
        level = (grey * LEVELS).floor().clamp(0, LEVELS - 1)
        patches = F.unfold(level, PATCH, stride=STRIDE).long()  # (batch, pixels of a patch, patches)
        digits = LEVELS ** torch.arange(PATCH**2, device=images.device)
        looks = (patches * digits[:, None]).sum(dim=1)
        places = torch.arange(looks.shape[1], device=images.device)
        return (looks * SPREAD_LOOKS + places * SPREAD_PLACES) % self.rows


class HashedPatchClassifier(Classifier):
    """The mean of the embeddings of a picture's patches, and a linear layer.

    A batch touches a small part of the table: with ``sparse`` its gradient contains only these rows, and the
    optimizer has to accept such gradients (SGD without momentum and weight decay, Adagrad).

    Args:
        rows: Rows of the table.
        features: Width of the table.
        sparse: Whether the table's gradient is sparse.
        num_classes: Number of classes.
        **training: ``optimizer``, ``lr_scheduler`` and ``label_smoothing`` of :class:`Classifier`.
    """

    def __init__(
        self, rows: int = 200_000, features: int = 64, *, sparse: bool = True, num_classes: int = 10, **training: Any
    ) -> None:
        table = nn.EmbeddingBag(rows, features, mode="mean", sparse=sparse)
        net = nn.Sequential(HashedPatches(rows), table, nn.Linear(features, num_classes))
        super().__init__(net, num_classes, **training)
        self.save_hyperparameters("rows", "features", "sparse", "num_classes")
