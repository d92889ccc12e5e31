"""Trains with batches of 512 in an address space that the kernel keeps small, and writes what came of it."""

import resource
import warnings
from pathlib import Path
from typing import Any

import torch
from reference import Regression, Samples, fit
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

WIDTH = 2**14  # numbers of a sample in each of a handful of tensors: 32 MiB for 512 samples


class Wide(Regression):
    """Few weights, large activations."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.sizes: list[list[int]] = [[], []]  # of each epoch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets, _ = batch
        self.sizes[self.current_epoch].append(len(inputs))
        wide = self.net(inputs).expand(-1, WIDTH).sin().cos()
        return (wide.mean(1, keepdim=True) - targets).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def train(**settings: Any) -> tuple[torch.Tensor, list[list[int]], int, int]:
    """Fit one window of 1024 samples an epoch; return weights, sizes, events and the planned micro-batch."""
    module, callback = Wide(), AutoAccumulate(1024, micro_batch_size=512, verify=False, **settings)
    fit(DataLoader(Samples(1024, torch.float32), batch_size=512), callback, module=module, max_epochs=2)
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return weights, module.sizes, callback.oom_events, callback.plan.micro_batch_size


def main(room: int, written: Path) -> None:
    """Train without a limit and with one, of the bytes that training may add to what is mapped."""
    warnings.simplefilter("ignore")
    whole, error = train(), None
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, hard))
    try:
        train(on_oom="raise")
    except RuntimeError as failure:
        error = str(failure)
    torch.save((whole, error, train()), written)
