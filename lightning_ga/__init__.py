"""Training with the batch size you want on the memory you have."""

from importlib.metadata import version

from lightning_ga.callback import AutoAccumulate
from lightning_ga.errors import UserError
from lightning_ga.plan import AccumulationPlan, plan_accumulation
from lightning_ga.search import ProbeResult, Trial

__version__ = version("lightning_ga")

__all__ = [
    "AccumulationPlan",
    "AutoAccumulate",
    "ProbeResult",
    "Trial",
    "UserError",
    "__version__",
    "plan_accumulation",
]
