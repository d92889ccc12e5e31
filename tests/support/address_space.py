"""Trains with batches of 512 in an address space that the kernel keeps small, and writes what came of it."""

import json
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


def train(**settings: Any) -> dict[str, Any]:
    """Fit one window of 1024 samples an epoch in micro-batches of 512, as far as the memory goes."""
    module = Wide()
    callback = AutoAccumulate(1024, micro_batch_size=512, verify=False, **settings)
    data = DataLoader(Samples(1024, torch.float32), batch_size=512)
    fit(data, callback, module=module, max_epochs=2)
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return {
        "weights": weights.tolist(),
        "sizes": module.sizes,
        "events": callback.oom_events,
        "planned": callback.plan.micro_batch_size,  # type: ignore[union-attr]
    }


def mapped() -> int:
    """Bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(room: int, written: Path) -> None:
    """Train without a limit and with one, of the bytes that training may add to what is mapped."""
    warnings.simplefilter("ignore")
    whole = train()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped() + room, hard))
    try:
        train(on_oom="raise")
        error = None
    except RuntimeError as failure:
        error = str(failure)
    written.write_text(json.dumps({"whole": whole, "error": error, "limited": train()}))
