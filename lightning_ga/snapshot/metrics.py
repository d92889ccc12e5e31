"""Take and set the state of a metric of torchmetrics."""

import copy
from collections import deque
from typing import Any

import torch
from torch.nn import Module
from torchmetrics import Metric

# What a metric keeps of itself for good, and does not change in an update.
_FIXED = {*vars(Module()), "_defaults", "_persistent", "_reductions", "_update_signature"}

# What torchmetrics 1.9 keeps of a metric besides its states (``metric.py``, ``reset`` and ``forward``).
_COUNTERS = ("_update_count", "_forward_cache", "_computed", "_cache", "_is_synced")


def metric_state(metric: Metric, *, whole: bool = False) -> dict[str, Any]:
    """Return copies of what an update of a metric may change: of the ``whole`` metric, attributes besides, too."""
    states = {name: _copied(getattr(metric, name)) for name in metric._defaults}
    counters = {name: vars(metric)[name] for name in _COUNTERS if name in vars(metric)}
    return {**states, **counters, **(beside_states(metric) if whole else {})}


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Give a metric copies of what ``metric_state`` took: updates change states in place."""
    states = {name: _copied(state[name]) for name in metric._defaults if name in state}
    beside = {name: _copied_deeply(state[name]) for name in state.keys() - {*metric._defaults, *_COUNTERS}}
    vars(metric).update({**state, **states, **beside})


def beside_states(metric: Metric) -> dict[str, Any]:
    """Return the attributes of a metric that are no states, with copies of tensors and containers."""
    apart = {*_FIXED, *metric._defaults, *_COUNTERS}
    return {name: _copied_deeply(value) for name, value in vars(metric).items() if name not in apart}


def _copied_deeply(value: Any) -> Any:
    """Copy tensors and containers of plain values, at any depth."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copied_deeply(thing) for name, thing in value.items()}
    if type(value) is list:
        return [*map(_copied_deeply, value)]
    return copy.copy(value) if isinstance(value, (set, deque)) else value


def _copied(state: Any) -> Any:
    """Copy a tensor, or the list that updates append to; what is in the list never changes."""
    return list(state) if isinstance(state, list) else state.clone()
