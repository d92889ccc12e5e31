"""An image classifier that is independent of accumulation: its loss is a mean over samples."""

from typing import cast

import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_ga.models.reference import MakeOptimizer, MakeScheduler, ReferenceModule

Batch = tuple[Tensor, Tensor]


class Classifier(ReferenceModule):
    """Cross-entropy on logits, with curves by optimizer step and a confusion matrix of the test set.

    Args:
        net: Maps images ``(batch, channels, height, width)`` to logits ``(batch, num_classes)``.
        num_classes: Number of classes.
        optimizer: See :class:`~lightning_ga.models.reference.ReferenceModule`.
        lr_scheduler: See :class:`~lightning_ga.models.reference.ReferenceModule`.
        label_smoothing: Share of the targets of training that is spread over all classes, 0 to 1.

    Attributes:
        confusion: After a test, rows of counts ``confusion[target][prediction]``.
    """

    def __init__(
        self,
        net: nn.Module,
        num_classes: int,
        optimizer: MakeOptimizer | None = None,
        lr_scheduler: MakeScheduler | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(("loss", "acc"), optimizer, lr_scheduler)
        self.net, self.label_smoothing = net, label_smoothing
        self.val_accuracy, self.test_accuracy = accuracies(num_classes), accuracies(num_classes)
        self.test_confusion = MulticlassConfusionMatrix(num_classes)
        self.confusion: list[list[int]] | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, num_classes)``."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of one micro-batch; log the means of the window so far."""
        images, targets = batch
        logits = self(images)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        classes = targets if targets.dim() == 1 else targets.argmax(dim=1)  # mixed targets are probabilities
        accuracy = (logits.detach().argmax(dim=1) == classes).float().mean()
        self.record({"loss": loss, "acc": accuracy}, len(targets))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss``, ``val/acc`` and ``val/top5`` over the validation set."""
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``test/loss``, ``test/acc`` and ``test/top5`` and count the confusion matrix."""
        logits = self._evaluate(batch, "test", self.test_accuracy)
        self.test_confusion.update(logits, batch[1])

    def on_test_epoch_end(self) -> None:
        """Keep the confusion matrix, summed over ranks, as plain numbers."""
        self.confusion = self.test_confusion.compute().tolist()
        self.test_confusion.reset()

    def predict_step(self, batch: Batch | list[Tensor], batch_idx: int) -> Tensor:
        """Return the probabilities of the classes, ``(batch, num_classes)``."""
        logits: Tensor = self(batch[0])
        return logits.softmax(dim=1)

    def _evaluate(self, batch: Batch, stage: str, accuracies: nn.ModuleDict) -> Tensor:
        images, targets = batch
        logits: Tensor = self(images)
        self.log(f"{stage}/loss", F.cross_entropy(logits, targets), batch_size=len(targets), sync_dist=True)
        for name, accuracy in accuracies.items():
            cast(Metric, accuracy).update(logits, targets)
            self.log(f"{stage}/{name}", cast(Metric, accuracy), on_step=False, on_epoch=True, batch_size=len(targets))
        return logits


def accuracies(classes: int) -> nn.ModuleDict:
    """Return the accuracy, and how often the right class is among the five that are thought most likely."""
    ranks = {"acc": 1, "top5": min(5, classes)}
    return nn.ModuleDict({name: MulticlassAccuracy(classes, k, average="micro") for name, k in ranks.items()})
