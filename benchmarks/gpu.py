"""What only a GPU can tell: ``python -m benchmarks.gpu``.

Stages, each with a file of its own, ``benchmarks/results/<device>-<stage>.json``:

- ``sanity``: what our meters say of one step, beside PyTorch's own statistics;
- ``throughput``: the found micro-batch under ``AutoAccumulate`` beside a plain PyTorch loop;
- ``fp16``: probe and training with a gradient scaler;
- ``cudnn``: probe and training with ``torch.backends.cudnn.benchmark``;
- ``cells``: the cells of ``benchmarks.probe`` in real memory, with the caching allocator held to a budget, and how far
  the peak that was predicted from small steps lies from ``max_memory_allocated``;
- ``soak``, only where it is named: training at the limit for ``--soak`` minutes, on sentences whose lengths vary.

No cell begins after ``--minutes``: large budgets are left out first, and it is said. Exits with 1 if a target of
ours is missed or something failed, and with 2 where there is no CUDA device.
"""

import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.output import (
    Target,
    as_text,
    at_least,
    at_most,
    empty_table,
    installed,
    judged,
    lacks_cuda,
    options,
    write_json,
)
from benchmarks.probe import quiet, run
from benchmarks.probing.cells import Cell, cells
from benchmarks.probing.devices import CUDA, GIB
from benchmarks.probing.models import MODELS
from benchmarks.probing.on_gpu import Watch, fit_at_limit, meters, prediction
from benchmarks.probing.programs import NEEDS
from benchmarks.probing.tables import against_binsearch, details, summary, targets
from benchmarks.probing.throughput import throughput

SOAK = "soak"
STAGES = ("sanity", "throughput", "fp16", "cudnn", "cells")
BUDGETS = (2.0, 8.0, 24.0, 80.0, 120.0)  # GiB; those that the device does not have are left out
MINUTES, SOAK_MINUTES, WINDOWS = 25.0, 60.0, 20
FOUND, ERROR, SPEED, RESERVED, SHARE = 0.98, 0.016, 0.98, 0.01, 0.95
MOST_STEPS = 6  # of a search; the median is 4
TIMED = "resnet34d 224"
HALF, CONVOLUTIONS = "GPT, SDPA", "resnet34d 224"
SMALL, LARGE = 16, 64  # samples of the recorded steps
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
    """The targets of cells and of predictions."""
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


def extras(records: Sequence[Mapping[str, Any]]) -> Any:
    """Predictions as they are shown."""
    table = empty_table(("model",), ("GiB", "samples", "predicted MiB", "measured MiB", "error"))
    for cell in records:
        foreseen = cell.get("prediction")
        if foreseen:
            peaks = (f"{foreseen[key] / 2**20:,.1f}" for key in ("predicted", "measured"))
            error = f"{100 * foreseen['error']:+.2f} %"
            table.add_row(cell["model"], f"{cell['gib']:g}", f"{foreseen['samples']:,}", *peaks, error)
    return table


def text(record: Mapping[str, Any]) -> str:
    records = record["cells"]
    parts = [as_text(table) for table in (summary(records), against_binsearch(records), extras(records))]
    parts.append(
        f"{record['device']}, memory capped by set_per_process_memory_fraction. The peak is\n"
        "predicted from small steps alone, and measured by max_memory_allocated in a\n"
        "training of its own."
    )
    return "\n".join(parts)


