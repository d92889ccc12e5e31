"""Is the limit found, and in how many steps? ``python -m benchmarks.probe``.

Six models in several budgets; in each cell ours, Lightning's tuner (power and binsearch), Accelerate's
``find_executable_batch_size`` and torch-max-mem run the same training step and look for the largest micro-batch. The
true limit comes from steps too: it passes, and one sample more fails. ``--quick``: one small budget, writes nothing.
"""

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.output import Record, benchmark, installed, plain
from benchmarks.probing.cells import Cell, chosen, emulation_cost, measured
from benchmarks.probing.programs import NEEDS
from benchmarks.probing.tables import against_binsearch, details, summary, targets

THREADS = 2


def prepare() -> None:
    """As many threads as the targets are about; quick collections for all."""
    torch.set_num_threads(THREADS)
    gc.collect()
    gc.freeze()


def peers() -> dict[str, str | None]:
    return {name: installed(name) for name in ("lightning", *NEEDS.values())}


def run(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    records = []
    for number, cell in enumerate(cells, 1):
        print(f"\r\x1b[K{number} of {len(cells)}: {cell.model}, {cell.gib:g} GiB", end="", file=sys.stderr, flush=True)
        records.append(measured(cell))
    print("\r\x1b[K", end="", file=sys.stderr)
    return records


def text(record: Record) -> str:
    cells, cost = record["cells"], record["emulation"]
    peers = ", ".join(f"{name} {version or 'n/a'}" for name, version in record["peers"].items())
    above = summary(
        cells,
        "steps: median and most of a cell. seconds: sum over the cells that are timed. ×: how many times what ours "
        f"took, median over cells. Peers: {peers}.",
    )
    below = against_binsearch(
        cells,
        "From 16 GiB on tensors have no values and ours runs on them. There, and where steps take seconds, peers "
        "are told what fits: steps are counted, not timed.\n"
        "*: AutoAccumulate in a Trainer, which holds no peer's search.\n"
        f"limit_memory costs {cost['limit_us']:.0f} µs an operation, a trace {cost['trace_us']:.0f} µs "
        f"({cost['model']}: {cost['operations']} operations).",
    )
    return f"{above}\n\n{below}"


def measure(quick: bool = False) -> dict[str, Any]:
    prepare()
    cells = run(chosen(cuda=torch.cuda.is_available(), quick=quick))
    print(details(cells))
    record = {"partial": quick, "peers": peers(), "emulation": emulation_cost()}
    return {**record, "targets": plain(targets(cells)), "cells": cells}


main = benchmark("probe", __doc__, measure, text)


if __name__ == "__main__":
    sys.exit(main())
