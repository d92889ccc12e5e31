"""How fast a found micro-batch trains under ``AutoAccumulate``, beside a plain PyTorch loop with the same loader."""

import statistics
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.probing.devices import finish
from benchmarks.probing.in_trainer import FACTOR, Module, Pool
from benchmarks.probing.models import POOL, Model, Samples, loss_of
from benchmarks.trainers import quiet_trainer
from benchmarks.turns import Stopwatch, take_turns
from lightning_ga import AutoAccumulate

WARM_UP, ROUNDS = 2, 12  # windows that are not counted, and that are


class OnDevice(Pool):
    """Whole batches that lie on the device: one indexing there, so that no loader hides what a loop costs."""

    def __getitems__(self, indices: list[int]) -> Samples:
        index = torch.tensor(indices, device=self.samples[0].device) % POOL
        return tuple(tensor[index] for tensor in self.samples)


class DeviceWatch(Stopwatch):
    """Waits for the device before the time is taken."""

    def stop(self) -> None:
        finish()
        super().stop()


def loader(model: Model, micro: int, windows: int, device: str) -> DataLoader[Samples]:
    """Micro-batches for so many windows, which need no collating."""
    data = OnDevice(model, micro * FACTOR * windows, device)
    return DataLoader(data, batch_size=micro, collate_fn=lambda batch: batch)


def plain(watch: Stopwatch, model: Model, micro: int, windows: int, device: str) -> None:
    """The loop that PyTorch's documentation shows, accumulated; each window timed."""
    net = model.build().to(device).train()
    optimizer = torch.optim.Adam(net.parameters(), foreach=True)
    for index, batch in enumerate(loader(model, micro, windows, device)):
        (loss_of(net, *batch) / FACTOR).backward()
        if (index + 1) % FACTOR == 0:
            optimizer.step()
            optimizer.zero_grad()
        watch.on_train_batch_end(None, None, None, batch, index)


def accumulated(watch: Stopwatch, model: Model, micro: int, windows: int, device: str) -> None:
    """The same windows in a Trainer with ``AutoAccumulate``."""
    ours = AutoAccumulate(micro * FACTOR, micro_batch_size=micro, batch_norm="ignore", verify=False)
    accelerator = "gpu" if device == "cuda" else "cpu"
    trainer = quiet_trainer(max_epochs=1, accelerator=accelerator, callbacks=[ours, watch])
    trainer.fit(Module(model), loader(model, micro, windows, device))


def throughput(model: Model, micro: int, device: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """Samples a second of both, and the median ratio of windows that were timed beside each other."""
    settings: dict[str, Any] = {"model": model, "micro": micro, "windows": rounds + WARM_UP, "device": device}
    fits = [partial(plain, **settings), partial(accumulated, **settings)]
    theirs, mine = (watch.wall[WARM_UP:] for watch in take_turns(fits, [FACTOR] * 2, watch=DeviceWatch))
    return {
        "micro_batch": micro,
        "plain": micro * FACTOR / statistics.median(theirs),
        "ours": micro * FACTOR / statistics.median(mine),
        "ratio": statistics.median(a / b for a, b in zip(theirs, mine)),
    }
