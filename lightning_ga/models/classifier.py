"""An image classifier that is independent of accumulation.

Its loss is a mean over samples, so gradients accumulate exactly. Only the training curve depends on
windows: stock Lightning logs the value of a window's last micro-batch; here the logged ``train/loss``
is the mean over all samples of the window so far, so that the curve by optimizer step is the same for
every micro-batch. At the end of an epoch it is the mean over the epoch, for checkpoints, for early
stopping and as the result of a run.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name PyTorch users know)
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_ga.compat.step_counts import optimizer_steps
from lightning_ga.errors import UserError
from lightning_ga.models.sample_mean import SampleMean

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[..., torch.optim.lr_scheduler.LRScheduler]
Batch = tuple[Tensor, Tensor]


class Classifier(LightningModule):
    """Cross-entropy on logits, with curves by optimizer step and a confusion matrix of the test set.

    Args:
        net: Maps images ``(batch, channels, height, width)`` to logits ``(batch, num_classes)``.
        num_classes: Number of classes.
        optimizer: Takes the parameters and returns an optimizer; Adam at 1e-3 when left out.
        lr_scheduler: Takes the optimizer and returns a scheduler, stepped once per optimizer step.
            If it has an argument ``total_steps``, it is given the optimizer steps of the whole run.

    Attributes:
        confusion: After a test, rows of counts ``confusion[target][prediction]``.
    """

    def __init__(
        self,
        net: nn.Module,
        num_classes: int,
        optimizer: MakeOptimizer | None = None,
        lr_scheduler: MakeScheduler | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer or torch.optim.Adam
        self.make_scheduler = lr_scheduler
        # A sync would be a collective on every micro-batch: rank 0 shows the curve of its own share.
        self.window_loss = SampleMean(sync_on_compute=False)
        self.window_accuracy = MulticlassAccuracy(num_classes, average="micro", sync_on_compute=False)
        self.epoch_loss = SampleMean()
        self.epoch_accuracy = SampleMean()
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_confusion = MulticlassConfusionMatrix(num_classes)
        self.confusion: list[list[int]] | None = None
        self._starts_window = True
        self._saved_ends: list[int | None] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, num_classes)``."""
        logits: Tensor = self.net(images)
        return logits

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the ends of saved schedules: restoring replaces the ends that this training needs."""
        self._saved_ends = [state.get("total_steps") for state in checkpoint.get("lr_schedulers", ())]

    def on_train_epoch_start(self) -> None:
        """Reset the means of the epoch."""
        self.epoch_loss.reset()
        self.epoch_accuracy.reset()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of one micro-batch; log the means of the window so far."""
        images, targets = batch
        if self._starts_window:
            self.window_loss.reset()
            self.window_accuracy.reset()
            self._starts_window = False
        logits = self(images)
        loss = F.cross_entropy(logits, targets)
        self.window_loss.update(loss.detach(), len(targets))
        self.window_accuracy.update(logits.detach(), targets)
        self.epoch_loss.update(loss.detach(), len(targets))
        self.epoch_accuracy.update((logits.detach().argmax(dim=1) == targets).float().mean(), len(targets))
        curves = {"train/loss": self.window_loss.compute(), "train/acc": self.window_accuracy.compute()}
        self.log_dict(curves, on_step=True, on_epoch=False, batch_size=len(targets))
        return loss

    def epoch_means(self) -> dict[str, Tensor]:
        """Return loss and accuracy over this rank's samples of the epoch so far."""
        means = {"loss": self.epoch_loss, "acc": self.epoch_accuracy}
        return {name: metric.total / metric.samples for name, metric in means.items() if metric.update_called}

    def on_train_epoch_end(self) -> None:
        """Set ``train/loss`` and ``train/acc`` to the means over the epoch."""
        self._log_epoch()

    def on_validation_epoch_end(self) -> None:
        """Log the means over the epoch, as at its end.

        Checkpoints and early stopping may read them here, in the middle of a fit.
        """
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self._log_epoch()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the next micro-batch start a window."""
        self._starts_window = True

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss`` and ``val/acc`` over the validation set."""
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``test/loss`` and ``test/acc`` and count the confusion matrix."""
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

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and its scheduler by optimizer step if there is one."""
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        arguments = {}
        if "total_steps" in inspect.signature(self.make_scheduler).parameters:
            arguments["total_steps"] = finite_steps(self.trainer)
        scheduler = self.make_scheduler(optimizer, **arguments)
        if isinstance(scheduler, OneCycleLR):
            for end in self._saved_ends:
                refuse_longer(scheduler, end)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _log_epoch(self) -> None:
        if self.epoch_loss.update_called:
            means = {"train/loss": self.epoch_loss.compute(), "train/acc": self.epoch_accuracy.compute()}
            self.log_dict(means, logger=False, on_step=False, on_epoch=True)

    def _evaluate(self, batch: Batch, stage: str, accuracy: MulticlassAccuracy) -> Tensor:
        images, targets = batch
        logits: Tensor = self(images)
        accuracy.update(logits, targets)
        self.log(f"{stage}/loss", F.cross_entropy(logits, targets), batch_size=len(targets), sync_dist=True)
        self.log(f"{stage}/acc", accuracy, on_step=False, on_epoch=True, batch_size=len(targets))
        return logits


def finite_steps(trainer: Any) -> int:
    """Return the optimizer steps of the whole training, for a schedule that needs its end.

    Raises:
        UserError: If the training has no end.
    """
    steps = optimizer_steps(trainer)
    if math.isinf(steps):
        raise UserError(
            f"trainer.max_epochs={trainer.max_epochs} has no end, and the learning-rate schedule needs one: give "
            "trainer.max_epochs=… or trainer.max_steps=…, or choose lr_scheduler=none."
        )
    return int(steps)


def refuse_longer(scheduler: OneCycleLR, end: int | None) -> None:
    """Refuse to resume a OneCycle schedule past its end: it would fail in the middle of the training.

    Raises:
        UserError: If the saved schedule ends before the training does.
    """
    if end is not None and end < scheduler.total_steps:
        raise UserError(
            f"OneCycleLR was made for {end} optimizer steps and cannot be prolonged to {scheduler.total_steps}: keep "
            "trainer.max_epochs as it was, or train from the start, without ckpt_path."
        )
