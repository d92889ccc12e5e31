"""What only a GPU can tell: ``python -m benchmarks.gpu``.

Stages, each with a file of its own, ``benchmarks/results/<device>-<stage>.json``; no cell begins after ``--minutes``:

- ``sanity``: what our meters say of one step, beside PyTorch's own statistics;
- ``throughput``: the found micro-batch under ``AutoAccumulate`` beside a plain PyTorch loop;
- ``fp16``, ``cudnn``: probe and training with a gradient scaler, and with ``torch.backends.cudnn.benchmark``;
- ``cells``: the cells of ``benchmarks.probe`` in real memory, with the caching allocator held to a budget, and how far
  the peak that was predicted from small steps lies from ``max_memory_allocated``;
- ``soak``, only where it is named: training at the limit for ``--soak`` minutes, on sentences whose lengths vary.
"""

import random
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.output import Record, Target, at_least, at_most, judged, lacks_cuda, parsed, plain, shown, write_json
from benchmarks.probe import against_binsearch, details, peers, prepare, run, summary, targets
from benchmarks.probing.cells import ADAM, FACTOR, SMALL, Cell, Pool, cells
from benchmarks.probing.devices import CUDA, GIB, capped_cuda, finish, memory
from benchmarks.probing.programs import HIGH
from benchmarks.probing.training import LENGTH, MODELS, POOL, WORDS, Model, Samples, Training
from benchmarks.trainers import Module, cross_entropy, quiet, quiet_trainer
from benchmarks.turns import Stopwatch, fit, take_turns
from lightning_ga import AutoAccumulate, find_micro_batch
from lightning_ga.memory.allocator import AllocatorMeter
from lightning_ga.memory.segments import replay_segments

SOAK = "soak"
STAGES = ("sanity", "throughput", "fp16", "cudnn", "cells")
FOUND, ERROR, SPEED, RESERVED, SHARE = 0.98, 0.016, 0.98, 0.01, 0.95
MOST_STEPS = 6  # of a search; the median is 4
HALF, CONVOLUTIONS = "GPT, SDPA", "resnet34d 224"
RECORDED = (16, 64)  # samples of the steps whose memory is recorded
HEADROOM = 0.9  # share of the device that the largest budget may be: other processes, and CUDA itself
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


def by_loop(watch: Stopwatch, model: Model, data: OnDevice, micro: int) -> None:
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
    """Samples a second of ours and of a plain loop, at a micro-batch that leaves room for both in a budget."""
    model, micro = MODELS[name], prediction(Cell(name, gib / 2.2, CUDA))["samples"]
    data = OnDevice(model, micro * FACTOR * (TIMED_WINDOWS + WARM_UP), "cuda")
    fits = [partial(loop, model=model, data=data, micro=micro) for loop in (by_loop, accumulated)]
    theirs, mine = (watch.wall[WARM_UP:] for watch in take_turns(fits, watch=DeviceWatch))
    return {
        "model": name,
        "gib": gib,
        "micro_batch": micro,
        "plain": micro * FACTOR / statistics.median(theirs),
        "ours": micro * FACTOR / statistics.median(mine),
        "ratio": statistics.median(a / b for a, b in zip(theirs, mine)),
    }


def file_name(device: str) -> str:
    """Name of the results of a device.

    Examples:
        >>> file_name("NVIDIA H200"), file_name("NVIDIA GeForce RTX 4090")
        ('nvidia-h200', 'nvidia-geforce-rtx-4090')
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def gpu_targets(records: Sequence[Record]) -> list[Target]:
    errors = [abs(cell["prediction"]["error"]) for cell in records if cell.get("prediction")]
    found = targets(records, found=FOUND, most_steps=MOST_STEPS, errors=1)  # an allocator does not repeat itself
    found.append(at_most("cells that an error cut short", sum("incomplete" in cell for cell in records), 0))
    return [*found, at_most("prediction error, largest", max(errors), ERROR)] if errors else found


def extend(cell: Cell) -> dict[str, Any]:
    """A cell's record with its prediction error."""
    (record,) = run([cell])
    if record["limit"]:
        try:
            record["prediction"] = prediction(cell)
        except torch.OutOfMemoryError as error:  # what was measured so far is kept, and the table has a gap
            record["incomplete"] = str(error)
    return record


def cells_text(records: Sequence[Record]) -> str:
    rows = []
    for cell in records:
        foreseen = cell.get("prediction")
        if foreseen:
            peaks = (f"{foreseen[key] / 2**20:,.1f}" for key in ("predicted", "measured"))
            place = cell["model"], f"{cell['gib']:g}", f"{foreseen['samples']:,}"
            rows.append((*place, *peaks, f"{100 * foreseen['error']:+.2f} %"))
    predictions = shown(
        ("model",),
        ("GiB", "samples", "predicted MiB", "measured MiB", "error"),
        rows,
        "Memory is capped by set_per_process_memory_fraction. The peak is predicted from small steps alone, and "
        "measured by max_memory_allocated in a training of its own.",
    )
    return "\n".join([details(records), summary(records), against_binsearch(records), predictions])


