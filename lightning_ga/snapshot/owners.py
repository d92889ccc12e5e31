"""Objects whose attributes a step may change: parts of a module, metrics, and objects of the user's own within them."""

import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module

from lightning_ga.snapshot.metrics import FIXED, VALUES
from lightning_ga.snapshot.random_numbers import GENERATORS

FEW = 64  # things of a list that are looked at before every attempt
CONTAINERS = (list, deque, dict, set)
NUMBERS = (NoneType, bool, int, float, str)
_DEPTH = 3  # of objects within objects
_WRITABLE = (Tensor, np.ndarray, *CONTAINERS, tuple, *GENERATORS)
_PLAIN = ("builtins", "abc", "typing", "__main__")
_FOREIGN = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "lightning_ga", "numpy"}
# What Lightning and nn.Module keep of themselves: modes, tables, hooks, the ``forward`` that a strategy puts back.
_TABLES = {*vars(LightningModule()), "_hparams", "forward"}


class _Attributes:
    """Attributes of one object, searched again only when their names or types have changed."""

    def __init__(self, path: str, attributes: dict[str, Any]) -> None:
        self.path, self.attributes = path, attributes
        self._known: list[str] = []
        self._types: list[type] = []
        self._names: list[str] = []

    def place(self, name: str) -> str:
        """Return the path of an attribute."""
        return f"{self.path}.{name}".lstrip(".")

    def names(self) -> list[str]:
        """Return the names of attributes that are kept."""
        known, types = [*self.attributes], [*map(type, self.attributes.values())]
        if known != self._known or types != self._types:
            self._known, self._types = known, types
            self._names = self._search(dict(zip(known, types)))
        return self._names

    def _search(self, types: dict[str, type]) -> list[str]:
        raise NotImplementedError


class Owner(_Attributes):
    """A part of a module, or an object that one holds."""

    def __init__(self, path: str, attributes: dict[str, Any], *, is_object: bool = False) -> None:
        super().__init__(path, attributes)
        self.is_object = is_object  # not a module
        self.is_layer = bool(path) and not is_object  # nor the module itself
        self._own: dict[str, type] | None = None  # without what Lightning and PyTorch keep
        self.plain: list[str] = []  # names of attributes that are no more than a number, or nothing yet
        self._has_changed = False

    @property
    def keeps(self) -> bool:
        """Whether it has attributes that are kept, or attributes of it come, go or change their types."""
        return bool(self._names) or self._has_changed

    def numbers(self) -> dict[str, Any]:
        """Return the plain attributes with their values; one that is gone since the last look is left out."""
        held = self.attributes
        return {name: held[name] for name in self.plain if name in held}

    def _search(self, types: dict[str, type]) -> list[str]:
        before, self._own = self._own, {name: kind for name, kind in types.items() if name not in _TABLES}
        self._has_changed = self._has_changed or before not in (None, self._own)
        self.plain = [name for name, kind in self._own.items() if kind in NUMBERS]
        return [name for name, kind in self._own.items() if _is_kept(kind) or self._is_state(name, kind)]

    def _is_state(self, name: str, kind: type) -> bool:
        """Return whether it is a tuple of tensors, as the state of an LSTM is, or an empty one."""
        return issubclass(kind, tuple) and (not (value := self.attributes[name]) or is_gathered(value))

    def new(self) -> list[str]:
        """Return the names under which something was gathered and that did not exist."""
        new = self.attributes.keys() - set(self._known)
        return [name for name in new if is_gathered(self.attributes[name])]


class MetricOwner(_Attributes):
    """A metric or a collection of them; the attributes that an update may write to."""

    def __init__(self, path: str, attributes: dict[str, Any]) -> None:
        super().__init__(path, attributes)
        self.states = attributes.get("_defaults", ())

    def _search(self, types: dict[str, type]) -> list[str]:
        own = {name: kind for name, kind in types.items() if name not in FIXED and name not in VALUES}
        return [name for name, kind in own.items() if issubclass(kind, _WRITABLE)]


def owners_of(parts: list[tuple[str, Module]], module: Module) -> list[Owner]:
    """Return the owners among parts of a module, and objects of the user's own code that they hold.

    PyTorch's own layers hold nothing else than their tables, and they are many. Of other objects those whose class
    is of the module's package, or not installed: what clients of a service keep of their connection is theirs.

    Args:
        parts: The parts, with their paths.
        module: The module.
    """
    own = [(path, part) for path, part in parts if not type(part).__module__.startswith("torch.nn.")]
    seen, root = set[int](), type(module).__module__.partition(".")[0]
    found = [Owner(path, vars(part)) for path, part in own]
    for owner in [*found]:
        values = {name: value for name, value in owner.attributes.items() if name not in _TABLES}
        found += _objects(values, owner.path, root, seen, _DEPTH)
    return found


def _objects(values: dict[Any, Any], path: str, root: str, seen: set[int], depth: int) -> Iterator[Owner]:
    for name, value in [*values.items()] if depth else ():
        place = f"{path}.{name}".lstrip(".")
        if isinstance(value, (list, tuple, dict)) and 0 < len(value) <= FEW:
            inner = value if isinstance(value, dict) else dict(enumerate(value))
            yield from _objects(inner, place, root, seen, depth - 1)
            continue
        kind: type = type(value)
        if id(value) not in seen and _is_of(kind, root) and isinstance(getattr(value, "__dict__", 0), dict):
            seen.add(id(value))
            yield Owner(place, vars(value), is_object=True)
            yield from _objects(vars(value), place, root, seen, depth - 1)


@cache
def _is_of(kind: type, root: str) -> bool:
    """Return whether a class is plain code of a package or of one that is not installed."""
    own, *others = (str(base.__module__).partition(".")[0] for base in kind.__mro__)
    if {own, *others} & (_FOREIGN | sys.stdlib_module_names - {root, *_PLAIN}) or own == "builtins":
        return False
    path = getattr(sys.modules.get(own), "__file__", None)
    return own == root or (path is not None and not {"site-packages", "dist-packages"} & {*Path(path).parts})


@cache
def _is_kept(kind: type) -> bool:
    return issubclass(kind, (Tensor, np.ndarray, *CONTAINERS, *GENERATORS))


def things(container: Any) -> Any:
    """Return what a container holds, which another thread may change meanwhile."""
    return (
        container
        if isinstance(container, list)
        else [*(container.values() if isinstance(container, dict) else container)]
    )


def is_gathered(value: Any) -> bool:
    """Return whether it is a tensor, a tuple of tensors, or a container of tensors, arrays, records of anything."""
    if isinstance(value, (list, deque, dict)):
        return all(isinstance(thing, (Tensor, np.ndarray, list, tuple, dict)) for thing in things(value))
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(thing, (Tensor, tuple)) and is_gathered(thing) for thing in value)
    return isinstance(value, (Tensor, np.ndarray))
