"""Training with the batch size you want on the memory you have.

``AutoAccumulate`` goes into a Lightning Trainer's callbacks. Its parts are public, too, and need no
Lightning: ``plan_accumulation``, ``find_micro_batch``, ``is_out_of_memory``. Names are
loaded when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ga import audit as audit
    from lightning_ga import callbacks as callbacks
    from lightning_ga import counters as counters
    from lightning_ga import data as data
    from lightning_ga import elastic as elastic
    from lightning_ga import models as models
    from lightning_ga import report as report
    from lightning_ga import schedule as schedule
    from lightning_ga import split as split
    from lightning_ga import testing as testing
    from lightning_ga import train as train
    from lightning_ga import weights as weights
    from lightning_ga.batch_size import measure_batch_size as measure_batch_size
    from lightning_ga.callback import AutoAccumulate as AutoAccumulate
    from lightning_ga.checkpoints import AtomicCheckpointIO as AtomicCheckpointIO
    from lightning_ga.chunks import in_chunks as in_chunks
    from lightning_ga.errors import ExactnessWarning as ExactnessWarning
    from lightning_ga.errors import UserError as UserError
    from lightning_ga.fit.optimizer_steps import optimizer_steps as optimizer_steps
    from lightning_ga.memory.oom import is_out_of_memory as is_out_of_memory
    from lightning_ga.plan.accumulation import AccumulationPlan as AccumulationPlan
    from lightning_ga.plan.accumulation import plan_accumulation as plan_accumulation
    from lightning_ga.plan.exactness_verdicts import Exactness as Exactness
    from lightning_ga.plan.records import ProbeResult as ProbeResult
    from lightning_ga.plan.records import Trial as Trial
    from lightning_ga.probe.probed_loop import find_micro_batch as find_micro_batch
    from lightning_ga.recompute.wrapper import recomputed as recomputed

__version__ = version("lightning_ga")

_MODULES = (
    "audit",
    "callbacks",
    "counters",
    "data",
    "elastic",
    "models",
    "report",
    "schedule",
    "split",
    "testing",
    "train",
    "weights",
)
_HOMES = {
    "AccumulationPlan": "plan.accumulation",
    "AtomicCheckpointIO": "checkpoints",
    "AutoAccumulate": "callback",
    "Exactness": "plan.exactness_verdicts",
    "ExactnessWarning": "errors",
    "ProbeResult": "plan.records",
    "Trial": "plan.records",
    "UserError": "errors",
    "find_micro_batch": "probe.probed_loop",
    "in_chunks": "chunks",
    "is_out_of_memory": "memory.oom",
    "measure_batch_size": "batch_size",
    "optimizer_steps": "fit.optimizer_steps",
    "plan_accumulation": "plan.accumulation",
    "recomputed": "recompute.wrapper",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *__all__])
