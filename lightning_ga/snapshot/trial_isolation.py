"""Put a training back as it was before trial steps.

Tensors (parameters, buffers, optimizer state) are restored in place from copies on the host, so that nothing is
on the device twice while memory is measured. Plain attributes are swapped: a trial works on deep copies, and the
originals are put back untouched, so that other references to them stay valid.
"""

import copy
import inspect
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, filterfalse
from operator import length_hint
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from lightning_ga.errors import UserError
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import attempt, is_out_of_memory, retry_once
from lightning_ga.snapshot.copies import CONTAINERS, by_id, copies_of, everything_in, is_writable, put_back
from lightning_ga.snapshot.random_numbers import GENERATORS, RandomState, generators_of

_TABLES = vars(Module()).keys() - {"training"}  # of tensors, children and hooks: no deep copies
_LONGEST = 1000  # longer containers are data: their contents are not copied
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "numpy")
_CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_NO_OBJECTS = (Tensor, np.ndarray, Module, *GENERATORS, *CONTAINERS, tuple, *_CODE)  # their attributes are not kept
_FIXED = (
    *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, inspect.Signature),
    *_CODE,
)  # what a step cannot change
_DATA = (Dataset, DataLoader)  # trials only read them


def refuse_lazy(tensors: Iterable[Tensor]) -> None:
    """Refuse parameters of lazy modules that have not seen a batch."""
    if any(map(is_lazy, tensors)):
        raise UserError(
            "The module has parameters without a shape yet (a lazy module): run one forward pass before fit(), "
            "or give micro_batch_size=… and verify=False to do without a probe and a check."
        )


class ModuleState:
    """Modules, what steps them, gradients and random numbers, as they are now.

    Args:
        modules: The LightningModule, and what wraps it.
        stepping: Optimizers and schedules.
        shared: Objects that copies of attributes still refer to, such as the trainer.
        steps: Whether optimizers may step: then their state is kept.
    """

    def __init__(
        self, modules: Sequence[Module], stepping: Sequence[Any], *, shared: Iterable[object], steps: bool = False
    ) -> None:
        parts = list(dict.fromkeys(chain.from_iterable(map(Module.modules, modules))))
        tensors = [tensor for part in parts for tensor in (*part._parameters.values(), *part._buffers.values())]
        random_state = RandomState(generators_of(modules[0]))
        self._gradients = [(parameter, parameter.grad) for parameter in modules[0].parameters()]
        stepped: list[Any] = []  # containers are refilled and tensors written in place: LBFGS keeps lists of tensors
        if steps:
            # Trial steps may add to gradients.
            tensors += [each for _, each in self._gradients if each is not None and is_writable(each)]
            stepped += filter(_may_change, everything_in(stepping, attributes_of))
        tensors += filter(torch.is_tensor, stepped)
        with uncounted():
            self._values = TensorValues(tensors)
            others = copies_of(filterfalse(torch.is_tensor, stepped))
        self.attributes = SwappedAttributes((*shared, *stepping))
        self.attributes.add_modules(parts)
        self._restoring = (
            self.attributes.restore,
            self._values.restore,
            partial(put_back, others),
            random_state.restore,
        )

    def restore(self) -> None:
        """Put everything back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for restore in self._restoring:
            retry_once(restore)

    def unwritten(self) -> ExitStack:
        """Return a context after which tensors have the versions of before: savepoints see by them what has moved."""
        stack = ExitStack()
        for tensor, *_ in self._values.kept:
            if not tensor.is_inference():
                stack.enter_context(_unsafe_preserve_version_counter(tensor))  # torch 2.6 takes them one by one
        return stack


class TensorValues:
    """Tensors and their values, restored in place from copies on the host."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        kept = by_id(filter(torch.is_tensor, tensors)).values()
        refuse_lazy(kept)
        self.kept = [(tensor, tensor.detach().to("cpu", copy=True), tensor.requires_grad) for tensor in kept]

    @torch.no_grad()
    def restore(self) -> None:
        """Write every value back, and whether the tensor wants gradients."""
        for tensor, value, requires_grad in self.kept:
            if is_writable(tensor) or tensor.layout is not torch.strided:
                tensor.copy_(value)
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)


