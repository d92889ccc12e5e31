"""Keep what a forward pass may change besides its output, so that it can run again from the state before.

Attributes are always kept. Containers, small tensors and generators of random numbers are looked at in calls 1, 2, 4,
8, … of a module, and if parts of it have been switched between training and evaluation; in other calls only those are
copied that have been seen to change. A small tensor has a copy besides, which is made again if its version moves.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_ga.batch.pytree import is_constant, same_values
from lightning_ga.errors import UserError
from lightning_ga.snapshot.copies import checksums, is_writable, refill, versions
from lightning_ga.snapshot.random_numbers import (
    GENERATORS,
    generator_state,
    generators_of,
    global_generators,
    restore_generator,
    torch_generators,
)

SMALL = 2**18  # bytes of a tensor that is copied; a larger one must not change
_LONGEST = 1000  # entries of a container that is looked through
_LEFT = {*vars(Module()), "forward"} - {"training", "_buffers"}  # attributes that a forward pass does not set
_CLOSED = (Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, *GENERATORS)
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "numpy")  # their objects are not looked through


class _Quiet(NamedTuple):
    """A tensor that no forward pass has been seen to change, its values, and its version then."""

    tensor: Tensor
    values: Tensor
    version: int

    def has_moved(self) -> bool:
        """Return whether it was written to since."""
        return versions((self.tensor,))[0] != self.version


class PassState:
    """Attributes, containers, tensors and generators, as they are now."""

    def __init__(
        self,
        attributes: Iterable[dict[str, Any]],
        containers: Iterable[Any],
        tensors: Iterable[Tensor],
        quiet: Sequence[_Quiet],
        generators: Iterable[Any],
    ) -> None:
        self._attributes = [(own, dict(own)) for own in attributes]
        self.contents = [(each, copy(each)) for each in containers]
        self.tensors = [(each, each.detach().clone()) for each in tensors]
        self._quiet = quiet
        self.random = [(each, generator_state(each)) for each in generators]

    def now(self) -> "PassState":
        """Return the state of the same things as of now."""
        attributes = [own for own, _ in self._attributes]
        tensors = [tensor for tensor, _ in self.tensors] + [each.tensor for each in self._quiet if each.has_moved()]
        containers = [each for each, _ in self.contents]
        return PassState(attributes, containers, tensors, (), [each for each, _ in self.random])

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; versions of tensors stay, because others may have saved these for a backward pass."""
        for own, before in self._attributes:
            if not _same_entries(own, before):
                for name in (own.keys() | before.keys()) - _LEFT:
                    if name in before:
                        own[name] = before[name]
                    else:
                        del own[name]
        for container, content in self.contents:
            if not _same_entries(container, content):
                if isinstance(container, dict) and [*container] != [*content]:
                    container.clear()  # else keys that come back would be the last ones
                refill(container, content)
        kept = self.tensors + [(each.tensor, each.values) for each in self._quiet if each.has_moved()]
        if kept:
            torch._foreach_copy_([tensor.data for tensor, _ in kept], [values for _, values in kept])
        for generator, state in self.random:
            restore_generator(generator, state)

    def difference(self, other: "PassState") -> str:
        """Return in what another state of the same things differs, if not in identities; empty if in nothing."""
        if not all(same_values(mine, theirs) for (_, mine), (_, theirs) in zip(self.random, other.random)):
            return "draws other random numbers"
        if not all(same_values(mine, theirs) for (_, mine), (_, theirs) in zip(self.tensors, other.tensors)):
            return "leaves other values in its buffers"
        lengths = [[len(content) for _, content in state.contents] for state in (self, other)]
        return "" if lengths[0] == lengths[1] else "leaves other entries in its lists"


