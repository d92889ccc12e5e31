"""Is the limit found under every setting of CUDA's allocator? ``python -m benchmarks.allocator``.

Each setting has a process of its own, as most hold from its start. In it, every model looks for the limit in every
budget, which training steps of that size and of one sample more confirm. ``cuda:1`` is left out where there is one
device.
Without a GPU, on the simulated device::

    SIMULATED_CUDA_DEVICES=2 SIMULATED_CUDA_VALUES=none sh tests/simulated_cuda/run.sh PYTHON \\
        tests/simulated_cuda/device_values.py benchmarks.allocator

Exits with 1 if a target is missed, and with 2 where there is no CUDA device.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.output import (
    RESULTS,
    Target,
    as_text,
    at_least,
    at_most,
    empty_table,
    judged,
    lacks_cuda,
    options,
    read_json,
    write_json,
)
from benchmarks.probe import quiet
from benchmarks.probing.cells import HIGH, SMALL, exhaustive, passes
from benchmarks.probing.devices import GIB, capped_cuda
from benchmarks.probing.models import MODELS
from benchmarks.probing.training import Training
from lightning_ga import find_micro_batch

FOUND, MEDIAN, MOST, ERRORS = 0.98, 4, 6, 1
BUDGETS = (2.0, 8.0, 24.0)  # GiB
SMALL_IMAGES, FEW_GIB = "resnet34d 32", 2.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How a user has set the allocator up."""

    text: str = ""
    device: str = "cuda:0"
    bounded: str = "budget"


SETTINGS = {
    "as it is": Setting(),
    "expandable_segments": Setting("expandable_segments:True"),
    "max_split_size_mb:128": Setting("max_split_size_mb:128"),
    "max_split_size_mb:512": Setting("max_split_size_mb:512"),
    "roundup_power2:4": Setting("roundup_power2_divisions:4"),
    "roundup_power2:8": Setting("roundup_power2_divisions:8"),
    "garbage_collection:0.6": Setting("garbage_collection_threshold:0.6"),
    "a fraction, set before": Setting(bounded="fraction"),
    "other processes": Setting(bounded="others"),
    "cuda:1": Setting(device="cuda:1"),
    "cudaMallocAsync": Setting("backend:cudaMallocAsync"),
}


def measure(setting: Setting, gib: float, make: Callable[[], Training]) -> dict[str, Any]:
    """Look for the limit of a training in a budget, then confirm it."""
    budget = int(gib * GIB)
    with bounded(setting, budget):
        training = make()
        started = time.process_time()
        found = find_micro_batch(
            training.step,
            high=HIGH,
            budget=budget if setting.bounded == "budget" else None,
            device=setting.device,
            resident=training.resident,
        )
        seconds, errors = time.process_time() - started, training.counter.ooms
        del training
        return {
            "found": found.limit,
            "limit": min(HIGH, confirmed(make, found.limit)),
            "method": found.method,
            "steps": found.steps,
            "tried": [(trial.micro_batch_size, trial.fits) for trial in found.trials],
            "errors": errors,
            "cpu_seconds": round(seconds, 2),
        }


def confirmed(make: Callable[[], Training], guess: int) -> int:
    """The limit of a new training by trial: steps of this size pass and steps of one sample more fail."""
    gc.collect()
    torch.cuda.empty_cache()
    training = make()
    training.step(SMALL)
    return exhaustive(partial(passes, training), guess)


@contextmanager
def bounded(setting: Setting, budget: int) -> Iterator[None]:
    """A device that leaves ``budget`` bytes to the training, in the setting's way."""
    gc.collect()
    with torch.cuda.device(setting.device):
        torch.cuda.init()
        if setting.bounded != "others":
            with capped_cuda(budget):
                yield
            return
        torch.cuda.empty_cache()
        taken = take_as_others(torch.cuda.mem_get_info()[0] - budget)
        try:
            yield
        finally:
            gc.collect()
            torch.cuda.empty_cache()
            _cuda().cudaFree(taken)


