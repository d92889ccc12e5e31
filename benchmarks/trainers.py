"""Trainers and modules of the benchmarks, and the process that they run in, without timm."""

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


def quiet() -> None:
    """One thread, the same numbers every time; no advice from the trainers."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def quiet_trainer(**settings: Any) -> pl.Trainer:
    """Return a Trainer on one process of the CPU that writes nothing, with further settings."""
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{**quiet, **settings})


def cross_entropy(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over samples or, where each has many targets, over all of them that count."""
    return nn.functional.cross_entropy(net(inputs).flatten(0, -2), targets.flatten())


def mean_square(net: nn.Module, inputs: Tensor) -> Tensor:
    return net(inputs).square().mean()


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """Weights or gradients as one vector in fp64."""
    dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors if tensor is not None]
    return torch.cat([tensor.detach().flatten().double() for tensor in dense])


def relative_error(value: Tensor, oracle: Tensor) -> float:
    """‖value − oracle‖ ÷ ‖oracle‖."""
    return float((value - oracle).norm() / oracle.norm())


class Module(pl.LightningModule):
    """A bare network with a loss and an optimizer: the less it does itself, the more an addition shows."""

    def __init__(
        self, net: nn.Module, optimizer: Callable[..., Any], loss: Callable[..., Tensor] = cross_entropy
    ) -> None:
        super().__init__()
        self.net, self.optimizer_of, self.loss = net, optimizer, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, *batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer_of(self.parameters())
