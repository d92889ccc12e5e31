"""A Trainer for another machine, as it can be built here: one CPU process that stands for one of its ranks."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from lightning_ga.errors import UserError

_DATA_PARALLEL = ("auto", "ddp", "single_device")


def settings_on_this_host(
    settings: Mapping[str, Any], *, root: str = "lightning.pytorch"
) -> tuple[dict[str, Any], int]:
    """Return the Trainer arguments that have to be others here, and how many ranks the run on that machine has.

    ``root`` is the namespace of the Trainer. A strategy that shards the model is refused.
    """
    strategy = settings.get("strategy") or "auto"
    if not isinstance(strategy, str) or not strategy.startswith(_DATA_PARALLEL):
        raise UserError(
            f"strategy={strategy} cannot be planned for, only data parallelism, in which every rank has the whole "
            "model: leave the strategy out."
        )
    changed: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}
    if settings.get("precision") in ("16-mixed", "16", 16):  # on a CPU, Lightning would make it bfloat16
        plugin = import_module(f"{root}.plugins").MixedPrecision
        changed |= {"precision": None, "plugins": [plugin("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    return changed, _count(settings.get("devices")) * _count(settings.get("num_nodes"))


def _count(devices: Any) -> int:
    """Count the devices that an argument of the Trainer names; one where that depends on the machine.

    Examples:
        >>> _count(4), _count("0,1"), _count([2, 3]), _count("auto"), _count(-1)
        (4, 2, 2, 1, 1)
    """
    if isinstance(devices, str):
        named = [one for one in devices.split(",") if one]
        devices = named if "," in devices else int(devices) if devices.isdigit() else 1
    count = len(devices) if isinstance(devices, (list, tuple)) else devices
    return count if isinstance(count, int) and count > 0 else 1
