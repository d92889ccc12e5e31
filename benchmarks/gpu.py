"""What only a GPU can tell: ``python -m benchmarks.gpu``.

Stages, each with a file of its own, ``benchmarks/results/<device>-<stage>.json``; no cell begins after ``--minutes``:

- ``throughput``: the found micro-batch under ``AutoAccumulate`` beside a plain PyTorch loop;
- ``fp16``: probe and training with a gradient scaler;
- ``cells``: the cells of ``benchmarks.probe`` in real memory, with the caching allocator held to a budget, and how far
  the peak that was predicted from small steps lies from ``max_memory_allocated``.
"""

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
from torch.utils.data import DataLoader

from benchmarks.output import Record, Target, at_least, at_most, judged, lacks_cuda, parsed, plain, shown, write_json
from benchmarks.probe import against_binsearch, peers, prepare, run, summary, targets
from benchmarks.probing.cells import ADAM, FACTOR, SMALL, Cell, Pool, cells, retries
from benchmarks.probing.devices import CUDA, GIB, capped_cuda, finish, memory
from benchmarks.probing.programs import HIGH
from benchmarks.probing.training import MODELS, POOL, Model, Samples, Training
from benchmarks.trainers import Module, cross_entropy, quiet, quiet_trainer
from benchmarks.turns import Stopwatch, fit, take_turns
from lightning_ga import AutoAccumulate, find_micro_batch

STAGES = ("throughput", "fp16", "cells")
FOUND, ERROR, SPEED = 0.98, 0.016, 0.98
MOST_STEPS = 6  # of a search; the median is 4
HALF, CONVOLUTIONS = "GPT, SDPA", "resnet34d 224"
HEADROOM = 0.9  # share of the device that the largest budget may be: other processes, and CUDA itself
ENDLESS = 10**9  # samples: the watch ends training
ROOM = 2  # times the budget: the step that is measured may take more than was predicted
WARM_UP, TIMED_WINDOWS = 2, 12  # windows that are not counted, and that are


class Watch(pl.Callback):
    """Ends training after some windows, and keeps the allocator's errors and retries at the end of the first one."""

    def __init__(self, windows: int) -> None:
        self.windows, self.before = windows, (0, 0)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step <= 1:
            self.before = retries()
        trainer.should_stop = trainer.global_step == self.windows


def fit_at_limit(model: str, gib: float, windows: int) -> dict[str, Any]:
    """Probe and train in a budget, with a gradient scaler."""
    settings = {"verify": False, "batch_norm": "ignore", "cache": False}
    with capped_cuda(int(gib * GIB)):
        callback, watch = AutoAccumulate(accumulate=FACTOR, memory_budget=int(gib * GIB), **settings), Watch(windows)
        trainer = quiet_trainer(max_epochs=1, accelerator="gpu", precision="16-mixed", callbacks=[callback, watch])
        trainer.fit(Module(MODELS[model].build(), ADAM), DataLoader(Pool(MODELS[model], ENDLESS), batch_size=POOL))
        found, (errors, freed) = callback.probe, (now - then for now, then in zip(retries(), watch.before))
        assert found is not None, "a budget was given"
        return {
            "model": model,
            "gib": gib,
            "limit": found.limit,
            "steps": found.steps,
            "failed": sum(not trial.fits for trial in found.trials),
            "windows": trainer.global_step,
            "ooms": callback.oom_events,
            "errors": errors,
            "retries": freed,
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
    return "\n".join([summary(records), against_binsearch(records), predictions])


def fit_targets(records: Sequence[Record]) -> list[Target]:
    """Return the targets of trainings at the limit.

    Examples:
        >>> all(target.met for target in fit_targets([{"ooms": 0, "errors": 0, "retries": 0, "failed": 1}]))
        True
    """
    return [
        at_most("out-of-memory errors in training", sum(one["ooms"] + one["errors"] for one in records), 0),
        at_most("retries of the allocator in training", sum(one["retries"] for one in records), 0),
        at_most("failed trials of a probe, most", max((one["failed"] for one in records), default=0), 1),
    ]


@dataclass(frozen=True, slots=True)
class Stage:
    pieces: list[Callable[[], dict[str, Any]]]
    targets: Callable[[Sequence[Record]], list[Target]]
    text: Callable[[Sequence[Record]], str] = lambda records: "\n".join(map(str, records))


def all_stages(models: Sequence[str], gibs: Sequence[float], windows: int) -> dict[str, Stage]:
    """Return all stages for these models and budgets; those with one budget take the largest up to 8 GiB."""
    one = max([gib for gib in gibs if gib <= 8], default=min(gibs))
    halves = [partial(fit_at_limit, model, one, windows) for model in (HALF, CONVOLUTIONS) if model in models]
    # Small budgets of all models come first: if time is short, the large ones are left out.
    chosen = sorted(cells(models, gibs, CUDA), key=lambda cell: cell.gib)
    timed = [partial(throughput, model, one) for model in models if model in (CONVOLUTIONS, "MLP")]
    return {
        "throughput": Stage(
            timed, lambda runs: [at_least("images/s ÷ plain loop", min(x["ratio"] for x in runs), SPEED)]
        ),
        "fp16": Stage(halves, fit_targets),
        "cells": Stage([partial(extend, cell) for cell in chosen], gpu_targets, cells_text),
    }


def measure(name: str, stage: Stage, device: str, until: float) -> int:
    """Measure the pieces of a stage, and write the results after each piece; return 1 if a target is missed."""
    file = f"{re.sub(r'[^a-z0-9]+', '-', device.lower())}-{name}"
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
        write_json(file, {**record, "cells": records, "errors": errors})
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
    known = all_stages(models, gibs, windows)
    return max(measure(name, known[name], device, until) for name in stages)


if __name__ == "__main__":
    raise SystemExit(measure_all(**parsed("gpu", __doc__, measure_all, None)))
