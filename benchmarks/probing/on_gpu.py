"""Fits on a CUDA device at the limit that their probe finds, and whether the allocator had trouble in them."""

import random
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.probing.devices import GIB, capped_cuda
from benchmarks.probing.models import LENGTH, MODELS, POOL, WORDS, Samples
from benchmarks.probing.throughput import Module, Pool
from benchmarks.probing.training import Training
from benchmarks.trainers import quiet_trainer
from lightning_ga import AutoAccumulate
from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.segments import ROUNDING, replay_segments

FACTOR = 2  # micro-batches of a window
ENDLESS = 10**9  # samples: the watch ends training
SHORTEST = LENGTH // 4  # of sentences of varied length


class Watch(pl.Callback):
    """Ends training after some windows or seconds; counts what the allocator did after the first window."""

    def __init__(self, windows: int | None = None, seconds: float = float("inf")) -> None:
        self.windows, self.seconds = windows, seconds
        self.troubles, self.trained, self.peak_reserved = (0, 0), 0, 0
        self.begun = 0.0
        self.loss = float("nan")
        self._before: tuple[int, int] | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        """Read the counters at the end of a window; the first one is warming up."""
        if trainer.global_step == self.trained:
            return
        self.trained = trainer.global_step
        now = AllocatorMeter(pl_module.device).troubles()
        if self._before is None:
            self._before, self.begun = now, time.monotonic()
        self.troubles = (now[0] - self._before[0], now[1] - self._before[1])
        self.peak_reserved = torch.cuda.max_memory_reserved()
        if self.trained == self.windows or time.monotonic() - self.begun > self.seconds:
            trainer.should_stop = True
            self.loss = float(outputs["loss"])


class Sentences(Dataset[Tensor]):
    """Words of lengths that vary from sample to sample."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Tensor:
        choices = random.Random(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, WORDS, (choices.randint(SHORTEST, LENGTH) + 1,), generator=generator)


def padded(sentences: list[Tensor]) -> Samples:
    """As long as the longest of them."""
    words = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    return words[:, :-1], words[:, 1:]


class Short(Module):
    """The GPT on sentences that are shorter than its longest."""

    def __init__(self) -> None:
        super().__init__(MODELS["GPT, SDPA"])
        self.net.forward = self.read  # type: ignore[method-assign]

    def read(self, words: Tensor) -> Tensor:
        net: Any = self.net
        logits: Tensor = net.head(net.blocks(net.words(words) + net.positions[: words.shape[1]]))
        return logits


def fit_at_limit(model: str, gib: float, watch: Watch, *, precision: Any = "32-true", varied: bool = False) -> Any:
    """Probe and train in a budget, and tell what was found and what went wrong."""
    budget = int(gib * GIB)
    with capped_cuda(budget):
        callback = AutoAccumulate(
            accumulate=FACTOR, memory_budget=budget, verify=False, batch_norm="ignore", cache=False
        )
        trainer = quiet_trainer(max_epochs=1, accelerator="gpu", precision=precision, callbacks=[callback, watch])
        data: Any = Sentences() if varied else Pool(MODELS[model], ENDLESS, "cpu")
        module = Short() if varied else Module(MODELS[model])
        trainer.fit(module, DataLoader(data, batch_size=POOL, collate_fn=padded if varied else None))
        assert callback.probe is not None
        assert callback.plan is not None
        found, micro_batch = callback.probe, callback.plan.micro_batch_size
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return {
            "model": model,
            "gib": gib,
            "precision": precision,
            "limit": found.limit,
            "micro_batch": micro_batch,
            "method": found.method,
            "steps": found.steps,
            "failed": sum(not trial.fits for trial in found.trials),
            "windows": watch.trained,
            "seconds": round(time.monotonic() - watch.begun, 1),
            "ooms": callback.oom_events,
            "errors_and_retries": watch.troubles,
            "peak_reserved": watch.peak_reserved,
            "loss": watch.loss,
            "scale": None if scaler is None else scaler.get_scale(),
        }


def meters(model: str, samples: int) -> dict[str, Any]:
    """One recorded step: what the meter, its trace and the replay of it say, beside PyTorch's own statistics."""
    training = Training(MODELS[model], "cuda")
    training.step(2)
    training.step(2)
    meter = AllocatorMeter(training.samples[0].device)
    meter.start(record=True)
    training.step(samples)
    peak, undisturbed = meter.finish()
    trace, reserved = meter.trace(samples), torch.cuda.max_memory_reserved()
    replayed = None if trace is None else replay_segments(trace.sizes, trace)
    return {
        "model": model,
        "samples": samples,
        "undisturbed": undisturbed,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": reserved,
        "metered": peak,
        "traced": None if trace is None else trace.peak(ROUNDING),
        "replayed": None if replayed is None else tuple(replayed),
    }
