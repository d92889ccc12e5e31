"""Keep and restore generators of random numbers: torch's, NumPy's and Python's."""

import ctypes
import random
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from lightning_ga.batch.pytree import same_values

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def is_generator(value: object) -> bool:
    """Return whether a value is a generator of random numbers, of torch, NumPy or Python."""
    return isinstance(value, GENERATORS)


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
    return [value for part in module.modules() for value in vars(part).values() if is_generator(value)]


def reseed(seed: int, generators: Iterable[Any] = ()) -> None:
    """Seed the global generators, those of devices in use included, and these."""
    _reseed_torch(seed)
    np.random.seed(seed)
    random.seed(seed)
    for generator in generators:
        seed_generator(generator, seed)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed one generator, of torch, NumPy or Python, with any whole number that is not negative."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed % 2**63)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)


def _reseed_torch(seed: int) -> None:
    """Seed as ``torch.manual_seed`` does, which leaves a seed behind for devices that are used only later."""
    torch.default_generator.manual_seed(seed)
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():
            device.manual_seed_all(seed)
    torch.mps.manual_seed(seed)


class RandomState:
    """Random numbers of torch (the host and every device in use), NumPy and Python, as they are now."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        self._cuda = [generator.get_state() for generator in cuda]
        self._numpy = _numpy.state()
        self._python = _python.state()

    def is_current(self) -> bool:
        """Return whether no random number was drawn since."""
        now = RandomState()
        same = torch.equal(self._torch, now._torch) and self._python == now._python
        same &= all(torch.equal(before, after) for before, after in zip(self._cuda, now._cuda))
        return same and all(np.array_equal(before, after) for before, after in zip(self._numpy, now._numpy))

    def restore(self) -> None:
        """Set every generator back."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


class _GlobalGenerator:
    """A global Mersenne Twister, whose state is read in full only where its memory shows another one.

    Reading in full takes up to a tenth of a millisecond, as each of 624 words becomes an object. Each
    draw moves the position; where that has gone round, all words have changed.

    Args:
        read: Returns the full state.
        look: Returns the position, some words, and the second value of a pair of normal ones, if one is kept.
        expected: Returns what this should be in a full state, to compare it with.
    """

    def __init__(self, read: Callable[[], Any], look: Callable[[], Any], expected: Callable[[Any], Any]) -> None:
        self._read, self._look = read, look
        self._state, self._seen = read(), None
        self._known = _is_as_expected(look, expected(self._state))

    def state(self) -> Any:
        """Return the full state."""
        if not self._known:
            return self._read()
        seen = self._look()
        if seen != self._seen:
            self._state, self._seen = self._read(), seen
        return self._state


def _is_as_expected(look: Callable[[], Any], expected: Any) -> bool:
    """Return whether the memory is laid out as it is here."""
    try:
        return bool(look() == expected)
    except Exception:
        return False


_WORDS, _SOME = 624, 16
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_NUMPY: Any = np.random.get_state.__self__  # type: ignore[attr-defined]


def _look_at_python() -> tuple[bytes, float | None]:
    """Look at position and first words (``Modules/_randommodule.c`` of CPython 3.11 to 3.13)."""
    return _PYTHON_WORDS.raw, _PYTHON.gauss_next


def _view(address: int, size: int) -> Any:
    """Return memory as it is whenever it is read."""
    return (ctypes.c_char * size).from_address(address)


def _place_of_gauss() -> int:
    """Find where NumPy's ``RandomState`` keeps the second value of a pair, which is 0 once that has been drawn."""
    generator = np.random.RandomState(0)
    generator.randn()
    state: Any = generator.get_state()
    kept = struct.pack("d", state[4])
    place = ctypes.string_at(id(generator), np.random.RandomState.__basicsize__).find(kept)
    generator.randn()
    return place if place > 0 and ctypes.string_at(id(generator) + place, 8) == bytes(8) else 0


class _NumpyMemory:
    """The memory of NumPy's generator (``numpy/random/src/mt19937/mt19937.h`` of NumPy 1.26 and 2)."""

    def __init__(self) -> None:
        self._generator: object = None
        self._words: Any = None
        self._gauss = _view(id(_NUMPY) + _place_of_gauss(), 8)

    def look(self) -> object:
        """Look at last words and position."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._generator:
            if type(generator) is not np.random.MT19937:  # by ``set_bit_generator``: another layout, as none seen
                return object()
            self._generator = generator
            self._words = _view(generator.ctypes.state_address + 4 * (_WORDS - _SOME), 4 * (_SOME + 1))
        return self._words.raw, self._gauss.raw


_PYTHON_WORDS: Any = _view(id(_PYTHON) + object.__basicsize__, 4 * (_SOME + 1))
_python = _GlobalGenerator(
    random.getstate,
    _look_at_python,
    lambda state: (struct.pack(f"{_SOME + 1}I", state[1][-1], *state[1][:_SOME]), state[2]),
)
_numpy = _GlobalGenerator(
    np.random.get_state,
    _NumpyMemory().look,
    lambda state: (struct.pack(f"{_SOME + 1}I", *state[1][-_SOME:], state[2]), struct.pack("d", state[4])),
)
