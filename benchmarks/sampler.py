"""How long does an epoch take to start, and what does its order hold? ``python -m benchmarks.sampler``.

The order of ``AutoAccumulate`` beside torch's own samplers, as one of 64 simulated ranks. A cell is a fresh process;
memory is what it grows by (Linux). Times are the shortest of three processes, since other programs can only add to
them; memory is the largest. ``--quick`` stops at 10⁷ samples, and writes nothing.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from benchmarks.output import Record, benchmark, shown
from benchmarks.processes import apart
from lightning_ga.loading.recipe_batches import SourceSettings
from lightning_ga.loading.sampler import LARGEST_WRITTEN_ORDER
from lightning_ga.loading.training_source import MicroBatchSource

SAMPLERS = OURS, _, RANDOM = "AutoAccumulate", "DistributedSampler", "RandomSampler"
RANKS, RANK, MICRO_BATCH, FACTOR = 64, 63, 32, 2
SIZES = (10**4, 10**5, 10**6, 10**7, 10**8, LARGEST_WRITTEN_ORDER, 10**9)
QUICK = 10**7
REPEATS, NEXT = 3, 1000
MOST_BYTES = 8e9
TARGET_SIZE, TARGET_SECONDS, TARGET_BYTES = 10**8, 5.0, 1e9
# A list of Python integers, and the 64-bit tensor that it is made of: 8 of pointer, 32 of object, 8.
BYTES_OF_A_LISTED_INDEX = 48


def batches(name: str, size: int) -> Iterator[list[int]]:
    """Micro-batches of one of 64 ranks; torch's sampler for one process is the same on one rank as on 64."""
    data: Any = range(size)
    if name == OURS:  # what AutoAccumulate puts in the place of the user's loader
        loader = DataLoader(data, batch_size=MICRO_BATCH * FACTOR, shuffle=True)
        source = MicroBatchSource(loader, SourceSettings(recipe_factor=1, world_size=RANKS, rank=RANK, seed=1))
        source.arrange(0, None, MICRO_BATCH)
        return iter(source.sampler)
    sampler = RandomSampler(data) if name == RANDOM else DistributedSampler(data, num_replicas=RANKS, rank=RANK, seed=1)
    return iter(BatchSampler(sampler, MICRO_BATCH, drop_last=False))


def in_process(name: str, size: int) -> dict[str, Any]:
    batches(name, 64 * MICRO_BATCH * FACTOR)  # loads what is loaded on first use
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts at what is held now
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    drawn = batches(name, size)
    count = len(next(drawn))
    first = time.perf_counter()
    yielded = sum(1 for _, _ in zip(range(NEXT), drawn))
    end = time.perf_counter()
    held, status = psutil.Process().memory_info().rss, Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    assert count == MICRO_BATCH, f"a micro-batch of {count}"
    return {
        "first_seconds": first - start,
        "next_seconds": (end - first) / yielded,
        "peak_bytes": max(0, peak - before),
        "held_bytes": max(0, held - before),
    }


def cell(name: str, size: int) -> dict[str, Any]:
    """Measured in fresh processes, or the reason why not."""
    record: dict[str, Any] = {"sampler": name, "samples": size}
    if name != OURS and size * BYTES_OF_A_LISTED_INDEX > MOST_BYTES:
        return record | {"skipped": "too large", "needed_bytes": size * BYTES_OF_A_LISTED_INDEX}
    runs = [apart(in_process, name, size) for _ in range(REPEATS)]
    return record | {key: (min if key.endswith("seconds") else max)(run[key] for run in runs) for key in runs[0]}


def text(record: Record) -> str:
    rows = []
    for one in record["cells"]:
        times, sizes = ("–", "–"), (f"≈ {one.get('needed_bytes', 0) / 1e6:,.0f} MB", "–")
        if "skipped" not in one:
            times = seconds(one["first_seconds"]), seconds(one["next_seconds"])
            sizes = f"{one['peak_bytes'] / 1e6:,.1f} MB", f"{one['held_bytes'] / 1e6:,.1f} MB"
        rows.append((f"{one['samples']:>13,}" if one["sampler"] == OURS else "", one["sampler"], *times, *sizes))
    return shown(
        ("      samples", "sampler"),
        ("first", "next", "peak", "held"),
        rows,
        "first: until the first micro-batch; next: each of those that follow; peak, held:\n"
        "what the process grows by at most, and in the end; –: not run, needs too much.\n"
        f"Rank {RANK} of {record['ranks']}, micro-batches of {record['micro_batch']}; "
        "RandomSampler: a single process.",
    )


def seconds(value: float) -> str:
    """A duration in at most seven characters.

    Examples:
        >>> seconds(2.345), seconds(0.0123), seconds(1.2e-5)
        ('2.35 s', '12.3 ms', '12 µs')
    """
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def missed(cells: Sequence[Record]) -> Iterator[str]:
    for one in cells:
        if one["sampler"] == OURS and one["samples"] == TARGET_SIZE:
            if one["first_seconds"] > TARGET_SECONDS:
                yield f"{TARGET_SIZE:,} samples start in {one['first_seconds']:.1f} s, not in {TARGET_SECONDS} s."
            if one["peak_bytes"] > TARGET_BYTES:
                yield f"{TARGET_SIZE:,} samples hold {one['peak_bytes'] / 1e9:.2f} GB, not {TARGET_BYTES / 1e9} GB."


def measure(quick: bool = False) -> dict[str, Any]:
    cells = [cell(name, size) for size in SIZES if not quick or size <= QUICK for name in SAMPLERS]
    return {
        "partial": quick,
        "ranks": RANKS,
        "micro_batch": MICRO_BATCH,
        "repeats": REPEATS,
        "cells": cells,
        "missed": [*missed(cells)],
    }


main = benchmark("sampler", __doc__, measure, text)

if __name__ == "__main__":
    raise SystemExit(main())
