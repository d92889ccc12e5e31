"""Put a training back as it was before a probe's trial steps.

Tensors (parameters, buffers, optimizer state) are restored in place from copies on the host, so that
the device holds nothing twice while memory is measured. Plain Python state is swapped: a trial works
on deep copies and the originals are put back untouched, so that references held elsewhere stay valid.
What the code of a module reaches by global names and closures is put back, too.
"""

import copy
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_ga.errors import UserError
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.snapshot.contents import Contents, LentIterator, contained, given_back, lent
from lightning_ga.snapshot.copies import is_expanded, is_small
from lightning_ga.snapshot.random_numbers import GENERATORS, generator_state, restore_generator

# What nn.Module keeps of itself: tables of tensors, children and hooks. No copies of these are made.
_MODULE_TABLES = {name for name in vars(torch.nn.Module()) if name != "training"}
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_EMPTY_CELL = CellType()
_FUNCTIONS = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_NO_OWNERS = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, Dataset, DataLoader, *_FUNCTIONS)


class TensorValues:
    """Tensors and their values, restored in place."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        kept = list(tensors)
        refuse_lazy(kept)
        self._kept = [(tensor, tensor.detach().to("cpu", copy=True), tensor.requires_grad) for tensor in kept]

    @torch.no_grad()
    def restore(self) -> None:
        """Write every value back, and whether the tensor wants gradients."""
        for tensor, value, requires_grad in self._kept:
            if not is_expanded(tensor):  # it cannot be written to, by a step neither
                tensor.copy_(value)
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)


class SavedGradients:
    """The gradients of parameters, which a step takes away or makes."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._kept = [(parameter, parameter.grad) for parameter in parameters]

    def restore(self) -> None:
        """Give every parameter the gradient that it had, or none."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient


def refuse_lazy(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse parameters of lazy modules that have not seen a batch."""
    if any(is_lazy(tensor) for tensor in tensors):
        raise UserError(
            "The module has parameters without a shape yet (a lazy module): run one forward pass before fit(), "
            "or give micro_batch_size=… and verify=False to do without a probe and a check."
        )


class SwappedState:
    """The plain attributes of modules: metric states, counters, flags, lists.

    Copies go on referring to ``shared`` objects, such as the trainer, and refer to a stand-in in the place of the
    object whose id it is given by.
    """

    def __init__(
        self, modules: list[torch.nn.Module], shared: list[object], stand_ins: Mapping[int, Any] | None = None
    ) -> None:
        compiled = getattr(torch._dynamo.eval_frame, "OptimizedModule", ()) if "torch._dynamo" in sys.modules else ()
        tensors = (t for module in modules for t in (*module._parameters.values(), *module._buffers.values()))
        known = {id(thing): thing for thing in (*shared, *modules, *tensors)}
        behind = {id(thing): thing for module in modules for thing in _behind_hooks(module)}
        owners = {key: thing for key, thing in behind.items() if _may_be_swapped(thing) and key not in known}
        self._memo: dict[int, Any] = {**known, **owners, **(stand_ins or {})}
        swapped = [*(module for module in modules if not isinstance(module, compiled)), *owners.values()]
        self._kept = [(thing, {name: lent(value) for name, value in _plain(thing).items()}) for thing in swapped]
        self._tables = Contents([*behind.values(), *(vars(m).get(name) for m in modules for name in _MODULE_TABLES)])

    def swap_in_copies(self) -> None:
        """Let the modules work on copies of their original attributes."""
        memo = dict(self._memo)
        self._put([{name: _copied(value, memo) for name, value in plain.items()} for _, plain in self._kept])

    def restore(self) -> None:
        """Put the original attributes and tensors back."""
        self._put([{name: given_back(value) for name, value in plain.items()} for _, plain in self._kept])

    def _put(self, attributes: list[dict[str, Any]]) -> None:
        for (module, _), wanted in zip(self._kept, attributes):
            for name in _plain(module).keys() - wanted.keys():
                del module.__dict__[name]
            module.__dict__.update(wanted)
        self._tables.restore()