class ForwardEffects:
    """Knows what the forward passes of a module change, and returns the state before one of them."""

    def __init__(self, module: Module, name: str) -> None:
        self._module, self._name = module, name
        self._calls = 0
        self._attributes: list[dict[str, Any]] = []
        self._containers: list[Any] = []  # that have been seen to change, as have these tensors and generators
        self._tensors: list[Tensor] = []
        self._quiet: list[_Quiet] = []
        self._generators: list[Any] = []
        self._flags: list[bool] = []

    def before_call(self, generators: Sequence[Any] = ()) -> tuple[PassState, bool]:
        """Return the state as a call begins, with generators among its arguments, and whether it is a look at all."""
        self._calls += 1
        if not self._calls & (self._calls - 1) or self._flags != [own["training"] for own in self._attributes]:
            return self._look(generators), True
        moved = [each.tensor for each in self._quiet if each.has_moved()]
        if moved:
            self._tensors += moved
            self._quiet = [each for each in self._quiet if not each.has_moved()]
        given = (*self._generators, *generators)
        return PassState(self._attributes, self._containers, self._tensors, self._quiet, given), False

    def _look(self, generators: Sequence[Any]) -> PassState:
        """Return the state of all that a forward pass may change; read the bits of what it must not."""
        parts = list(self._module.modules())
        self._attributes = [vars(part) for part in parts]
        self._flags = [part.training for part in parts]
        containers, tensors = _reachable(parts)
        small = {id(each): each for each in tensors if each.nbytes <= SMALL}
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        self._watched = {name: each for name, each in named if id(each) not in small}
        self._sums = _bits(self._watched.values())
        every = (*global_generators(), *generators_of(self._module), *generators)
        return PassState(self._attributes, containers, small.values(), (), every)

    def after_look(self, before: PassState) -> None:
        """Learn what has changed since the state before a call.

        Raises:
            UserError: If a parameter or a large buffer has changed.
        """
        for (name, tensor), was, now in zip(self._watched.items(), self._sums, _bits(self._watched.values())):
            if None not in (was, now) and was != now:
                raise UserError(
                    f"{self._name} cannot be computed again, because its forward pass changes {name} "
                    f"({tensor.nbytes:,} bytes): change it outside of the forward pass, or leave {self._name} out."
                )
        known = {id(each) for each in (*self._containers, *self._tensors, *self._generators)}
        known |= {id(each.tensor) for each in self._quiet if each.has_moved()}
        self._containers = [each for each, was in before.contents if id(each) in known or not _same_entries(each, was)]
        self._tensors, self._quiet = [], []
        for tensor, values in before.tensors:
            if id(tensor) in known or not same_values(values, tensor):
                self._tensors.append(tensor)
            else:
                self._quiet.append(_Quiet(tensor, values, versions((tensor,))[0]))
        always = torch_generators()  # their state is read in no time
        apart = [(each, was) for each, was in before.random if not any(each is other for other in always)]
        drawn = [each for each, was in apart if id(each) in known or not same_values(was, generator_state(each))]
        self._generators = [*always, *drawn]


def _reachable(parts: Iterable[Module]) -> tuple[list[Any], list[Tensor]]:
    """Return the containers and the writable tensors among the attributes of modules, but for their parameters."""
    values: list[tuple[Any, bool]] = [(part._buffers, False) for part in parts]
    values += [(value, True) for part in parts for name, value in vars(part).items() if name not in _LEFT]
    containers: list[Any] = []
    tensors: list[Tensor] = []
    seen: set[int] = set()
    for value, opens_objects in values:  # grows
        if id(value) in seen or (is_constant(value) and not isinstance(value, Tensor)) or isinstance(value, _CLOSED):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if is_writable(value) and not value.is_inference() and not isinstance(value, torch.nn.Parameter):
                tensors.append(value)
        elif isinstance(value, (dict, list, set, deque, tuple)):
            if not isinstance(value, tuple):
                containers.append(value)
            if len(value) <= _LONGEST:
                values += [(each, opens_objects) for each in (value.values() if isinstance(value, dict) else value)]
        elif opens_objects and hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _LIBRARIES:
            values.append((vars(value), False))
    return containers, tensors


def _bits(tensors: Iterable[Tensor]) -> list[int | None]:
    """Return sums of bits; ``None`` for tensors whose memory is not there now, as sharded strategies free it."""
    given = list(tensors)
    plain = [each for each in given if each.layout is torch.strided and not is_traceable_wrapper_subclass(each)]
    there = [each for each in plain if each.untyped_storage().nbytes()]
    found = dict(zip(map(id, there), checksums(there)))
    return [found.get(id(each)) for each in given]


def _same_entries(one: Any, other: Any) -> bool:
    """Return whether two containers of a kind have the same entries, by identity."""
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        return all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))
    return all(map(is_, one, other))
