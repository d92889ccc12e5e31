"""The same question asked of the whole: ``AutoAccumulate`` in a Trainer, its probe and the training after it."""

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.probing.devices import EMULATED, memory
from benchmarks.probing.models import POOL, Model, Samples
from benchmarks.trainers import Module, quiet_trainer
from lightning_ga import AutoAccumulate, ProbeResult
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import attempt

EFFECTIVE = 2**13  # samples of a window that is probed: far above the limits
FACTOR, WINDOWS = 2, 2  # of the training that tries a limit
ADAM = partial(torch.optim.Adam, foreach=True)


class Pool(Dataset[Samples]):
    """A dataset of any length from a few samples."""

    def __init__(self, model: Model, count: int, device: str = "cpu") -> None:
        with torch.device(device):
            self.samples = model.samples()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Samples:
        return tuple(tensor[index % POOL] for tensor in self.samples)


class ProbeOnly(Module):
    """A module whose fit ends once the probe is through."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


def probed(model: Model, budget: int) -> ProbeResult:
    """What the probe of a fit found; the fit ends after it."""
    with memory(EMULATED, budget):
        callback = AutoAccumulate(EFFECTIVE, verify=False, batch_norm="ignore", cache=False)
        _fit(ProbeOnly, model, callback)
        assert callback.probe is not None, "a budget was given"
        return callback.probe


def trains(model: Model, budget: int, micro_batch: int) -> bool:
    """Whether windows of two micro-batches of this size run."""
    settings: dict[str, Any] = {"verify": False, "batch_norm": "ignore", "on_oom": "raise"}
    with memory(EMULATED, budget):
        callback = AutoAccumulate(FACTOR * micro_batch, micro_batch_size=micro_batch, **settings)
        return attempt(lambda: _fit(Module, model, callback)).failure is None


def _fit(kind: type[Module], model: Model, callback: AutoAccumulate) -> None:
    with uncounted():
        data = Pool(model, WINDOWS * EFFECTIVE)
    trainer = quiet_trainer(max_epochs=1, max_steps=WINDOWS, callbacks=[callback])
    trainer.fit(kind(model.build(), ADAM), DataLoader(data, batch_size=FACTOR, collate_fn=on_host))


def on_host(samples: list[Samples]) -> Any:
    """A batch in the host's memory, beside the device that is emulated."""
    with uncounted():
        return default_collate(samples)
