"""Five programs that look for the largest micro-batch: ours and four of others, each as its documentation says.

A program is given a training and where to begin, and returns the size that it found. Peers keep their defaults.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from benchmarks.probing.training import Training
from benchmarks.trainers import quiet_trainer
from lightning_ga import find_micro_batch

OURS, POWER, BINSEARCH, ACCELERATE, MAX_MEM = "ours", "power", "binsearch", "Accelerate", "torch-max-mem"
NEEDS = {ACCELERATE: "accelerate", MAX_MEM: "torch-max-mem"}
HIGH = 2**24  # samples: far above every limit, the same for ours and for Lightning's max_val
ACCEPTED = 2  # steps after which a size is accepted, if the user says so: Adam makes its state at the end of the first


def start_size(limit: int) -> int:
    """Where a search downwards begins: the power of two from 2 to 4 times the limit.

    Examples:
        >>> start_size(245), start_size(256), start_size(257)
        (512, 512, 1024)
    """
    return 2 << (limit - 1).bit_length()


class Module(pl.LightningModule):
    """The training as a LightningModule."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        # The tuner begins with the loader that is there: its init_val of 2 comes into force with the second trial.
        self.shared, self.net, self.batch_size = training, training.net, 2

    def train_dataloader(self) -> Iterator[int]:
        """Batches without end that are their own size: the step fills them, and loading takes no time."""
        return repeat(self.batch_size)

    def training_step(self, size: int, batch_idx: int) -> Tensor:
        return self.shared.loss(size)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        with self.shared.counter.step(self.batch_size):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.shared.optimizer


def lightning(training: Training, _: int, mode: str) -> int:
    """``Tuner.scale_batch_size``, ``power`` or ``binsearch``: 3 steps a trial, from 2 samples."""
    accelerator = "gpu" if training.samples[0].is_cuda else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(max_epochs=1, accelerator=accelerator, default_root_dir=folder)
        return Tuner(trainer).scale_batch_size(Module(training), mode=mode, max_val=HIGH) or 0


def accelerate(training: Training, start: int) -> int:
    """``find_executable_batch_size`` around the training, which ends once a size is accepted."""
    from accelerate.utils import find_executable_batch_size

    return int(find_executable_batch_size(partial(_train, training), starting_batch_size=start)())


def max_mem(training: Training, start: int) -> int:
    """``maximize_memory_utilization`` around the training."""
    from torch_max_mem import maximize_memory_utilization

    return int(maximize_memory_utilization()(partial(_train, training))(batch_size=start))


def _train(training: Training, batch_size: int) -> int:
    for _ in range(ACCEPTED):
        training.step(batch_size)
    return batch_size


PEERS: dict[str, tuple[Callable[[Training, int], int], str]] = {  # and how each goes through sizes
    POWER: (partial(lightning, mode=POWER), "×2"),
    BINSEARCH: (partial(lightning, mode=BINSEARCH), "×2, ½"),
    ACCELERATE: (accelerate, "×0.9"),
    MAX_MEM: (max_mem, "÷2"),
}


def found_by(program: str, training: Training, start: int, budget: int = 0) -> tuple[int, str]:
    """The size that a program found, and its method; ours is told all that is alive, as in ``AutoAccumulate``."""
    if program in PEERS:
        search, method = PEERS[program]
        return search(training, start), method
    device = training.samples[0].device
    found = find_micro_batch(training.step, high=HIGH, budget=budget, device=device, resident=training.resident)
    return found.limit, found.method
