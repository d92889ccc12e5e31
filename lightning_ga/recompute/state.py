"""Keep what a forward pass may change besides its output, so that it can run again from the state before.

In every call attributes, small tensors and arrays, containers and generators of random numbers are copied, at any depth
of objects of the user's own. Iterators and objects with ``__slots__`` are not. Larger tensors and arrays must not
change.

Tested in tests/recompute/test_wrapper.py.
"""

from collections.abc import Iterable, Iterator
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor
from torch.nn import Module

from lightning_ga.errors import UserError
from lightning_ga.snapshot.copies import CONTAINERS, checksums, copies_of, everything_in, is_writable, put_back
from lightning_ga.snapshot.random_numbers import GENERATORS, generators_in, global_generators
from lightning_ga.snapshot.trial_isolation import attributes_of

SMALL = 2**18  # bytes of a tensor or array that is copied; a larger tensor must not change
_LONGEST = 1000  # entries of a container that is looked into: those of longer ones are data
_LEFT = {*vars(Module()), "forward"} - {"_buffers"}  # attributes whose values a forward pass does not set


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
    """Returns the state before each forward pass of a module; refuses one that changes what is too large to copy."""

    def __init__(self, module: Module, name: str) -> None:
        self._module = module
        self._name = name
        self._calls = 0
        self._watched: list[tuple[str, Any, int | None]] = []  # what must not change, with the sum of its bits

    def before_call(self, given: Iterable[Any] = ()) -> StateBefore:
        """Return the state as a call begins, and that of generators in its arguments."""
        self._calls += 1
        held = self._held()
        watched = self._unchanging(held) if self._calls.bit_count() == 1 else []  # to look takes time
        self._watched = [(name, value, _checksum(value)) for name, value in watched]
        return StateBefore([*global_generators(), *generators_in(_everything_in(given)), *filter(_is_restorable, held)])

    def _held(self) -> list[Any]:
        """Return what the module and its submodules hold, but for their parameters."""
        found: list[Any] = []
        values: list[Any] = []
        for part in self._module.modules():
            own = vars(part)
            found.append(own)
            values += [own[name] for name in own.keys() - _LEFT]
        found += _everything_in(values)
        return found

    def _unchanging(self, held: Iterable[Any]) -> list[tuple[str, Any]]:
        """Return what a forward pass must not change, by name: parameters, and large tensors and arrays."""
        names = {id(buffer): name for name, buffer in self._module.named_buffers()}
        found: list[tuple[str, Any]] = [*self._module.named_parameters()]
        for each in held:
            if isinstance(each, (Tensor, np.ndarray)) and not _is_restorable(each):
                found.append((names.get(id(each), f"a value of type {type(each).__name__} in its attributes"), each))
        return found

    def after_call(self) -> None:
        """Raise a ``UserError`` if what must not change has changed in a call that was looked at: 1, 2, 4, 8, …."""
        for name, value, before in self._watched:
            now = _checksum(value)
            if before != now and None not in (before, now):
                raise UserError(
                    f"{self._name} cannot be computed again, because its forward pass changes {name} "
                    f"({value.nbytes:,} bytes): change it outside of the forward pass, or leave {self._name} out."
                )


def _checksum(value: Any) -> int | None:
    """Return a number of a tensor or an array, by which a change is seen; ``None`` if it cannot be read."""
    return crc32(value.tobytes()) if isinstance(value, np.ndarray) else checksums([value])[0]


def _everything_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values and what they contain, at any depth of objects of the user's own."""
    return everything_in(values, attributes_of, longest=_LONGEST)


def _is_restorable(value: Any) -> bool:
    """Return whether a value can be put back as it was, and is small."""
    if isinstance(value, Tensor):
        return value.nbytes <= SMALL and is_writable(value) and not value.is_inference()
    if isinstance(value, np.ndarray):
        return value.nbytes <= SMALL and value.flags.writeable
    return isinstance(value, (*CONTAINERS, *GENERATORS))
