"""What the reference models share: an optimizer, its schedule, and training curves by optimizer step.

Stock Lightning logs the value of a window's last micro-batch. Here the ``train/…`` of an optimizer step is the mean
over its window, with ``AutoAccumulate`` and without; at the end of an epoch it is the mean over the epoch.

Tested in tests/models/test_classifier.py.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ga import optimizer_steps
from lightning_ga.errors import UserError

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakeScheduler = Callable[..., torch.optim.lr_scheduler.LRScheduler]


class SampleMean(Metric):
    """Mean of means over some samples each; ``torchmetrics.MeanMetric`` 1.9 leaves NaN out, or forgets the weights."""

    full_state_update = False
    total: Tensor
    samples: Tensor

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor, samples: int) -> None:
        """Count a mean over so many samples."""
        self.total += value * samples
        self.samples += samples

    def compute(self) -> Tensor:
        """The mean over all samples."""
        return self.total / self.samples


class ReferenceModule(LightningModule):
    """An optimizer, a schedule by optimizer step, and means over windows and epochs.

    Args:
        measured: Names of the values that :meth:`record` is given.
        optimizer: Takes the parameters and returns an optimizer; Adam at 1e-3 when left out.
        lr_scheduler: Takes the optimizer and returns a scheduler, stepped once per optimizer step.
            If it has an argument ``total_steps``, it is given the optimizer steps of the whole run; if it has an
            argument ``epoch_steps``, those of the first epoch.
    """

    def __init__(
        self, measured: Sequence[str], optimizer: MakeOptimizer | None = None, lr_scheduler: MakeScheduler | None = None
    ) -> None:
        super().__init__()
        self.make_optimizer = optimizer or torch.optim.Adam
        self.make_scheduler = lr_scheduler
        # A sync would be a collective on every micro-batch: rank 0 shows the curve of its own share.
        self.of_window: Any = nn.ModuleDict({name: SampleMean(sync_on_compute=False) for name in measured})
        self.of_epoch: Any = nn.ModuleDict({name: SampleMean() for name in measured})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log values of the validation set as ``val/…``."""
        self.evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log values of the test set as ``test/…``."""
        self.evaluate(batch, "test")

    def evaluate(self, batch: Any, stage: str) -> None:
        """Log the values of a batch, named by the stage."""
        raise NotImplementedError

    def on_train_epoch_start(self) -> None:
        """Reset the means of the epoch."""
        for mean in self.of_epoch.values():
            mean.reset()

    def record(self, values: Mapping[str, Tensor], items: int) -> None:
        """Count values of a micro-batch, each a mean over so many items; log the means of the window."""
        for name, value in values.items():
            self.of_epoch[name].update(value.detach(), items)
            mean = self.of_window[name]
            mean.update(value.detach(), items)
            mean._forward_cache = mean.compute()  # what Lightning 2.6 shows of a metric: of the window, not of a batch
            self.log(f"train/{name}", mean, on_step=True, on_epoch=False, batch_size=items)

    def on_train_epoch_end(self) -> None:
        """Set the values of training to the means over the epoch and over ranks."""
        means = {f"train/{name}": mean.compute() for name, mean in self.of_epoch.items() if mean.update_called}
        # Without sync_dist Lightning warns.
        self.log_dict(means, logger=False, on_step=False, on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Set them in the middle of a fit as well: checkpoints and early stopping may read them here."""
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self.on_train_epoch_end()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reset the means of the window: the next micro-batch starts another."""
        for mean in self.of_window.values():
            mean.reset()

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and its scheduler by optimizer step if there is one."""
        optimized: Any = self.parameters()
        if "model" in _parameters_of(self.make_optimizer):  # timm's groups them by their names, and by layers
            optimized = getattr(self, "net", self)
        optimizer = self.make_optimizer(optimized)
        if self.make_scheduler is None:
            return optimizer
        arguments: dict[str, float] = {}
        if "total_steps" in _parameters_of(self.make_scheduler):
            steps = optimizer_steps(self.trainer)
            if self.trainer.limit_train_batches == 0:
                raise UserError(
                    f"trainer.limit_train_batches={self.trainer.limit_train_batches} leaves no batch to train on: "
                    "give a number above 0, or task=validate to only validate."
                )
            if math.isinf(steps):
                raise UserError(
                    f"Training has no end (trainer.max_epochs={self.trainer.max_epochs}), and its learning-rate "
                    "schedule needs one: give trainer.max_epochs=… or trainer.max_steps=…, or lr_scheduler=none."
                )
            arguments["total_steps"] = int(steps)
        if "epoch_steps" in _parameters_of(self.make_scheduler):
            loop = self.trainer.fit_loop
            with patch.object(loop, "max_epochs", 1), patch.object(loop.epoch_loop, "max_steps", -1):
                arguments["epoch_steps"] = optimizer_steps(self.trainer)
        scheduler = self.make_scheduler(optimizer, **arguments)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; a partial has none if it was given an argument that its function lacks."""
    return inspect.signature(getattr(function, "func", function)).parameters
