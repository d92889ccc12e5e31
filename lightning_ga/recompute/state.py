"""Keep what a forward pass may change besides its output, so that it can run again from the state before.

Attributes are always kept. Containers, small tensors and generators of random numbers are looked at in calls 1, 2, 4,
8, … of a module, if parts of it have been switched between training and evaluation, and if attributes have got other
values, as in trial steps, which work on copies. In other calls only those are copied that have been seen to change. A
small tensor has an older copy besides, which counts once its version moves.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_ga.batch.pytree import same_values
from lightning_ga.errors import UserError
from lightning_ga.snapshot.copies import checksums, is_writable, refill
from lightning_ga.snapshot.isolation import contained
from lightning_ga.snapshot.random_numbers import (
    GENERATORS,
    generator_state,
    global_generators,
    restore_generator,
    torch_generators,
)

SMALL = 2**18  # bytes of a tensor that is copied; a larger one must not change
_LEFT = {*vars(Module()), "forward"} - {"_buffers"}  # attributes whose values a forward pass does not set
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "numpy")
_NO_OBJECTS = (
    *(Tensor, Module, *GENERATORS, dict, list, tuple, set, deque),
    *(type, FunctionType, MethodType, BuiltinFunctionType, ModuleType),
)  # values of which no attributes are kept
Quiet = tuple[Tensor, Tensor, int]  # a tensor that no forward pass has been seen to change, a copy, its version then


class StateBefore:
    """The state before a forward pass: a context in which the pass runs again, and which leaves the state of now."""

    def __init__(self, things: Iterable[Any], quiet: Sequence[Quiet] = ()) -> None:
        self.copies = [(thing, _copy_of(thing)) for thing in things]
        self._quiet = quiet
        self._now: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        moved = [(tensor, values) for tensor, values, version in self._quiet if tensor._version != version]
        before = [*self.copies, *moved]
        self._now = [(thing, _copy_of(thing)) for thing, _ in before]
        _put_back(before)

    def __exit__(self, *_: object) -> None:
        _put_back(self._now)
        self._now = []


class ForwardEffects:
    """Knows what the forward passes of a module change, and returns the state before one of them."""

    def __init__(self, module: Module, name: str) -> None:
        self._module = module
        self._name = name
        self._calls = 0
        self._attributes: list[dict[str, Any]] = []  # of its parts
        self._flags: list[bool] = []  # of training
        self._looks = False  # whether the running call is a look at all
        self._changing: list[Any] = []  # what is copied before every call
        self._quiet: list[Quiet] = []
        self._values: list[tuple[dict[str, Any], str, Any]] = []  # of attributes
        self._known: set[int] = set()  # what has been seen to change, by id
        self._watched: dict[str, Tensor] = {}  # what must not change
        self._sums: dict[int, int | None] = {}

    def before_call(self, given: Iterable[Any] = ()) -> StateBefore:
        """Return the state as a call begins, and that of generators among its arguments."""
        self._calls += 1
        flags = [own["training"] for own in self._attributes]
        is_due = not self._calls & (self._calls - 1) or flags != self._flags
        self._looks = is_due or any(own.get(name) is not value for own, name, value in self._values)
        if self._looks:
            self._look(is_due)
        return StateBefore([*self._changing, *given], self._quiet)

    def _look(self, is_due: bool) -> None:
        """Find all that a forward pass may change, and what it must not if that ``is_due``."""
        self._changing = [*global_generators()]
        self._quiet = []
        self._values = []
        self._attributes = [*map(vars, self._module.modules())]
        self._flags = [own["training"] for own in self._attributes]
        seen: set[int] = set()
        for own in self._attributes:
            self._changing.append(own)
            for name in own.keys() - _LEFT:
                value = own[name]
                content = vars(value) if _is_object(value) else value
                found = [each for each in contained(content, seen) if _is_restorable(each)]
                self._changing += found
                if found and name != "_buffers":
                    self._values.append((own, name, value))
        if not is_due:
            self._watched = {}
            return
        parameters = self._module.named_parameters()
        buffers = self._module.named_buffers()
        self._watched = {**dict(parameters), **{name: each for name, each in buffers if not _is_restorable(each)}}
        self._sums = _sums(self._watched.values())

    def after_call(self, before: StateBefore) -> None:
        """Learn what has changed since the state before a call.

        Raises:
            UserError: If a parameter or a large buffer has changed.
        """
        if not self._looks:
            moved = [each for each in self._quiet if each[0]._version != each[2]]
            if moved:
                self._changing += [tensor for tensor, *_ in moved]
                self._quiet = [each for each in self._quiet if each[0]._version == each[2]]
            return
        self._require_unchanged()
        always = {id(each) for each in (*torch_generators(), *self._attributes)}
        self._changing = []
        for thing, kept in before.copies:
            if id(thing) in always or id(thing) in self._known or not _is_same(thing, kept):
                self._changing.append(thing)
                self._known.add(id(thing))
            elif isinstance(thing, Tensor):
                self._quiet.append((thing, kept, thing._version))

    def _require_unchanged(self) -> None:
        sums = _sums(self._watched.values())
        for name, tensor in self._watched.items():
            was = self._sums.get(id(tensor))
            now = sums.get(id(tensor))
            if None not in (was, now) and was != now:
                raise UserError(
                    f"{self._name} cannot be computed again, because its forward pass changes {name} "
                    f"({tensor.nbytes:,} bytes): change it outside of the forward pass, or leave {self._name} out."
                )


def _is_object(value: Any) -> bool:
    """Return whether a value is an object of a class of the user's own, whose attributes may change."""
    is_users = type(value).__module__.split(".")[0] not in _LIBRARIES
    return is_users and hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS)


def _is_restorable(thing: Any) -> bool:
    if not isinstance(thing, Tensor):
        return True
    return thing.nbytes <= SMALL and is_writable(thing) and not thing.is_inference()


def _copy_of(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return thing.detach().clone()
    return generator_state(thing) if isinstance(thing, GENERATORS) else copy(thing)


def _is_same(thing: Any, kept: Any) -> bool:
    """Return whether a thing is as it was: values of tensors, states of generators, entries by identity."""
    if isinstance(thing, (Tensor, *GENERATORS)):
        return same_values(kept, thing if isinstance(thing, Tensor) else generator_state(thing))
    if isinstance(thing, set):
        return bool(thing == kept)
    if isinstance(thing, dict):
        return [*thing] == [*kept] and all(map(is_, thing.values(), kept.values()))
    return len(thing) == len(kept) and all(map(is_, thing, kept))


@torch.no_grad()
def _put_back(copies: Iterable[tuple[Any, Any]]) -> None:
    """Put copies back; versions of tensors stay, because others may have saved these for a backward pass."""
    for thing, kept in copies:
        if isinstance(thing, Tensor):
            thing.data.copy_(kept)
        elif isinstance(thing, GENERATORS):
            restore_generator(thing, kept)
        elif not _is_same(thing, kept):
            if isinstance(thing, dict):
                thing.clear()  # else keys that come back would be the last ones
            refill(thing, kept)


def _sums(tensors: Iterable[Tensor]) -> dict[int, int | None]:
    """Return sums of bits by id, but for tensors whose memory is not there now, as sharded strategies free it."""
    plain = [each for each in tensors if each.layout is torch.strided and not is_traceable_wrapper_subclass(each)]
    there = [each for each in plain if each.untyped_storage().nbytes()]
    return dict(zip(map(id, there), checksums(there)))
