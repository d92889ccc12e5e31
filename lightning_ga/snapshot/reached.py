"""What the code of a module reaches besides the module: global names, and variables of enclosing functions.

A trial of a step puts all that back: a global generator of random numbers, a list that steps append to, a count.
"""

import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, Dataset

from lightning_ga.snapshot.contents import Contents
from lightning_ga.snapshot.copies import is_small
from lightning_ga.snapshot.iterators import LentIterator, given_back, lent
from lightning_ga.snapshot.random_numbers import GENERATORS, generator_state, restore_generator
from lightning_ga.snapshot.state import TensorValues

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