def attributes_of(value: Any) -> Iterable[Any]:
    """Return the dictionary of attributes of an optimizer, a schedule, or an object of a class of the user's own."""
    is_stepping = isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))
    is_users = type(value).__module__.split(".")[0] not in _LIBRARIES
    is_object = hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS)
    return (vars(value),) if is_stepping or (is_users and is_object) else ()


def _may_change(value: Any) -> bool:
    """Return whether a step may change a value in place; weights are kept apart."""
    return isinstance(value, (Tensor, *CONTAINERS, *GENERATORS)) and not isinstance(value, Parameter)


class SwappedAttributes:
    """The attributes of objects: trials work on deep copies of those that can change.

    Args:
        shared: Objects that copies still refer to, such as the trainer.
    """

    def __init__(self, shared: Iterable[object]) -> None:
        self._memo = by_id(shared)
        self._swapped: list[tuple[dict[str, Any], list[str]]] = []  # attributes, and the names of some
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes, and some of them as they were
        self._complete: list[tuple[Any, Any]] = []  # attributes and tables of modules, with copies of all

    def add_modules(self, modules: Iterable[Module]) -> None:
        """Keep all attributes of modules, and the contents of their tables of tensors, children and hooks."""
        for module in modules:
            own = vars(module)
            self._memo |= by_id((module, *module._parameters.values(), *module._buffers.values()))
            # Compiled modules contain their graphs, and PyTorch's wrappers for ranks their process groups.
            is_wrapper = type(module).__module__.startswith(("torch._dynamo", "torch.nn.parallel", "torch.distributed"))
            if not is_wrapper:
                self._swap(own, own.keys() - _TABLES)
            tables = [own[name] for name in own.keys() & _TABLES if isinstance(own[name], CONTAINERS)]
            self._complete += copies_of([own, *tables])

    def add(self, owner: object, *names: str, copied: bool = True) -> None:
        """Keep attributes of an object, ``copied`` for trials or as they are."""
        own = vars(owner)
        self._kept.append((own, {name: own[name] for name in names}))
        if copied:
            self._swap(own, names)

    def _swap(self, own: dict[str, Any], names: Iterable[str]) -> None:
        self._swapped.append((own, [name for name in names if not isinstance(own[name], _FIXED)]))

    def swap_in_copies(self) -> None:
        """Put deep copies in the place of what a trial may change."""
        memo = dict(self._memo)
        with uncounted():
            for own, names in self._swapped:
                for name in names:
                    own[name] = _copied(own[name], memo)

    def restore(self) -> None:
        """Put the original attributes back, and what the tables of modules held; remove new ones of modules."""
        for own, before in self._kept:
            own.update(before)
        put_back(filter(any, self._complete))  # most tables are empty, and stay so


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy as deep as possible; data, and what cannot be copied (locks, files), stay shared."""
    if isinstance(value, (*_FIXED, *_DATA)) or id(value) in memo:
        return memo.get(id(value), value)
    length = attempt(length_hint, lambda _: True, value).result or 0  # a ``__len__`` may raise anything
    is_long = not isinstance(value, (Tensor, np.ndarray)) and length > _LONGEST  # so that it is data
    if is_long:
        return copy.copy(value) if isinstance(value, CONTAINERS) else value
    known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        while len(memo) > known:  # what a failed attempt left half done
            memo.popitem()
    if type(value) not in (dict, list):
        memo[id(value)] = value
        return value
    clone = memo[id(value)] = copy.copy(value)
    entries: Any = clone.items() if isinstance(clone, dict) else enumerate(clone)
    for place, inner in entries:
        clone[place] = _copied(inner, memo)
    return clone
