"""On a CUDA device: fits at the limit that their probe finds, meters, predictions, and time beside a plain loop."""

import random
import statistics
import time
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.probing.cells import ADAM, FACTOR, HIGH, SMALL, Cell, Pool
from benchmarks.probing.devices import CUDA, GIB, capped_cuda, finish, memory
from benchmarks.probing.training import LENGTH, MODELS, POOL, WORDS, Model, Samples, Training
from benchmarks.trainers import Module, cross_entropy, quiet_trainer
from benchmarks.turns import Stopwatch, fit, take_turns
from lightning_ga import AutoAccumulate, find_micro_batch
from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.segments import replay_segments

ENDLESS = 10**9  # samples: the watch ends training
SHORTEST = LENGTH // 4  # of sentences of varied length
ROOM = 2  # times the budget: the step that is measured may take more than was predicted
WARM_UP, TIMED_WINDOWS = 2, 12  # windows that are not counted, and that are


class Watch(pl.Callback):
    """Ends training after some windows or seconds; counts what the allocator did after the first window."""

    def __init__(self, windows: int | None = None, seconds: float = float("inf")) -> None:
        self.windows, self.seconds = windows, seconds
        self.troubles, self.trained = (0, 0), 0
        self._first: tuple[float, tuple[int, int]] | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Read the counters at the end of a window; the first one is warming up."""
        if trainer.global_step == self.trained:
            return
        self.trained = trainer.global_step
        now = AllocatorMeter(pl_module.device).troubles()
        begun, before = self._first = self._first or (time.monotonic(), now)
        self.troubles = (now[0] - before[0], now[1] - before[1])
        trainer.should_stop = self.trained == self.windows or time.monotonic() - begun > self.seconds


class Sentences(Dataset[Tensor]):
    """Words of lengths that vary from sample to sample."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Tensor:
        choices = random.Random(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, WORDS, (choices.randint(SHORTEST, LENGTH) + 1,), generator=generator)


def padded(sentences: list[Tensor]) -> Samples:
    words = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    return words[:, :-1], words[:, 1:]


def fit_at_limit(
    model: str, gib: float, watch: Watch, *, precision: Any = "32-true", varied: bool = False, tries: bool = False
) -> dict[str, Any]:
    """Probe and train in a budget, if ``tries`` while cuDNN tries its algorithms; tell what was found, what failed."""
    cudnn, settings = torch.backends.cudnn, {"verify": False, "batch_norm": "ignore", "cache": False}
    with capped_cuda(int(gib * GIB)), cudnn.flags(enabled=cudnn.enabled, benchmark=tries):
        callback = AutoAccumulate(accumulate=FACTOR, memory_budget=int(gib * GIB), **settings)
        trainer = quiet_trainer(max_epochs=1, accelerator="gpu", precision=precision, callbacks=[callback, watch])
        data: Any = Sentences() if varied else Pool(MODELS[model], ENDLESS)
        loader = DataLoader(data, batch_size=POOL, collate_fn=padded if varied else None)
        trainer.fit(Module(MODELS[model].build(), ADAM), loader)
        found, plan = callback.probe, callback.plan
        assert found is not None
        assert plan is not None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return {
            "model": model,
            "gib": gib,
            "precision": precision,
            "limit": found.limit,
            "micro_batch": plan.micro_batch_size,
            "steps": found.steps,
            "failed": sum(not trial.fits for trial in found.trials),
            "windows": watch.trained,
            "ooms": callback.oom_events,
            "errors_and_retries": watch.troubles,
            "scale": None if scaler is None else scaler.get_scale(),
        }


def meters(model: str, samples: int) -> dict[str, Any]:
    """One recorded step: what the meter and the replay of its trace say, beside PyTorch's own statistics."""
    training = Training(MODELS[model], "cuda")
    for _ in range(2):
        training.step(SMALL)
    meter = AllocatorMeter(training.samples[0].device)
    meter.start(record=True)
    training.step(samples)
    peak, _ = meter.finish()
    trace = meter.trace(samples)
    return {
        "model": model,
        "samples": samples,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "metered": peak,
        "replayed": None if trace is None else tuple(replay_segments(trace.sizes, trace)),
    }


def prediction(cell: Cell) -> dict[str, Any]:
    """Predict the limit and its peak without a step near it, then measure a step of that size."""
    with memory(CUDA, cell.budget):
        training = Training(MODELS[cell.model], CUDA)
        found = find_micro_batch(
            training.step, high=HIGH, budget=cell.budget, device=CUDA, resident=training.resident, predict_only=True
        )
        del training
    with memory(CUDA, ROOM * cell.budget):
        training = Training(MODELS[cell.model], CUDA)
        training.step(SMALL)
        finish()
        torch.cuda.reset_peak_memory_stats()
        training.step(found.limit)
        finish()
        measured = torch.cuda.max_memory_allocated()
        del training
    error = (found.peak_bytes - measured) / measured
    return {"samples": found.limit, "predicted": found.peak_bytes, "measured": measured, "error": error}


class OnDevice(Pool):
    """Whole batches that lie on the device: one indexing there, so that no loader hides what a loop costs."""

    def __getitems__(self, indices: list[int]) -> Samples:
        index = torch.tensor(indices, device=self.samples[0].device) % POOL
        return tuple(tensor[index] for tensor in self.samples)

    def collate(self, batch: Samples) -> Samples:
        return batch


class DeviceWatch(Stopwatch):
    """Waits for the device before the time is taken."""

    def stop(self) -> None:
        finish()
        super().stop()


def plain(watch: Stopwatch, model: Model, data: OnDevice, micro: int) -> None:
    """The loop that PyTorch's documentation shows, accumulated; each window timed."""
    net = model.build().to("cuda").train()
    optimizer = ADAM(net.parameters())
    for index, batch in enumerate(DataLoader(data, batch_size=micro, collate_fn=data.collate)):
        (cross_entropy(net, *batch) / FACTOR).backward()
        if (index + 1) % FACTOR == 0:
            optimizer.step()
            optimizer.zero_grad()
            watch.end_of_window()


def accumulated(watch: Stopwatch, model: Model, data: OnDevice, micro: int) -> None:
    """The same windows in a Trainer with ``AutoAccumulate``."""
    ours = {"batch_norm": "ignore", "verify": False}
    fit(watch, Module(model.build(), ADAM), data, micro, FACTOR, ours, accelerator="gpu")


def throughput(name: str, gib: float) -> dict[str, Any]:
    """Samples a second of ours and of a plain loop, at a micro-batch that leaves room for both in a budget.

    The ratio is the median of windows that were timed beside each other.
    """
    model, micro = MODELS[name], prediction(Cell(name, gib / 2.2, CUDA))["samples"]
    data = OnDevice(model, micro * FACTOR * (TIMED_WINDOWS + WARM_UP), "cuda")
    fits = [partial(loop, model=model, data=data, micro=micro) for loop in (plain, accumulated)]
    theirs, mine = (watch.wall[WARM_UP:] for watch in take_turns(fits, watch=DeviceWatch))
    return {
        "model": name,
        "gib": gib,
        "micro_batch": micro,
        "plain": micro * FACTOR / statistics.median(theirs),
        "ours": micro * FACTOR / statistics.median(mine),
        "ratio": statistics.median(a / b for a, b in zip(theirs, mine)),
    }