class OptimizerState:
    """State, groups, bookkeeping and generators of an optimizer, and of one that it wraps, without parameters.

    Containers are refilled and tensors written in place, at any depth: LBFGS keeps lists of tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        within = list(contained(optimizer, seen=set()))
        self._contents = Contents(within)
        self._tensors = TensorValues(thing for thing in within if isinstance(thing, torch.Tensor))
        self._generators = [(thing, generator_state(thing)) for thing in within if isinstance(thing, GENERATORS)]

    def restore(self) -> None:
        """Put everything back."""
        self._contents.restore()
        self._tensors.restore()
        for generator, state in self._generators:
            restore_generator(generator, state)


class Attributes:
    """Some attributes of any objects, put back as they were; copies of the values may work meanwhile."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, str, Any, bool]] = []

    def take(self, owner: Any, *names: str, copied: bool = False) -> None:
        """Remember attributes; with ``copied``, let a copy of the value work from the next restore on."""
        self._kept += [(owner, name, vars(owner)[name], copied) for name in names]

    def swap_in_copies(self) -> None:
        """Put copies in the place of all values that were taken with ``copied``."""
        for owner, name, value, copied in self._kept:
            vars(owner)[name] = copy.deepcopy(value) if copied else value

    def restore(self) -> None:
        """Put the original values back."""
        for owner, name, value, _ in self._kept:
            vars(owner)[name] = value


def _plain(module: Any) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _MODULE_TABLES}


def _behind_hooks(module: torch.nn.Module) -> Iterator[Any]:
    """Yield what hooks of a module write to: the objects whose methods they are, and all they were defined around."""
    tables = [vars(module)[name] for name in _MODULE_TABLES if "_hooks" in name]
    for parameter in module._parameters.values():
        tables += [] if parameter is None else [getattr(parameter, name, None) for name in _TENSOR_HOOKS]
    for hook in (hook for table in tables if isinstance(table, dict) for hook in table.values()):
        function = hook.func if isinstance(hook, partial) else hook
        yield getattr(function, "__self__", None)
        yield from (cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != _EMPTY_CELL)


def _may_be_swapped(owner: Any) -> bool:
    """Return whether an object's attributes may be swapped for copies: PyTorch's own hooks hold the state of ranks."""
    foreign = type(owner).__module__.partition(".")[0] == "torch"
    return hasattr(owner, "__dict__") and not foreign and not isinstance(owner, _NO_OWNERS)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy as deep as possible; data stay shared, as trials only read them."""
    if isinstance(value, (Dataset, DataLoader)):
        return value
    if isinstance(value, LentIterator):
        return value.loan()
    known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # locks, files, tensors with a graph: whatever a module may hold
        if is_out_of_memory(error):
            raise
        while len(memo) > known:  # what a failed attempt left half done
            memo.popitem()
    cls: Any = type(value)
    if cls not in (dict, list) and not _is_plain(cls):
        memo[id(value)] = value
        return value
    memo[id(value)] = copied = cls.__new__(cls)
    if cls is list:
        copied.extend(_copied(inner, memo) for inner in value)
        return copied
    entries, into = (value, copied) if cls is dict else (vars(value), vars(copied))
    into.update({name: _copied(inner, memo) for name, inner in entries.items()})
    return copied


def _is_plain(cls: type) -> bool:
    """Return whether objects of a class are their attributes and nothing else: these may be copied one by one."""
    root = cls.__module__.partition(".")[0]
    usual = all(getattr(cls, name) is getattr(object, name) for name in ("__new__", "__reduce_ex__", "__getstate__"))
    special = any(hasattr(cls, name) for name in ("__del__", "__deepcopy__", "__setstate__", "__slots__"))
    known = root in sys.stdlib_module_names or issubclass(cls, (torch.Tensor, torch.nn.Module))
    return usual and not special and not known and cls.__base__ is object


# What a metric keeps of itself for good, and does not change in an update.
_FIXED = {*vars(Module()), "_defaults", "_persistent", "_reductions", "_update_signature"}

# What torchmetrics 1.9 keeps of a metric besides its states (``metric.py``, ``reset`` and ``forward``).
_COUNTERS = ("_update_count", "_forward_cache", "_computed", "_cache", "_is_synced")


def metric_state(metric: Metric, *, whole: bool = False) -> dict[str, Any]:
    """Return copies of what an update of a metric may change: of the ``whole`` metric, attributes besides, too."""
    states = {name: _copy_of(getattr(metric, name)) for name in metric._defaults}
    counters = {name: vars(metric)[name] for name in _COUNTERS if name in vars(metric)}
    return {**states, **counters, **(beside_states(metric) if whole else {})}


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Give a metric copies of what ``metric_state`` took: updates change states in place."""
    states = {name: _copy_of(state[name]) for name in metric._defaults if name in state}
    beside = {name: _deep_copy_of(state[name]) for name in state.keys() - {*metric._defaults, *_COUNTERS}}
    vars(metric).update({**state, **states, **beside})


def beside_states(metric: Metric) -> dict[str, Any]:
    """Return the attributes of a metric that are no states, with copies of tensors and containers."""
    apart = {*_FIXED, *metric._defaults, *_COUNTERS}
    return {name: _deep_copy_of(value) for name, value in vars(metric).items() if name not in apart}


