"""On a CUDA device: fits at the limit that their probe finds, meters, and predictions, beside the allocator's word."""

import random
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.probing.cells import HIGH, SMALL, Cell
from benchmarks.probing.devices import GIB, capped_cuda, finish, memory, place
from benchmarks.probing.in_trainer import FACTOR, Module, Pool
from benchmarks.probing.models import LENGTH, MODELS, POOL, WORDS, Samples
from benchmarks.probing.training import Training
from benchmarks.trainers import quiet_trainer
from lightning_ga import AutoAccumulate, find_micro_batch
from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.segments import ROUNDING, replay_segments

ENDLESS = 10**9  # samples: the watch ends training
SHORTEST = LENGTH // 4  # of sentences of varied length
ROOM = 2  # times the budget: the step that is measured may take more than was predicted


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


def fit_at_limit(
    model: str, gib: float, watch: Watch, *, precision: Any = "32-true", varied: bool = False, tries: bool = False
) -> dict[str, Any]:
    """Probe and train in a budget, if ``tries`` while cuDNN tries its algorithms; tell what was found, what failed."""
    budget, cudnn = int(gib * GIB), torch.backends.cudnn
    with capped_cuda(budget), cudnn.flags(enabled=cudnn.enabled, benchmark=tries):
        callback = AutoAccumulate(
            accumulate=FACTOR, memory_budget=budget, verify=False, batch_norm="ignore", cache=False
        )
        trainer = quiet_trainer(max_epochs=1, accelerator="gpu", precision=precision, callbacks=[callback, watch])
        data: Any = Sentences() if varied else Pool(MODELS[model], ENDLESS)
        loader = DataLoader(data, batch_size=POOL, collate_fn=padded if varied else None)
        trainer.fit(Module(MODELS[model]), loader)
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
    for _ in range(2):
        training.step(SMALL)
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


def prediction(cell: Cell) -> dict[str, Any]:
    """Predict the limit and its peak without a step near it, then measure a step of that size."""
    device = place(cell.kind)
    with memory(cell.kind, cell.budget):
        training = Training(MODELS[cell.model], device)
        found = find_micro_batch(
            training.step, high=HIGH, budget=cell.budget, device=device, resident=training.resident, predict_only=True
        )
        del training
    with memory(cell.kind, ROOM * cell.budget):
        training = Training(MODELS[cell.model], device)
        training.step(SMALL)
        finish()
        torch.cuda.reset_peak_memory_stats()
        training.step(found.limit)
        finish()
        measured = torch.cuda.max_memory_allocated()
        del training
    error = (found.peak_bytes - measured) / measured
    return {"samples": found.limit, "predicted": found.peak_bytes, "measured": measured, "error": error}
