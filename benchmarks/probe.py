"""Is the limit found, and in how many steps? ``python -m benchmarks.probe``.

Six models in several budgets; in each cell ours, Lightning's tuner (power and binsearch),
Accelerate's ``find_executable_batch_size`` and torch-max-mem run the same training step and look for
the largest micro-batch. The true limit comes from steps too: it passes, and one sample more fails.
Exits with 1 if a target of ours is missed.
"""

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import trainers
from benchmarks.output import as_text, conclude, installed, judged, options
from benchmarks.probing.cells import Cell, emulation_cost, full, measure, quick
from benchmarks.probing.programs import NEEDS
from benchmarks.probing.tables import Cells, against_binsearch, details, summary, targets

THREADS = 2


def quiet() -> None:
    """As many threads as the targets are about; no advice from the trainers; quick collections for all."""
    trainers.quiet()
    torch.set_num_threads(THREADS)
    gc.collect()
    gc.freeze()


def run(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Measure the cells, one after another."""
    records = []
    for number, cell in enumerate(cells, 1):
        print(f"\r\x1b[K{number} of {len(cells)}: {cell.model}, {cell.gib:g} GiB", end="", file=sys.stderr, flush=True)
        records.append(measure(cell))
    print("\r\x1b[K", end="", file=sys.stderr)
    return records


def text(record: Mapping[str, Any]) -> str:
    cells: Cells = record["cells"]
    cost = record["emulation"]
    peers = ", ".join(f"{name} {version or 'n/a'}" for name, version in record["peers"].items())
    parts = [
        *(["Only one budget of every model: --quick."] if record["quick"] else []),
        as_text(
            summary(cells),
            "steps: median and most of a cell. seconds: sum over the cells that are timed. ×: how many times what ours "
            f"took, median over cells. Peers: {peers}.",
        ),
        as_text(
            against_binsearch(cells),
            "From 16 GiB on tensors have no values and ours runs on them. There, and where steps take seconds, peers "
            "are told what fits: steps are counted, not timed.\n"
            "*: AutoAccumulate in a Trainer, which holds no peer's search.\n"
            f"limit_memory costs {cost['limit_us']:.0f} µs an operation, a trace {cost['trace_us']:.0f} µs "
            f"({cost['model']}: {cost['operations']} operations).",
        ),
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("probe", __doc__)
    parser.add_argument("--quick", action="store_true", help="one small budget of every model; writes nothing")
    settings = parser.parse_args(arguments)
    quiet()
    start = time.perf_counter()
    chosen = (quick if settings.quick else full)(cuda=torch.cuda.is_available())
    cells = run(chosen)
    record: dict[str, Any] = {
        "quick": settings.quick,
        "peers": {name: installed(name) for name in ("lightning", *NEEDS.values())},
        "emulation": emulation_cost(),
        "targets": [asdict(target) for target in targets(cells)],
        "cells": cells,
    }
    record["seconds"] = round(time.perf_counter() - start, 1)
    print(as_text(details(cells)))
    if settings.quick:
        print(text(record))
    else:
        conclude("probe", record, text)
    return judged(record["targets"])


if __name__ == "__main__":
    sys.exit(main())