def _deep_copy_of(value: Any) -> Any:
    """Copy tensors and containers of plain values, at any depth."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _deep_copy_of(thing) for name, thing in value.items()}
    if type(value) is list:
        return [*map(_deep_copy_of, value)]
    return copy.copy(value) if isinstance(value, (set, deque)) else value


def _copy_of(state: Any) -> Any:
    """Copy a tensor, or the list that updates append to; what is in the list never changes."""
    return list(state) if isinstance(state, list) else state.clone()


_STDLIB = sysconfig.get_path("stdlib")
_STOCK = ("builtins", "collections", "itertools", "types", "argparse")
_CONTAINERS, _PLAIN = (dict, list, set, deque), (bool, int, float, str, type(None))
_CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)
_APART = (*_CODE, Dataset, DataLoader)
_MOST = 1000  # functions, and objects, that are looked at
_LONGEST = 1000  # longer containers hold data

Place = tuple[Any, str]  # a namespace or a class, and a name in it; a cell and ""


class ReachedState:
    """The values that names refer to, and what these hold: containers, attributes, small tensors, generators."""

    def __init__(self, module: Module, apart: list[object]) -> None:
        known = {id(thing) for thing in (*apart, *module.modules())}
        self._names = [(place, value) for place, value in _names(module) if id(value) not in known]
        held = [*_held([value for _, value in self._names], known)]
        self._names = [(place, lent(value)) for place, value in self._names]
        self._contents = Contents([*held, *(vars(each) for each in held if hasattr(each, "__dict__"))])
        self._tensors = TensorValues(each for each in held if isinstance(each, Tensor) and is_small(each))
        self._generators = [(each, generator_state(each)) for each in held if isinstance(each, GENERATORS)]

    def restore(self) -> None:
        """Put everything back."""
        for place, value in self._names:
            _bind(place, given_back(value))
        self._contents.restore()
        self._tensors.restore()
        for generator, state in self._generators:
            restore_generator(generator, state)

    def swap_in_copies(self) -> None:
        """Lend iterators to trials."""
        for place, value in self._names:
            if isinstance(value, LentIterator):
                _bind(place, value.loan())


def _bind(place: Place, value: Any) -> None:
    namespace, name = place
    if isinstance(namespace, CellType):
        namespace.cell_contents = value
    elif isinstance(namespace, type):
        if vars(namespace).get(name) is not value:
            setattr(namespace, name, value)
    elif namespace.get(name) is not value:
        namespace[name] = value


def _names(module: Module) -> Iterator[tuple[Place, Any]]:
    """Yield the places of names that the code of a module uses and that no class defines, with what they refer to."""
    pending: deque[Any] = deque(cls for part in module.modules() for cls in type(part).__mro__)
    seen: set[Any] = set()
    while pending and len(seen) < _MOST:
        code = pending.popleft()
        code = getattr(code, "__wrapped__", getattr(code, "fget", code))
        if not isinstance(code, (type, FunctionType)) or code in seen or not _is_users(code):
            continue
        seen.add(code)
        found: list[tuple[Place, Any]]
        if isinstance(code, type):
            pending.extend(vars(code).values())
            found = [((code, name), value) for name, value in vars(code).items() if not name.startswith("__")]
            yield from ((place, value) for place, value in found if isinstance(value, (*_PLAIN, *_CONTAINERS)))
            continue
        names, used = code.__globals__, code.__code__.co_names
        found = [((names, name), names[name]) for name in used if name in names]
        found += [((cell, ""), cell.cell_contents) for cell in code.__closure__ or () if cell != CellType()]
        pending.extend(value for _, value in found)
        yield from ((place, value) for place, value in found if not isinstance(value, _CODE))


def _held(values: list[Any], known: set[int]) -> Iterator[Any]:
    """Yield what values hold at any depth, and the values themselves, each once."""
    pending, seen = deque(values), set(known)
    while pending and len(seen) < _MOST:
        value = pending.popleft()
        plain = isinstance(value, (Tensor, Module, *GENERATORS)) or type(value).__module__ in _STOCK
        if id(value) in seen or not (plain or _is_users(type(value))) or isinstance(value, _APART):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, (*_CONTAINERS, tuple)):
            pending.extend(value.values() if isinstance(value, dict) else value if len(value) <= _LONGEST else ())
        elif isinstance(value, Module):
            pending.extend(chain(value.parameters(), value.buffers()))
        elif not isinstance(value, Tensor):
            pending.extend(getattr(value, "__dict__", {}).values())


def _is_users(thing: Any) -> bool:
    """Return whether a class or a function is the user's own: not installed, and not one of Python's."""
    name = thing.__module__
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not (name.startswith("lightning_ga") or file.startswith(_STDLIB) or "site-packages" in file)