def sanity_targets(records: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Meter and replay to the byte; reserved memory, which holes decide, nearly.

    Examples:
        >>> seen = {"allocated": 5, "metered": 5, "traced": 4, "replayed": (5, 20), "reserved": 20}
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


def speed_targets(records: Sequence[Mapping[str, Any]]) -> list[Target]:
    """As fast as a plain loop."""
    return [at_least("images/s ÷ plain loop, least", min((record["ratio"] for record in records), default=0.0), SPEED)]


def fit_targets(records: Sequence[Mapping[str, Any]]) -> list[Target]:
    """A limit at which training has no trouble."""
    ooms = sum(record["ooms"] + record["errors_and_retries"][0] for record in records)
    retries = sum(record["errors_and_retries"][1] for record in records)
    return [
        at_most("out-of-memory errors in training", ooms, 0),
        at_most("retries of the allocator in training", retries, 0),
        at_most("failed trials of a probe, most", max((record["failed"] for record in records), default=0), 1),
    ]


def soak_targets(records: Sequence[Mapping[str, Any]]) -> list[Target]:
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
    """What is measured piece by piece."""

    pieces: list[Callable[[], dict[str, Any]]]
    targets: Callable[[Sequence[Mapping[str, Any]]], list[Target]]
    text: Callable[[Mapping[str, Any]], str] = lambda record: "\n".join(map(str, record["cells"]))


def stages(models: Sequence[str], gibs: Sequence[float], windows: int, soak: float) -> dict[str, Stage]:
    """All stages, for these models and budgets; those with one budget take the largest up to 8 GiB."""
    one = max([gib for gib in gibs if gib <= 8], default=min(gibs))
    halves, fits = ([model for model in named if model in models] for named in ((HALF, CONVOLUTIONS), (CONVOLUTIONS,)))
    # Small budgets of all models first: if time is short, it is large ones that are left out.
    chosen = sorted(cells(models, gibs, CUDA), key=lambda cell: cell.gib)
    return {
        "sanity": Stage([partial(meters, m, n) for m in models for n in (SMALL, LARGE)], sanity_targets),
        "throughput": Stage([partial(timed, m, one) for m in models if m in (TIMED, "MLP")], speed_targets),
        "fp16": Stage(
            [partial(fit_at_limit, m, one, Watch(windows), precision="16-mixed") for m in halves], fit_targets
        ),
        "cudnn": Stage([partial(fit_at_limit, m, one, Watch(windows), tries=True) for m in fits], fit_targets),
        "cells": Stage(
            [partial(extend, cell) for cell in chosen],
            gpu_targets,
            lambda record: f"{as_text(details(record['cells']))}\n{text(record)}",
        ),
        SOAK: Stage(
            [partial(fit_at_limit, HALF, one, Watch(seconds=60 * soak), precision="bf16-mixed", varied=True)],
            soak_targets,
        ),
    }


def timed(model: str, gib: float) -> dict[str, Any]:
    """Samples a second in micro-batches of less than half of a budget: ours and the plain loop are both in memory."""
    cell = Cell(model, gib / 2.2, CUDA)
    return {"model": model, "gib": gib, **throughput(MODELS[model], prediction(cell)["samples"], "cuda")}


def measure(name: str, stage: Stage, device: str, until: float) -> dict[str, Any]:
    """The pieces of a stage, written down after each: whatever comes next, this is kept; so is an error of one."""
    start = time.perf_counter()
    record: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    errors: list[str] = []
    for piece in stage.pieces:
        if time.perf_counter() > until:
            break
        try:
            records.append(piece())
        except Exception:
            errors.append(traceback.format_exc())
        record = {
            "device": device,
            "cuda": torch.version.cuda,
            "peers": {name: installed(name) for name in ("lightning", *NEEDS.values())},
            "targets": [asdict(target) for target in stage.targets(records)] if records else [],
            "cells": records,
            "errors": errors,
            "left_out": len(stage.pieces) - len(records) - len(errors),
            "seconds": round(time.perf_counter() - start, 1),
        }
        write_json(f"{file_name(device)}-{name}", record)
    return record


def show(name: str, stage: Stage, record: Mapping[str, Any]) -> int:
    """A stage's tables, and which targets it met; 1 if one is missed."""
    print("\n".join([*([stage.text(record)] if record["cells"] else []), *record["errors"]]))
    missed = judged(record["targets"]) or int(bool(record["errors"]))
    late = f", {record['left_out']} left out for want of time" if record["left_out"] else ""
    print(f"{name}: {len(record['cells'])} measured{late}, {record['seconds']} s\n", flush=True)
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("gpu", __doc__)
    parser.add_argument("--stages", nargs="*", default=list(STAGES), choices=(*STAGES, SOAK), help="what is measured")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), help="what is trained")
    parser.add_argument("--budgets", nargs="*", type=float, help=f"GiB (from {BUDGETS}: what the device has)")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of the trainings with fp16 and cuDNN")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which nothing is begun")
    parser.add_argument("--soak", type=float, default=SOAK_MINUTES, help="minutes of the stage soak")
    settings = parser.parse_args(arguments)
    if lacks_cuda("gpu"):
        return 2
    quiet()
    until, device = time.perf_counter() + 60 * settings.minutes, torch.cuda.get_device_name()
    gibs = settings.budgets or budgets(torch.cuda.mem_get_info()[1])
    if not gibs:
        print(f"{device} is smaller than the smallest budget, {BUDGETS[0]:g} GiB: give --budgets.", file=sys.stderr)
        return 2
    missed = 0
    for name, stage in stages(settings.models, gibs, settings.windows, settings.soak).items():
        if name not in settings.stages:
            continue
        record = measure(name, stage, device, until)
        if record:
            missed |= show(name, stage, record)
        else:
            print(f"{name}: left out for want of time\n", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
