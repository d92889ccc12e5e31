"""Keep what a forward pass may change besides its output, so that it can run again from the state before.

Attributes and small tensors are kept in every call. Containers and generators of random numbers are looked at in calls
1, 2, 4, 8, … of a module, if parts of it have been switched between training and evaluation, and if attributes have got
other values, as in trial steps, which work on copies. In other calls only those are copied that have been seen to
change.

Tested in tests/recompute/test_wrapper.py.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_ga.batch.pytree import same_values
from lightning_ga.errors import UserError
from lightning_ga.snapshot.copies import checksums, copies_of, has_same_entries, is_writable, put_back
from lightning_ga.snapshot.isolation import contained
from lightning_ga.snapshot.random_numbers import (
    GENERATORS,
    generator_state,
    global_generators,
    torch_generators,
)

SMALL = 2**18  # bytes of a tensor that is copied; a larger one must not change
_LEFT = {*vars(Module()), "forward"} - {"_buffers"}  # attributes whose values a forward pass does not set
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "numpy")
_NO_OBJECTS = (
    *(Tensor, Module, *GENERATORS, dict, list, tuple, set, deque),
    *(type, FunctionType, MethodType, BuiltinFunctionType, ModuleType),
)  # values of which no attributes are kept


class StateBefore:
    """The state before a forward pass: a context in which the pass runs again, and which leaves the state of now."""

    def __init__(self, things: Iterable[Any]) -> None:
        self.copies = copies_of(things)
        self._now: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._now = copies_of(thing for thing, _ in self.copies)
        put_back(self.copies)

    def __exit__(self, *_: object) -> None:
        put_back(self._now)
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
        self._kept: list[Any] = []  # what is copied before every call: all of it in a look
        self._values: list[tuple[dict[str, Any], str, Any]] = []  # of attributes
        self._known: set[int] = set()  # what has been seen to change, by id
        self._watched: dict[str, Tensor] = {}  # what must not change
        self._sums: list[int | None] = []

    def before_call(self, given: Iterable[Any] = ()) -> StateBefore:
        """Return the state as a call begins, and that of generators among its arguments."""
        self._calls += 1
        is_due = self._calls.bit_count() == 1 or self._flags != _flags(self._attributes)
        self._looks = is_due or any(own.get(name) is not value for own, name, value in self._values)
        if self._looks:
            self._look()
            self._watched = self._unchanging() if is_due else {}
            self._sums = checksums(self._watched.values())
        return StateBefore([*self._kept, *given])

    def _look(self) -> None:
        """Find all that a forward pass may change."""
        self._attributes = [*map(vars, self._module.modules())]
        self._flags = _flags(self._attributes)
        self._known.update(map(id, (*torch_generators(), *self._attributes)))
        self._kept = [*global_generators(), *self._attributes]
        self._values = []
        seen: set[int] = set()
        for own in self._attributes:
            for name in own.keys() - _LEFT:
                value = own[name]
                content = vars(value) if _is_object(value) else value
                found = list(filter(_is_restorable, contained(content, seen)))
                self._kept += found
                if found and name != "_buffers":
                    self._values.append((own, name, value))

    def _unchanging(self) -> dict[str, Tensor]:
        """Return what a forward pass must not change: parameters and large buffers."""
        found: dict[str, Tensor] = dict(self._module.named_parameters())
        for name, buffer in self._module.named_buffers():
            if not _is_restorable(buffer):
                found[name] = buffer
        return found

    def after_call(self, before: StateBefore) -> None:
        """Learn what has changed since the state before a call.

        Raises:
            UserError: If a parameter or a large buffer has changed.
        """
        if not self._looks:
            return
        self._require_unchanged()
        self._kept = []
        for thing, kept in before.copies:
            if isinstance(thing, Tensor) or id(thing) in self._known or not _is_same(thing, kept):
                self._kept.append(thing)
                self._known.add(id(thing))

    def _require_unchanged(self) -> None:
        sums = checksums(self._watched.values())
        for name, before, now in zip(self._watched, self._sums, sums):
            if before != now and None not in (before, now):
                raise UserError(
                    f"{self._name} cannot be computed again, because its forward pass changes {name} "
                    f"({self._watched[name].nbytes:,} bytes): change it outside of the forward pass, or leave "
                    f"{self._name} out."
                )


def _flags(attributes: Sequence[dict[str, Any]]) -> list[bool]:
    """Return whether parts are in training."""
    return list(map(itemgetter("training"), attributes))


def _is_object(value: Any) -> bool:
    """Return whether a value is an object of a class of the user's own, whose attributes may change."""
    is_users = type(value).__module__.split(".")[0] not in _LIBRARIES
    return is_users and hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS)


def _is_restorable(thing: Any) -> bool:
    if not isinstance(thing, Tensor):
        return True
    return thing.nbytes <= SMALL and is_writable(thing) and not thing.is_inference()


def _is_same(thing: Any, kept: Any) -> bool:
    """Return whether a generator or a container is as it was: its state, or its entries by identity."""
    if isinstance(thing, GENERATORS):
        return same_values(kept, generator_state(thing))
    return has_same_entries(thing, kept)
