"""Put a training back as it was: what a probe's steps change, and how each is restored.

Tensors (parameters, buffers, optimizer state) are restored in place from copies on the host, so that
the device holds nothing twice while memory is measured. Plain Python state is swapped: a trial works
on deep copies and the originals are put back untouched, so that references held elsewhere stay valid.
"""

import copy
import random
import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from lightning_ga.errors import UserError

# What nn.Module keeps of itself: tensors are restored in place, children on their own, hooks stay.
_MODULE_TABLES = {name for name in vars(torch.nn.Module()) if name != "training"}


class TensorValues:
    """Tensors and their values, restored in place."""

    def __init__(self, tensors: Iterator[torch.Tensor]) -> None:
        kept = []
        for tensor in tensors:
            if is_lazy(tensor):
                raise UserError(
                    "The module has parameters without a shape yet (a lazy module): run one forward pass before fit(), "
                    "or give micro_batch_size=… to do without a probe."
                )
            kept.append((tensor, tensor.detach().to("cpu", copy=True), tensor.requires_grad))
        self._kept = kept

    @torch.no_grad()
    def restore(self) -> None:
        """Write every value back, and whether the tensor wants gradients."""
        for tensor, value, requires_grad in self._kept:
            if 0 not in tensor.stride():  # an expanded buffer cannot be written to, by a step neither
                tensor.copy_(value)
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)


class PlainState:
    """The plain attributes of modules: metric states, counters, flags, lists.

    Args:
        modules: The modules, each once.
        shared: Objects that a copy must go on referring to, such as the trainer.
    """

    def __init__(self, modules: list[torch.nn.Module], shared: list[object]) -> None:
        compiled = getattr(torch._dynamo.eval_frame, "OptimizedModule", ()) if "torch._dynamo" in sys.modules else ()
        self._shared = [*shared, *modules]
        for module in modules:
            self._shared += [*module._parameters.values(), *module._buffers.values()]
        owners = {id(owner): owner for module in modules for owner in _hook_owners(module)}
        self._shared += owners.values()
        swapped = [*(module for module in modules if not isinstance(module, compiled)), *owners.values()]
        self._kept = [(thing, _plain(thing)) for thing in swapped]
        tables: list[dict[str, Any]] = [table for module in modules for table in (module._parameters, module._buffers)]
        self._tables = [(table, dict(table)) for table in tables]

    def swap_in_copies(self) -> None:
        """Let the modules work on copies of their original attributes."""
        memo = {id(thing): thing for thing in self._shared}
        self._put({id(module): {k: _copied(v, memo) for k, v in plain.items()} for module, plain in self._kept})

    def restore(self) -> None:
        """Put the original attributes and tensors back."""
        self._put({id(module): plain for module, plain in self._kept})

    def _put(self, attributes: dict[int, dict[str, Any]]) -> None:
        for module, _ in self._kept:
            for name in _plain(module).keys() - attributes[id(module)].keys():
                del module.__dict__[name]
            module.__dict__.update(attributes[id(module)])
        for table, content in self._tables:
            table.clear()
            table.update(content)


class OptimizerState:
    """State, groups and bookkeeping of an optimizer, and of one that it wraps.

    Containers are refilled and tensors written in place, at any depth: LBFGS keeps lists of tensors.
    Parameters are the module's and not restored here.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        tensors: list[torch.Tensor] = []
        self._containers: list[tuple[Any, Any]] = []
        self._collect(optimizer, tensors, seen=set())
        self._tensors = TensorValues(iter(tensors))

    def restore(self) -> None:
        """Put everything back."""
        for container, content in self._containers:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        self._tensors.restore()

    def _collect(self, value: Any, tensors: list[torch.Tensor], seen: set[int]) -> None:
        value = vars(value) if isinstance(value, torch.optim.Optimizer) else value
        if id(value) in seen or isinstance(value, torch.nn.Parameter):
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        if isinstance(value, (dict, list, set, deque)):
            self._containers.append((value, copy.copy(value)))
        if isinstance(value, (dict, list, tuple, deque)):
            for inner in value.values() if isinstance(value, dict) else value:
                self._collect(inner, tensors, seen)


class RandomState:
    """Random numbers of torch (the host and every device in use), NumPy and Python."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        self._numpy = np.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Set every generator back."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


class Attributes:
    """Some attributes of any objects, put back as they were; copies of the values may work meanwhile."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, str, Any, bool]] = []

    def keep(self, owner: Any, *names: str, copied: bool = False) -> None:
        """Remember attributes; with ``copied``, let a copy of the value work from the next restore on."""
        self._kept += [(owner, name, vars(owner)[name], copied) for name in names]

    def swap_in_copies(self) -> None:
        """Fresh copies for all values that asked for them."""
        for owner, name, value, copied in self._kept:
            vars(owner)[name] = copy.deepcopy(value) if copied else value

    def restore(self) -> None:
        """Put the original values back."""
        for owner, name, value, _ in self._kept:
            vars(owner)[name] = value


def _plain(module: Any) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _MODULE_TABLES}


def _hook_owners(module: torch.nn.Module) -> Iterator[Any]:
    """Objects whose methods are hooks of a module, feature extractors for example: a hook finds its own object."""
    for name in _MODULE_TABLES:
        for hook in vars(module)[name].values() if "_hooks" in name and isinstance(vars(module)[name], dict) else ():
            function = hook.func if isinstance(hook, partial) else hook
            owner = getattr(function, "__self__", None)
            if hasattr(owner, "__dict__") and not isinstance(owner, (torch.nn.Module, type)):
                yield owner


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy as far as one can be had; data stay shared, as trials only read them."""
    if isinstance(value, (Dataset, DataLoader)):
        return value
    known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # locks, files, tensors with a graph: whatever a module may hold
        while len(memo) > known:  # what a failed attempt left half done
            memo.popitem()
    memo[id(value)] = copied = type(value)() if type(value) in (dict, list) else value
    if isinstance(copied, dict) and copied is not value:
        copied.update((key, _copied(inner, memo)) for key, inner in value.items())
    elif copied is not value:
        copied.extend(_copied(inner, memo) for inner in value)
    return copied
