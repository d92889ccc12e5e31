"""The same on a GPU: ``python -m benchmarks.gpu``.

The cells of ``benchmarks.probe`` in real memory: the caching allocator of the current CUDA device is
given a budget, and every program runs real steps in it. Two things come on top: how far the peak
that was predicted from small steps lies from ``max_memory_allocated``, and how fast the found
micro-batch trains under ``AutoAccumulate`` beside a plain PyTorch loop. Writes
``benchmarks/results/<device>.json``. Exits with 1 if a target of ours is missed, and with 2 where
there is no CUDA device.
"""

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.output import as_text, installed, write_json
from benchmarks.probe import quiet, run
from benchmarks.probing.cells import Cell, cells
from benchmarks.probing.devices import CUDA, GIB
from benchmarks.probing.models import MODELS
from benchmarks.probing.prediction import prediction
from benchmarks.probing.programs import NEEDS, OURS
from benchmarks.probing.tables import Target, against_binsearch, details, shown, summary, targets
from benchmarks.probing.throughput import throughput

BUDGETS = (2.0, 8.0, 24.0)  # GiB; those that the device does not have are left out
FOUND, ERROR, SPEED = 0.98, 0.016, 0.98
TIMED = "resnet34d 224"
BOTH = 2.2  # times a budget: what ours and the plain loop take, in memory at once
HEADROOM = 0.9  # share of the device that the largest budget may be: other processes, and CUDA itself


def budgets(total_bytes: int) -> list[float]:
    """Budgets in GiB that a device can hold.

    Examples:
        >>> budgets(16 * 2**30)
        [2.0, 8.0]
    """
    return [gib for gib in BUDGETS if gib * GIB <= HEADROOM * total_bytes]


def file_name(device: str) -> str:
    """Name of the results of a device.

    Examples:
        >>> file_name("NVIDIA H200"), file_name("NVIDIA GeForce RTX 4090")
        ('nvidia-h200', 'nvidia-geforce-rtx-4090')
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def gpu_targets(records: Sequence[Mapping[str, Any]]) -> list[Target]:
    """The targets of cells, of predictions and of throughput."""
    errors = [abs(cell["prediction"]["error"]) for cell in records if cell.get("prediction")]
    speeds = [cell["throughput"]["ratio"] for cell in records if cell.get("throughput")]
    found = targets(records, found=FOUND)
    gaps = sum("incomplete" in cell for cell in records)
    found.append(Target("cells that an error cut short", gaps, gaps == 0, "none"))
    if errors:
        worst = max(errors)
        found.append(Target("prediction error, largest", worst, worst <= ERROR, f"at most {ERROR}"))
    if speeds:
        slowest = min(speeds)
        found.append(Target("images/s ÷ plain loop, least", slowest, slowest >= SPEED, f"at least {SPEED}"))
    return found


def extend(record: dict[str, Any]) -> dict[str, Any]:
    """A cell's record with its prediction error and, for one model, its throughput."""
    if not record["limit"]:
        return record
    try:
        record["prediction"] = prediction(Cell(record["model"], record["gib"], record["kind"]))
        if record["model"] == TIMED and BOTH * record["gib"] * GIB <= torch.cuda.mem_get_info()[1]:
            record["throughput"] = throughput(MODELS[TIMED], record["programs"][OURS]["found"], "cuda")
    except torch.OutOfMemoryError as error:  # what was measured so far is kept, and the table has a gap
        record["incomplete"] = str(error)
    return record


def extras(records: Sequence[Mapping[str, Any]]) -> Any:
    """Predictions and throughput as they are shown."""
    table = shown("model", ("GiB", "samples", "predicted MiB", "measured MiB", "error", "images/s ÷ plain"))
    for cell in records:
        foreseen, speed = cell.get("prediction"), cell.get("throughput")
        if foreseen:
            peaks = (f"{foreseen[key] / 2**20:,.1f}" for key in ("predicted", "measured"))
            ratio = f"{speed['ratio']:.3f}" if speed else ""
            size, error = f"{foreseen['samples']:,}", f"{100 * foreseen['error']:+.2f} %"
            table.add_row(cell["model"], f"{cell['gib']:g}", size, *peaks, error, ratio)
    return table


def text(record: Mapping[str, Any]) -> str:
    """Tables and legend of a record."""
    records = record["cells"]
    parts = [as_text(table) for table in (summary(records), against_binsearch(records), extras(records))]
    parts.append(
        f"{record['device']}, memory capped by set_per_process_memory_fraction. The peak is\n"
        "predicted from small steps alone, and measured by max_memory_allocated in a\n"
        "training of its own. images/s: windows of the found micro-batch, timed in\n"
        "alternating pairs."
    )
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, write; 1 if a target is missed, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), help="default: all")
    parser.add_argument("--budgets", nargs="*", type=float, help=f"GiB (default: {BUDGETS}, as far as the device goes)")
    settings = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device, and PyTorch sees none: use benchmarks.probe.", file=sys.stderr)
        return 2
    quiet()
    start, device = time.perf_counter(), torch.cuda.get_device_name()
    chosen = list(cells(settings.models, settings.budgets or budgets(torch.cuda.mem_get_info()[1]), CUDA))
    if not chosen:
        print(f"{device} is smaller than the smallest budget, {BUDGETS[0]:g} GiB: give --budgets.", file=sys.stderr)
        return 2
    records: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    for cell in chosen:
        records += [extend(found) for found in run([cell])]
        record = {
            "device": device,
            "cuda": torch.version.cuda,
            "peers": {name: installed(name) for name in ("lightning", *NEEDS.values())},
            "targets": [asdict(target) for target in gpu_targets(records)],
            "cells": records,
            "seconds": round(time.perf_counter() - start, 1),
        }
        write_json(file_name(device), record)  # whatever comes next, this is kept
    print(f"{as_text(details(records))}\n{text(record)}")
    for target in record["targets"]:
        print(f"{'met   ' if target['met'] else 'MISSED'} {target['what']}: {target['value']:.3g}, {target['asked']}")
    print(f"{file_name(device)}.json, {record['seconds']} s")
    return int(not all(target["met"] for target in record["targets"]))


if __name__ == "__main__":
    sys.exit(main())
