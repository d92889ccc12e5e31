"""Skeleton of AutoAccumulate: being written."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning.pytorch import Callback

from lightning_ga.plan import AccumulationPlan
from lightning_ga.search import ProbeResult


class AutoAccumulate(Callback):
    def __init__(
        self,
        effective_batch_size: Any = None,
        *,
        accumulate: Any = None,
        micro_batch_size: int | Literal["auto"] = "auto",
        max_micro_batch_size: int | None = None,
        objective: Literal["memory", "throughput"] = "memory",
        memory_budget: int | float | str | None = None,
        normalize: Any = "samples",
        micro_batching: Literal["loader", "step"] = "loader",
        on_oom: Literal["split", "raise"] = "split",
        scale_lr: str = "none",
        batch_norm: Literal["warn", "rescale", "ignore"] = "warn",
        verify: bool = True,
        cache: bool = True,
    ) -> None:
        self.plan: AccumulationPlan | None = None
        self.probe: ProbeResult | None = None
