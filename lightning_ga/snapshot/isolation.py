"""Put a training back as it was before trial steps.

Tensors (parameters, buffers, optimizer state) are restored in place from copies on the host, so that nothing is
on the device twice while memory is measured. Plain attributes are swapped: a trial works on deep copies, and the
originals are put back untouched, so that other references to them stay valid.
"""

import copy
import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
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
from lightning_ga.memory.oom import is_out_of_memory, retry_once
from lightning_ga.snapshot.copies import is_writable, refill
from lightning_ga.snapshot.random_numbers import (
    GENERATORS,
    RandomState,
    generator_state,
    generators_of,
    restore_generator,
)

_TABLES = {name for name in vars(Module()) if name != "training"}  # of tensors, children and hooks: no deep copies
_CONTAINERS = (dict, list, set, deque)
_LONGEST = 1000  # longer containers are data: their contents are not copied
_FIXED = (
    *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, inspect.Signature),
    *(type, FunctionType, MethodType, BuiltinFunctionType, ModuleType),
)  # what a step cannot change
_DATA = (Dataset, DataLoader)  # trials only read them


def refuse_lazy(tensors: Iterable[Tensor]) -> None:
    """Refuse parameters of lazy modules that have not seen a batch."""
    if any(is_lazy(tensor) for tensor in tensors):
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
        parts = list(dict.fromkeys(chain.from_iterable(module.modules() for module in modules)))
        tensors = chain.from_iterable((*part._parameters.values(), *part._buffers.values()) for part in parts)
        random_state = RandomState(generators_of(modules[0]))
        self._gradients = [(parameter, parameter.grad) for parameter in modules[0].parameters()]
        with uncounted():
            self._values = TensorValues(each for each in tensors if each is not None)
            state = SteppingState(stepping if steps else ())
        self.attributes = SwappedAttributes((*shared, *stepping))
        self.attributes.add_modules(parts)
        self._kept = self.attributes, self._values, state, random_state

    def swap_in_copies(self) -> None:
        """Let what follows work on copies of plain attributes."""
        with uncounted():
            self.attributes.swap_in_copies()

    def restore(self) -> None:
        """Put everything back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for each in self._kept:
            retry_once(each.restore)

    def unwritten(self) -> ExitStack:
        """Return a context after which tensors have the versions of before: savepoints see by them what has moved."""
        stack = ExitStack()
        for tensor, *_ in self._values.kept:
            if not tensor.is_inference():
                stack.enter_context(_unsafe_preserve_version_counter(tensor))  # torch 2.6 takes them one by one
        return stack


class TensorValues:
    """Tensors and their values, restored in place from copies on the host."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        kept = list({id(tensor): tensor for tensor in tensors}.values())
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


class SteppingState:
    """State, groups, bookkeeping and generators of optimizers and schedules, and of those that they wrap.

    Containers are refilled and tensors written in place, at any depth: LBFGS keeps lists of tensors.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        seen: set[int] = set()
        within = [each for owner in objects for each in contained(owner, seen)]
        self._contents = [(each, copy.copy(each)) for each in within if isinstance(each, _CONTAINERS)]
        self._tensors = TensorValues(each for each in within if isinstance(each, Tensor))
        self._generators = [(each, generator_state(each)) for each in within if isinstance(each, GENERATORS)]

    def restore(self) -> None:
        """Put everything back."""
        for container, content in self._contents:
            refill(container, content)
        self._tensors.restore()
        for generator, state in self._generators:
            restore_generator(generator, state)


def contained(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield containers, tensors and generators of random numbers in a value at any depth, each once."""
    if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        value = vars(value)
    if id(value) in seen or isinstance(value, Parameter):
        return
    seen.add(id(value))
    if isinstance(value, (Tensor, *_CONTAINERS, *GENERATORS)):
        yield value
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple, deque)):
        for inner in value:
            yield from contained(inner, seen)


class SwappedAttributes:
    """The attributes of objects: trials work on deep copies of those that can change.

    Args:
        shared: Objects that copies still refer to, such as the trainer.
    """

    def __init__(self, shared: Iterable[object]) -> None:
        self._memo: dict[int, Any] = {id(thing): thing for thing in shared}
        self._kept: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = []
        self._complete: set[int] = set()  # attributes from which ``restore`` removes new ones, by id
        self._tables: list[tuple[Any, Any]] = []  # with copies

    def add_modules(self, modules: Iterable[Module]) -> None:
        """Keep all attributes of modules, and the contents of their tables of tensors, children and hooks."""
        for module in modules:
            own = vars(module)
            self._memo[id(module)] = module
            self._memo |= {id(each): each for table in (module._parameters, module._buffers) for each in table.values()}
            # Compiled modules contain their graphs, and PyTorch's wrappers for ranks their process groups.
            is_wrapper = type(module).__module__.startswith(("torch._dynamo", "torch.nn.parallel", "torch.distributed"))
            self._keep(own, dict(own), () if is_wrapper else own.keys() - _TABLES)
            tables = (own.get(name) for name in _TABLES)
            self._tables += [(table, copy.copy(table)) for table in tables if isinstance(table, _CONTAINERS)]
            self._complete.add(id(own))

    def add(self, owner: object, *names: str, copied: bool = True) -> None:
        """Keep attributes of an object, ``copied`` for trials or as they are."""
        own = vars(owner)
        self._keep(own, {name: own[name] for name in names}, names if copied else ())

    def _keep(self, own: dict[str, Any], before: dict[str, Any], names: Iterable[str]) -> None:
        self._kept.append((own, before, [name for name in names if not isinstance(own[name], _FIXED)]))

    def swap_in_copies(self) -> None:
        """Put deep copies in the place of what a trial may change."""
        memo = dict(self._memo)
        for own, _, names in self._kept:
            own.update({name: _copied(own[name], memo) for name in names})

    def restore(self) -> None:
        """Put the original attributes back, and what the tables of modules held."""
        for own, before, _ in self._kept:
            if id(own) in self._complete:
                for name in own.keys() - before.keys():
                    del own[name]
            own.update(before)
        for table, content in self._tables:
            if table or content:  # most are empty
                refill(table, content)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy as deep as possible; data, and what cannot be copied (locks, files), stay shared."""
    if isinstance(value, (*_FIXED, *_DATA)) or id(value) in memo:
        return memo.get(id(value), value)
    if not isinstance(value, (Tensor, np.ndarray)) and hasattr(value, "__len__") and _length(value) > _LONGEST:
        if isinstance(value, _CONTAINERS):
            return copy.copy(value)
        return value
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
    memo[id(value)] = copied = type(value)()
    if isinstance(copied, list):
        copied.extend(_copied(inner, memo) for inner in value)
    else:
        copied.update({name: _copied(inner, memo) for name, inner in value.items()})
    return copied


def _length(value: Any) -> int:
    try:
        return len(value)
    except TypeError:  # tensors and arrays of no dimension
        return 0
