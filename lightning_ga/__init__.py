"""Training with the batch size you want on the memory you have.

``AutoAccumulate`` goes into a Lightning Trainer's callbacks. What it is made of is public too and
needs no Lightning: ``plan_accumulation``, ``find_micro_batch``, ``is_out_of_memory``. Names are
loaded when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ga import callbacks as callbacks
    from lightning_ga import data as data
    from lightning_ga import models as models
    from lightning_ga import report as report
    from lightning_ga import schedule as schedule
    from lightning_ga import split as split
    from lightning_ga import testing as testing
    from lightning_ga import train as train
    from lightning_ga import weights as weights
    from lightning_ga.app.checkpoints import AtomicCheckpointIO
    from lightning_ga.batch_size import measure_batch_size
    from lightning_ga.callback import AutoAccumulate
    from lightning_ga.compat.intervals import optimizer_steps
    from lightning_ga.errors import ExactnessWarning, UserError
    from lightning_ga.fit.chunks import in_chunks
    from lightning_ga.memory.oom import is_out_of_memory
    from lightning_ga.plan.accumulation import AccumulationPlan, plan_accumulation
    from lightning_ga.plan.exactness import Exactness
    from lightning_ga.plan.planned_device import DevicePlan
    from lightning_ga.plan.records import ProbeResult, Trial
    from lightning_ga.planning import plan_for_device
    from lightning_ga.probe.finder import find_micro_batch

__version__ = version("lightning_ga")

__all__ = [
    "AccumulationPlan",
    "AtomicCheckpointIO",
    "AutoAccumulate",
    "DevicePlan",
    "Exactness",
    "ExactnessWarning",
    "ProbeResult",
    "Trial",
    "UserError",
    "find_micro_batch",
    "in_chunks",
    "is_out_of_memory",
    "measure_batch_size",
    "optimizer_steps",
    "plan_accumulation",
    "plan_for_device",
]

_MODULES = ("callbacks", "data", "models", "report", "schedule", "split", "testing", "train", "weights")
_HOMES = {
    "AccumulationPlan": "plan.accumulation",
    "AtomicCheckpointIO": "app.checkpoints",
    "AutoAccumulate": "callback",
    "DevicePlan": "plan.planned_device",
    "Exactness": "plan.exactness",
    "ExactnessWarning": "errors",
    "ProbeResult": "plan.records",
    "Trial": "plan.records",
    "UserError": "errors",
    "find_micro_batch": "probe.finder",
    "in_chunks": "fit.chunks",
    "is_out_of_memory": "memory.oom",
    "measure_batch_size": "batch_size",
    "optimizer_steps": "compat.intervals",
    "plan_accumulation": "plan.accumulation",
    "plan_for_device": "planning",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *__all__])