def take_as_others(size: int) -> ctypes.c_void_p:
    """Take memory of the current device that PyTorch's allocator does not know of, as another process would."""
    taken = ctypes.c_void_p()
    code = _cuda().cudaMalloc(ctypes.byref(taken), ctypes.c_size_t(size))
    if code:
        raise RuntimeError(f"cudaMalloc of {size} bytes failed with {code}.")
    return taken


def _cuda() -> Any:
    here = ctypes.CDLL(None)
    return here if hasattr(here, "cudaMalloc") else ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")


def _cells(models: Sequence[str], gibs: Sequence[float]) -> list[tuple[str, float]]:
    few = [] if torch.backends.cudnn.enabled else [SMALL_IMAGES]
    return [(model, gib) for gib in gibs for model in models if model not in few or gib <= FEW_GIB]


def measured_apart(text: str, *arguments: str) -> list[dict[str, Any]]:
    """Measure cells under a setting of the allocator in a process of its own, started as this one was."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.json"
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": text}
        done = subprocess.run([*sys.orig_argv, *arguments, "--record", str(path)], env=environment, check=False)
        # What it wrote counts: a thread of autograd that lets go of its last task while the interpreter ends aborts it.
        if not path.exists():
            raise RuntimeError(f"{text or 'no settings'}: the process ended with {done.returncode} and no cell.")
        cells: list[dict[str, Any]] = json.loads(path.read_text())
    return cells


def targets(settings: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Target]:
    """Those of all cells together; they are given by setting."""
    cells = [cell for each in settings.values() for cell in each]
    median = max((statistics.median(cell["steps"] for cell in each) for each in settings.values()), default=0)
    return [
        at_least("found ÷ limit, least", min((cell["found"] / cell["limit"] for cell in cells), default=0.0), FOUND),
        at_most("training steps, median of the worst setting", median, MEDIAN),
        at_most("training steps, most", max((cell["steps"] for cell in cells), default=0), MOST),
        at_most("out-of-memory errors of a search, most", max((cell["errors"] for cell in cells), default=0), ERRORS),
    ]


def text(record: Mapping[str, Any]) -> str:
    table = empty_table(("setting",), ("cells", "found ÷ limit", "least", "steps", "most", "OOMs, most"))
    for name, cells in record["settings"].items():
        shares, steps = [cell["found"] / cell["limit"] for cell in cells], [cell["steps"] for cell in cells]
        numbers = (f"{statistics.median(shares):.3f}", f"{min(shares):.3f}", f"{statistics.median(steps):g}")
        table.add_row(name, str(len(cells)), *numbers, str(max(steps)), str(max(cell["errors"] for cell in cells)))
    gibs = ", ".join(f"{gib:g}" for gib in record["budgets"])
    caption = f"{record['device']}: {len(record['models'])} models, each in {gibs} GiB. found ÷ limit and steps:\n"
    return as_text(table, caption + "median over cells. OOMs, most: errors caught in one search.")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options("allocator", __doc__)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS), help="which ones")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), help="what is trained")
    parser.add_argument("--budgets", nargs="*", type=float, default=list(BUDGETS), help="GiB")
    parser.add_argument("--only", choices=list(SETTINGS), help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if lacks_cuda("allocator"):
        return 2
    quiet()
    if asked.only:
        setting = SETTINGS[asked.only]
        cells = [
            {"model": model, "gib": gib, **measure(setting, gib, partial(Training, MODELS[model], setting.device))}
            for model, gib in _cells(asked.models, asked.budgets)
        ]
        asked.record.write_text(json.dumps(cells))
        return 0
    record = measured(asked)
    print(text(record))
    return judged(record["targets"])


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure setting by setting; each is kept, beside those that were measured before in the same cells."""
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "models": asked.models, "budgets": asked.budgets}
    before = read_json("allocator") if (RESULTS / "allocator.json").exists() else {}
    same = all(before.get(name) == value for name, value in record.items())
    record["settings"] = before["settings"] if same else {}
    for name in asked.settings:
        if torch.device(SETTINGS[name].device).index >= torch.cuda.device_count():
            continue
        record["settings"][name] = measured_apart(SETTINGS[name].text, "--only", name)
        record["targets"] = [asdict(target) for target in targets(record["settings"])]
        write_json("allocator", record)
    return record


if __name__ == "__main__":
    sys.exit(main())
