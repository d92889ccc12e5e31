"""A regression, in the way of lightning-hydra-template: optimizer and schedule come as partials."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, R2Score


class Regression(LightningModule):
    """A perceptron that predicts one number a sample.

    Args:
        features: Numbers of a sample.
        hidden: Width of the hidden layer.
        optimizer: Takes the parameters and returns an optimizer.
        scheduler: Takes the optimizer and returns a schedule by epoch; none if left out.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.val_mse, self.val_r2 = MeanSquaredError(), R2Score()
        self.test_mse, self.test_r2 = MeanSquaredError(), R2Score()

    def forward(self, samples: Tensor) -> Tensor:
        return self.net(samples).squeeze(1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        samples, targets = batch
        loss = nn.functional.mse_loss(self(samples), targets)
        self.log("train/loss", loss, batch_size=len(targets))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        samples, targets = batch
        predictions = self(samples)
        for name, metric in {"val/mse": self.val_mse, "val/r2": self.val_r2}.items():
            metric.update(predictions, targets)
            self.log(name, metric, on_epoch=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        samples, targets = batch
        predictions = self(samples)
        for name, metric in {"test/mse": self.test_mse, "test/r2": self.test_r2}.items():
            metric.update(predictions, targets)
            self.log(name, metric, on_epoch=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams.optimizer(self.parameters())
        if self.hparams.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.hparams.scheduler(optimizer)}