def sanity_targets(records: Sequence[Record]) -> list[Target]:
    """Meter and replay to the byte; reserved memory, which holes decide, nearly.

    Examples:
        >>> seen = {"allocated": 5, "metered": 5, "replayed": (5, 20), "reserved": 20}
        >>> [target.met for target in sanity_targets([seen])]
        [True, True]
    """
    known = [record for record in records if record["replayed"] is not None]
    wrong = sum(not record["allocated"] == record["metered"] == record["replayed"][0] for record in known)
    apart = max((abs(record["replayed"][1] / record["reserved"] - 1) for record in known), default=1.0)
    return [
        at_most("steps metered or replayed wrongly", wrong, 0),
        at_most("reserved memory, largest error", apart, RESERVED),
    ]


def fit_targets(records: Sequence[Record]) -> list[Target]:
    """A limit at which training has no trouble."""
    ooms = sum(record["ooms"] + record["errors_and_retries"][0] for record in records)
    retries = sum(record["errors_and_retries"][1] for record in records)
    return [
        at_most("out-of-memory errors in training", ooms, 0),
        at_most("retries of the allocator in training", retries, 0),
        at_most("failed trials of a probe, most", max((record["failed"] for record in records), default=0), 1),
    ]


def soak_targets(records: Sequence[Record]) -> list[Target]:
    """No trouble, as near the limit as can be.

    Examples:
        >>> calm = {"ooms": 0, "errors_and_retries": (0, 0), "micro_batch": 96, "limit": 100, "failed": 0}
        >>> all(target.met for target in soak_targets([calm]))
        True
    """
    shares = [record["micro_batch"] / record["limit"] for record in records]
    return [*fit_targets(records), at_least("micro-batch ÷ limit", min(shares), SHARE)]


@dataclass(frozen=True, slots=True)
class Stage:
    pieces: list[Callable[[], dict[str, Any]]]
    targets: Callable[[Sequence[Record]], list[Target]]
    text: Callable[[Sequence[Record]], str] = lambda records: "\n".join(map(str, records))


def all_stages(models: Sequence[str], gibs: Sequence[float], windows: int, soak: float) -> dict[str, Stage]:
    """All stages, for these models and budgets; those with one budget take the largest up to 8 GiB."""
    one = max([gib for gib in gibs if gib <= 8], default=min(gibs))
    at_limit = {HALF: partial(fit_at_limit, HALF, one), CONVOLUTIONS: partial(fit_at_limit, CONVOLUTIONS, one)}
    fits = {model: fit for model, fit in at_limit.items() if model in models}
    halves = [partial(fit, Watch(windows), precision="16-mixed") for fit in fits.values()]
    tried = [partial(fit, Watch(windows), tries=True) for model, fit in fits.items() if model == CONVOLUTIONS]
    lasting = partial(at_limit[HALF], Watch(seconds=60 * soak), precision="bf16-mixed", varied=True)
    # Small budgets of all models first: if time is short, it is large ones that are left out.
    chosen = sorted(cells(models, gibs, CUDA), key=lambda cell: cell.gib)
    timed = [partial(throughput, model, one) for model in models if model in (CONVOLUTIONS, "MLP")]
    return {
        "sanity": Stage([partial(meters, m, n) for m in models for n in RECORDED], sanity_targets),
        "throughput": Stage(
            timed, lambda runs: [at_least("images/s ÷ plain loop", min(x["ratio"] for x in runs), SPEED)]
        ),
        "fp16": Stage(halves, fit_targets),
        "cudnn": Stage(tried, fit_targets),
        "cells": Stage([partial(extend, cell) for cell in chosen], gpu_targets, cells_text),
        SOAK: Stage([lasting], soak_targets),
    }


def measure(name: str, stage: Stage, device: str, until: float) -> int:
    """The pieces of a stage, written down after each: whatever comes next, this is kept; 1 if a target is missed."""
    records: list[dict[str, Any]] = []
    errors: list[str] = []
    targets: list[dict[str, Any]] = []
    for piece in stage.pieces:
        if time.perf_counter() > until:
            break
        try:
            records.append(piece())
            targets = plain(stage.targets(records))
        except Exception:
            errors.append(traceback.format_exc())
        record = {"device": device, "cuda": torch.version.cuda, "peers": peers(), "targets": targets}
        write_json(f"{file_name(device)}-{name}", {**record, "cells": records, "errors": errors})
    print(stage.text(records) if records else "", *errors, sep="\n")
    late = len(stage.pieces) - len(records) - len(errors)
    print(f"{name}: {len(records)} measured, {late} left out for want of time", flush=True)
    return judged(targets) or int(bool(errors))


def measure_all(
    stages: Sequence[str] = STAGES,
    models: Sequence[str] = (*MODELS,),
    budgets: Sequence[float] = (2.0, 8.0, 24.0, 80.0, 120.0),
    windows: int = 20,
    minutes: float = 25.0,
    soak: float = 60.0,
) -> int:
    """Measure stage by stage, in the budgets that the device has; 1 if a target is missed."""
    if lacks_cuda("gpu"):
        return 2
    quiet()
    prepare()
    until, device = time.perf_counter() + 60 * minutes, torch.cuda.get_device_name()
    gibs = [gib for gib in budgets if gib * GIB <= HEADROOM * torch.cuda.mem_get_info()[1]]
    if not gibs:
        print(f"{device} is smaller than the smallest budget: give --budgets.", file=sys.stderr)
        return 2
    known = all_stages(models, gibs, windows, soak)
    return max(measure(name, known[name], device, until) for name in stages)


if __name__ == "__main__":
    raise SystemExit(measure_all(**parsed("gpu", __doc__, measure_all, None)))
