"""Is the limit found under every setting of CUDA's allocator? ``python -m benchmarks.allocator``.

Each setting has a process of its own, as most hold from its start. In it, every model looks for the limit in every
budget, which training steps of that size and of one sample more confirm. Without a GPU, on the simulated device::

    SIMULATED_CUDA_DEVICES=2 SIMULATED_CUDA_VALUES=none sh tests/simulated_cuda/run.sh PYTHON \\
        tests/simulated_cuda/device_values.py benchmarks.allocator
"""

import ctypes
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.output import Record, Target, at_least, at_most, benchmark, beside_last, plain, shown
from benchmarks.probe import prepare
from benchmarks.probing.cells import confirmed
from benchmarks.probing.devices import GIB, capped_cuda
from benchmarks.probing.programs import HIGH
from benchmarks.probing.training import MODELS, Training
from benchmarks.processes import apart
from lightning_ga import find_micro_batch

FOUND, MEDIAN, MOST, ERRORS = 0.98, 4, 6, 1
SMALL_IMAGES, FEW_GIB = "resnet34d 32", 2.0


@dataclass(frozen=True, slots=True)
class Setting:  # how a user has set the allocator up
    text: str = ""
    device: str = "cuda:0"
    bounded: str = "budget"

    def is_here(self) -> bool:
        return int(self.device[-1]) < torch.cuda.device_count()


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


def measured(setting: Setting, gib: float, make: Callable[[], Training]) -> dict[str, Any]:
    """Look for the limit of a training in a budget, then confirm it."""
    budget = int(gib * GIB)
    with bounded(setting, budget):
        training = make()
        asked = {"budget": budget if setting.bounded == "budget" else None, "device": setting.device}
        found = find_micro_batch(training.step, high=HIGH, resident=training.resident, **asked)
        errors = training.counter.ooms
        del training
        return {
            "found": found.limit,
            "limit": min(HIGH, confirmed(make, found.limit)),
            "method": found.method,
            "steps": found.steps,
            "tried": [(trial.micro_batch_size, trial.fits) for trial in found.trials],
            "errors": errors,
        }


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


def in_setting(name: str, models: Sequence[str], gibs: Sequence[float]) -> list[dict[str, Any]]:
    prepare()
    setting, few = SETTINGS[name], [] if torch.backends.cudnn.enabled else [SMALL_IMAGES]
    return [
        {"model": model, "gib": gib, **measured(setting, gib, partial(Training, MODELS[model], setting.device))}
        for gib in gibs
        for model in models
        if model not in few or gib <= FEW_GIB
    ]


def under(text: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own, under a setting of the allocator."""
    return apart(function, *arguments, env={"PYTORCH_CUDA_ALLOC_CONF": text})


def targets(settings: Mapping[str, Sequence[Record]]) -> list[Target]:
    """Those of all cells together; they are given by setting."""
    cells = [cell for each in settings.values() for cell in each]
    median = max(statistics.median(cell["steps"] for cell in each) for each in settings.values())
    return [
        at_least("found ÷ limit, least", min(cell["found"] / cell["limit"] for cell in cells), FOUND),
        at_most("training steps, median of the worst setting", median, MEDIAN),
        at_most("training steps, most", max(cell["steps"] for cell in cells), MOST),
        at_most("out-of-memory errors of a search, most", max(cell["errors"] for cell in cells), ERRORS),
    ]


def text(record: Record) -> str:
    rows = []
    for name, cells in record["settings"].items():
        shares, steps = [cell["found"] / cell["limit"] for cell in cells], [cell["steps"] for cell in cells]
        numbers = (f"{statistics.median(shares):.3f}", f"{min(shares):.3f}", f"{statistics.median(steps):g}")
        rows.append((name, str(len(cells)), *numbers, str(max(steps)), str(max(cell["errors"] for cell in cells))))
    gibs = ", ".join(f"{gib:g}" for gib in record["budgets"])
    return shown(
        ("setting",),
        ("cells", "found ÷ limit", "least", "steps", "most", "OOMs, most"),
        rows,
        f"{record['device']}: {len(record['models'])} models, each in {gibs} GiB. found ÷ limit and steps:\n"
        "median over cells. OOMs, most: errors caught in one search.",
    )


def measure(
    settings: Sequence[str] = (*SETTINGS,),
    models: Sequence[str] = (*MODELS,),
    budgets: Sequence[float] = (2.0, 8.0, 24.0),
) -> dict[str, Any]:
    here = [name for name in settings if SETTINGS[name].is_here()]
    cells = {name: under(SETTINGS[name].text, in_setting, name, models, budgets) for name in here}
    found = beside_last("allocator", "settings", cells) if len(models) == len(MODELS) else cells
    record = {"device": torch.cuda.get_device_name(), "models": models, "budgets": budgets}
    return {**record, "settings": found, "targets": plain(targets(found))}


main = benchmark("allocator", __doc__, measure, text, needs_cuda=True)

if __name__ == "__main__":
    raise SystemExit(main())
