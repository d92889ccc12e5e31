"""How fast a found micro-batch trains under ``AutoAccumulate``, beside a plain PyTorch loop with the same loader."""

import statistics
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.probing.models import POOL, Model, Samples, loss_of
from benchmarks.trainers import quiet_trainer
from benchmarks.turns import Stopwatch, take_turns
from lightning_ga import AutoAccumulate

FACTOR, WARM_UP, ROUNDS = 2, 2, 12  # micro-batches a window; windows that are not counted, and that are


class Pool(Dataset[Samples]):
    """A dataset of any length from a few samples."""

    def __init__(self, model: Model, count: int, device: str) -> None:
        with torch.device(device):
            self.samples = model.samples()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Samples:
        inputs, targets = (tensor[index % POOL] for tensor in self.samples)
        return inputs, targets


class OnDevice(Pool):
    """Whole batches that lie on the device: one indexing there, so that no loader hides what a loop costs."""

    def __getitems__(self, indices: list[int]) -> Samples:
        index = torch.tensor(indices, device=self.samples[0].device) % POOL
        inputs, targets = (tensor[index] for tensor in self.samples)
        return inputs, targets


def as_it_is(batch: Any) -> Any:
    """A batch needs no collating."""
    return batch


def loader(model: Model, micro: int, windows: int, device: str) -> DataLoader[Samples]:
    """Micro-batches for so many windows."""
    return DataLoader(OnDevice(model, micro * FACTOR * windows, device), batch_size=micro, collate_fn=as_it_is)


class Module(pl.LightningModule):
    """A bare classifier."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.net = model.build()

    def training_step(self, batch: Samples, batch_idx: int) -> Tensor:
        return loss_of(self.net, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), foreach=True)


class Finish(pl.Callback):
    """Waits for the device before the time is taken."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % FACTOR == 0:
            finish()


def finish() -> None:
    """Wait for what the device still has to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def plain(watch: Stopwatch, model: Model, micro: int, windows: int, device: str) -> None:
    """The loop that PyTorch's documentation shows, accumulated; each window timed."""
    net = model.build().to(device).train()
    optimizer = torch.optim.Adam(net.parameters(), foreach=True)
    for index, batch in enumerate(loader(model, micro, windows, device)):
        (loss_of(net, *batch) / FACTOR).backward()
        if (index + 1) % FACTOR == 0:
            optimizer.step()
            optimizer.zero_grad()
            finish()
        watch.on_train_batch_end(None, None, None, batch, index)


def accumulated(watch: Stopwatch, model: Model, micro: int, windows: int, device: str) -> None:
    """The same windows in a Trainer with ``AutoAccumulate``."""
    ours = AutoAccumulate(micro * FACTOR, micro_batch_size=micro, batch_norm="ignore", verify=False)
    trainer = quiet_trainer(
        max_epochs=1, accelerator="gpu" if device == "cuda" else "cpu", callbacks=[ours, Finish(), watch]
    )
    trainer.fit(Module(model), loader(model, micro, windows, device))


def throughput(model: Model, micro: int, device: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """Samples a second of both, and the median ratio of windows that were timed beside each other."""
    settings: dict[str, Any] = {"model": model, "micro": micro, "windows": rounds + WARM_UP, "device": device}
    watches = take_turns([partial(plain, **settings), partial(accumulated, **settings)], [FACTOR] * 2)
    theirs, mine = (watch.wall[WARM_UP:] for watch in watches)
    samples = micro * FACTOR
    return {
        "micro_batch": micro,
        "plain": samples / statistics.median(theirs),
        "ours": samples / statistics.median(mine),
        "ratio": statistics.median(a / b for a, b in zip(theirs, mine)),
    }
