"""Keep and restore generators of random numbers: torch's, NumPy's and Python's."""

import ctypes
import random
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from lightning_ga.batch.pytree import same_values
from lightning_ga.memory.device import vendors_in_use

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generator_state(generator: Any) -> Any:
    """Return where a generator is."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def restore_generator(generator: Any, state: Any) -> None:
    """Set a generator back to where it was."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


def have_moved(states: Iterable[tuple[Any, Any]]) -> bool:
    """Return whether a generator has drawn since, given each with its state before."""
    return any(not same_values(state, generator_state(generator)) for generator, state in states)


def generators_of(module: torch.nn.Module) -> list[Any]:
    """Return the generators that a module or one of its parts holds."""
    return [value for part in module.modules() for value in vars(part).values() if isinstance(value, GENERATORS)]


def seed_generator(generator: Any, seed: int) -> None:
    """Seed one generator, of torch, NumPy or Python, with any whole number that is not negative."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed % 2**63)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)


def reseed(seed: int, generators: Iterable[Any] = ()) -> None:
    """Seed the global generators, those of devices in use included, and these.

    Unlike ``torch.manual_seed``, leave no seed behind for a device that is used only later.
    """
    for generator in (*torch_generators(), *generators):
        seed_generator(generator, seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def torch_generators() -> list[torch.Generator]:
    """Return the default generators of the host and of every device in use."""
    return [torch.default_generator, *(each for vendor in vendors_in_use() for each in vendor.generators())]


_WORDS = 4 * 625  # bytes: the 624 words of a Mersenne Twister, and the position among them


class _Twister:
    """A global generator whose state is read only if its words have changed, which lie at ``address()``, or at 0: none.

    To read NumPy's takes 33 µs, Python's, which is 625 objects, 7 and twice that where memory is not cached. Each draw
    changes the words, but that of the second of two normal numbers: while that one is kept, the state is always read.
    """

    def __init__(self, address: Callable[[], int], read: Callable[[], Any], has_second: Callable[[Any], bool]) -> None:
        self._address, self._read, self._has_second = address, read, has_second
        self.words, self._state = b"", None  # without words, the state is read the next time

    def state(self) -> Any:
        """Return the state; it is not to be changed."""
        address = self._address()
        words = ctypes.string_at(address, _WORDS) if address else b""
        if not words or words != self.words or self._has_second(self._state):
            self.words, self._state = words, self._read()
        return self._state


def _numpys_address() -> int:
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return int(bits.ctypes.state_address) if type(bits) is np.random.MT19937 else 0


def _pythons_address() -> int:
    """Return where the words lie in CPython 3.11 to 3.13 (``_randommodule.c``), if they lie there."""
    generator: random.Random = random.random.__self__  # type: ignore[attr-defined]
    begin = object.__basicsize__
    if sys.implementation.name != "cpython" or type(generator).__basicsize__ < begin + _WORDS:
        return 0
    *words, position = random.getstate()[1]
    found = array("I", ctypes.string_at(id(generator) + begin, _WORDS)).tolist()
    return id(generator) + begin if found == [position, *words] else 0


PYTHONS_ADDRESS = _pythons_address()
_numpy = _Twister(_numpys_address, lambda: np.random.get_state(legacy=False), lambda state: bool(state["has_gauss"]))
_python = _Twister(lambda: PYTHONS_ADDRESS, random.getstate, lambda state: state[2] is not None)


class RandomState:
    """Random numbers of torch, NumPy and Python, and others, as they are now.

    Those of torch are of the host and of every device in use, unless they are given: looking for them takes time.
    """

    def __init__(self, others: Iterable[Any] = (), *, of_torch: Iterable[torch.Generator] | None = None) -> None:
        self._others = [(generator, generator_state(generator)) for generator in others]
        of_torch = torch_generators() if of_torch is None else of_torch
        self._torch = [(generator, generator.get_state()) for generator in of_torch]
        self._numpy = _numpy.state()
        self._python = _python.state()

    def is_current(self) -> bool:
        """Return whether no random number was drawn since."""
        same = self._python == _python.state() and same_values(self._numpy, _numpy.state())
        return same and not have_moved((*self._torch, *self._others))

    def restore(self) -> None:
        """Set every generator back."""
        for generator, state in self._others:
            restore_generator(generator, state)
        for generator, state in self._torch:
            generator.set_state(state)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        _numpy.words = _python.words = b""  # others may have been set that differ in the second number alone
