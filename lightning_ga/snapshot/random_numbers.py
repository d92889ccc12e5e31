"""Keep and restore generators of random numbers: torch's, NumPy's and Python's."""

import ctypes
import random
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

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


def generators_of(module: torch.nn.Module) -> list[Any]:
    """Return the generators that a module or one of its parts holds."""
    return [value for part in module.modules() for value in vars(part).values() if is_generator(value)]


def reseed(seed: int, generators: Iterable[Any] = ()) -> None:
    """Seed the global generators, and these."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    for generator in generators:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed)


class RandomState:
    """Random numbers of torch (the host and every device in use), NumPy and Python, as they are now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
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
    """A global Mersenne Twister, whose state is read in full only where its memory shows that it has drawn.

    Reading in full takes up to a tenth of a millisecond, as each of 624 words becomes an object. Each
    draw moves the position; where that has gone round, all words have changed.

    Args:
        read: Returns the full state.
        memory: Returns the position and some words.
        expected: Returns what this should be in a full state, to compare it with.
        spare: Returns whether the second value of a pair of normal ones is kept for the next call.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        memory: Callable[[], bytes],
        expected: Callable[[Any], tuple[int, ...]],
        spare: Callable[[Any], bool],
    ) -> None:
        self._read, self._memory, self._spare = read, memory, spare
        self._state = read()
        self._known = _can_be_read(memory, expected(self._state))
        self._seen = b""

    def state(self) -> Any:
        """Return the full state."""
        seen = self._memory() if self._known else b""
        if not seen or seen != self._seen or self._spare(self._state):  # a spare value leaves no trace in memory
            self._state, self._seen = self._read(), seen
        return self._state


def _can_be_read(memory: Callable[[], bytes], expected: tuple[int, ...]) -> bool:
    """Return whether the memory is laid out as expected."""
    try:
        return struct.unpack(f"{_SOME + 1}I", memory()) == expected
    except Exception:
        return False


def _memory_of_python() -> bytes:
    """Return the position and the first words (``Modules/_randommodule.c`` of CPython 3.11 to 3.13)."""
    return ctypes.string_at(_PYTHON + object.__basicsize__, 4 * (_SOME + 1))


def _memory_of_numpy() -> bytes:
    """Return the last words and the position (``numpy/random/src/mt19937/mt19937.h`` of NumPy 1.26 and 2)."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return ctypes.string_at(generator.ctypes.state_address + 4 * (_WORDS - _SOME), 4 * (_SOME + 1))


_WORDS, _SOME = 624, 16
_PYTHON = id(random.random.__self__)  # type: ignore[attr-defined]
_python = _GlobalGenerator(
    random.getstate,
    _memory_of_python,
    expected=lambda state: (state[1][-1], *state[1][:_SOME]),
    spare=lambda state: state[2] is not None,
)
_numpy = _GlobalGenerator(
    np.random.get_state,
    _memory_of_numpy,
    expected=lambda state: (*state[1][-_SOME:].tolist(), state[2]),
    spare=lambda state: bool(state[3]),
)
