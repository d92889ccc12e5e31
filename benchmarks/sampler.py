"""How long does an epoch take to start, and what does its order hold? ``python -m benchmarks.sampler``.

The order of ``AutoAccumulate`` beside torch's own samplers, from 10⁴ to 10⁹ samples, as one of 64
simulated ranks. Every cell is a fresh process in which nothing but the sampler works:

- *first*: from the dataset to the first micro-batch: building the sampler, drawing the order;
- *next*: seconds per micro-batch, the mean of up to 1000 that follow;
- *peak*, *held*: growth of the resident memory over what the process held before (Python, PyTorch
  and Lightning): its high-water mark (``VmHWM``, reset before) and what is left in the end.

Times are the shortest of three processes, since other programs can only add to them; memory is the
largest. Cells that would need more than 8 GB are left out. Exits with 1 if 10⁸ samples take more
than 5 s or 1 GB on a rank.
"""

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler

from benchmarks.output import as_text, conclude, empty_table, options
from benchmarks.processes import printed_by
from lightning_ga.loading.recipe_batches import SourceSettings
from lightning_ga.loading.sampler import LARGEST_WRITTEN_ORDER
from lightning_ga.loading.training_source import MicroBatchSource

RANKS, RANK, MICRO_BATCH, FACTOR = 64, 63, 32, 2
SIZES = (10**4, 10**5, 10**6, 10**7, 10**8, LARGEST_WRITTEN_ORDER, 10**9)
QUICK = 10**7
REPEATS, NEXT = 3, 1000
MOST_BYTES = 8e9
TARGET_SIZE, TARGET_SECONDS, TARGET_BYTES = 10**8, 5.0, 1e9
# A list of Python integers, and the 64-bit tensor that it is made of: 8 of pointer, 32 of object, 8.
BYTES_OF_A_LISTED_INDEX = 48

Batches = Iterator[list[int]]


class Counted(Dataset[int]):
    """A dataset of any size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def ours(size: int) -> Batches:
    """What ``AutoAccumulate`` puts in the place of the user's loader, on one of 64 ranks."""
    loader = DataLoader(Counted(size), batch_size=MICRO_BATCH * FACTOR, shuffle=True)
    feed = MicroBatchSource(loader, SourceSettings(recipe_factor=1, world_size=RANKS, rank=RANK, seed=1))
    feed.arrange(0, None, MICRO_BATCH)
    return iter(feed.sampler)


def distributed(size: int) -> Batches:
    """Torch's sampler for ranks."""
    sampler: DistributedSampler[int] = DistributedSampler(Counted(size), num_replicas=RANKS, rank=RANK, seed=1)
    return iter(BatchSampler(sampler, MICRO_BATCH, drop_last=False))


def single(size: int) -> Batches:
    """Torch's sampler for one process; it is the same on one rank as on 64."""
    return iter(BatchSampler(RandomSampler(Counted(size)), MICRO_BATCH, drop_last=False))


SAMPLERS: dict[str, Callable[[int], Batches]] = {
    "AutoAccumulate": ours,
    "DistributedSampler": distributed,
    "RandomSampler": single,
}


def measure(name: str, size: int) -> dict[str, Any]:
    """One cell, in a process of its own."""
    torch.set_num_threads(1)
    SAMPLERS[name](64 * MICRO_BATCH * FACTOR)  # loads what is loaded on first use
    gc.collect()
    reset_peak_resident()
    before = psutil.Process().memory_info().rss
    start, start_cpu = time.perf_counter(), time.process_time()
    batches = SAMPLERS[name](size)
    count = len(next(batches))
    first, first_cpu = time.perf_counter(), time.process_time()
    yielded = sum(1 for _, _ in zip(range(NEXT), batches))
    end = time.perf_counter()
    peak, held = peak_resident(), psutil.Process().memory_info().rss
    assert count == MICRO_BATCH, f"a micro-batch of {count}"
    return {
        "first_seconds": first - start,
        "first_cpu_seconds": first_cpu - start_cpu,
        "next_seconds": (end - first) / yielded,
        "peak_bytes": max(0, peak - before),
        "held_bytes": max(0, held - before),
        "process_bytes": peak,
    }


def reset_peak_resident() -> None:
    """Let the high-water mark of this process start at what it holds now (Linux)."""
    with suppress(OSError):  # elsewhere the mark is that of the imports too, a little more than what is held
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident() -> int:
    """High-water mark of this process in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def cell(name: str, size: int) -> dict[str, Any]:
    """Measured in fresh processes, or the reason why not."""
    record: dict[str, Any] = {"sampler": name, "samples": size}
    if name != "AutoAccumulate" and size * BYTES_OF_A_LISTED_INDEX > MOST_BYTES:
        return record | {"skipped": "too large", "needed_bytes": size * BYTES_OF_A_LISTED_INDEX}
    runs = [printed_by("benchmarks.sampler", "--cell", name, size) for _ in range(REPEATS)]
    for key in runs[0]:
        record[key] = (min if key.endswith("seconds") else max)(run[key] for run in runs)
    return record


def table(cells: Sequence[dict[str, Any]]) -> Table:
    shown = empty_table(("samples", "sampler"), ("first", "next", "peak", "held"))
    shown.columns[0].justify = "right"
    for one in cells:
        start = (f"{one['samples']:,}" if one["sampler"] == "AutoAccumulate" else "", one["sampler"])
        if "skipped" in one:
            shown.add_row(*start, "–", "–", f"≈ {one['needed_bytes'] / 1e6:,.0f} MB", "–")
            continue
        times = seconds(one["first_seconds"]), seconds(one["next_seconds"])
        shown.add_row(*start, *times, *(f"{one[key] / 1e6:,.1f} MB" for key in ("peak_bytes", "held_bytes")))
    return shown


def text(record: Mapping[str, Any]) -> str:
    legend = (
        "first: until the first micro-batch; next: each of those that follow; peak, held:\n"
        "what the process grows by at most, and in the end; –: not run, needs too much.\n"
        f"Rank {RANK} of {record['ranks']}, micro-batches of {record['micro_batch']}; "
        "RandomSampler: a single process."
    )
    return as_text(table(record["cells"]), legend)


def seconds(value: float) -> str:
    """A duration in at most seven characters.

    Examples:
        >>> seconds(2.345), seconds(0.0123), seconds(1.2e-5)
        ('2.35 s', '12.3 ms', '12 µs')
    """
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def missed(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    for one in cells:
        if one["sampler"] == "AutoAccumulate" and one["samples"] == TARGET_SIZE:
            if one["first_seconds"] > TARGET_SECONDS:
                yield f"{TARGET_SIZE:,} samples start in {one['first_seconds']:.1f} s, not in {TARGET_SECONDS} s."
            if one["peak_bytes"] > TARGET_BYTES:
                yield f"{TARGET_SIZE:,} samples hold {one['peak_bytes'] / 1e9:.2f} GB, not {TARGET_BYTES / 1e9} GB."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("sampler", __doc__)
    parser.add_argument("--quick", action="store_true", help=f"stop at {QUICK:,} samples, and write no file")
    parser.add_argument("--cell", nargs=2, metavar=("SAMPLER", "SAMPLES"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.cell:
        print(json.dumps(measure(given.cell[0], int(given.cell[1]))))
        return 0
    cells = [cell(name, size) for size in SIZES if not given.quick or size <= QUICK for name in SAMPLERS]
    record = {"ranks": RANKS, "micro_batch": MICRO_BATCH, "repeats": REPEATS, "cells": cells}
    if not given.quick:
        return conclude("sampler", record, text, missed(cells))
    print(text(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
