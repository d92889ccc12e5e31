"""Keep and restore generators of random numbers: torch's, NumPy's and Python's."""

import ctypes
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from lightning_ga.batch.pytree import same_values
from lightning_ga.memory.vendors import vendors_in_use

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
    for generator in (*_torch_generators(), *generators):
        seed_generator(generator, seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _torch_generators() -> list[torch.Generator]:
    """Return the default generators of the host and of every device in use."""
    return [torch.default_generator, *(each for vendor in vendors_in_use() for each in vendor.generators())]


class _NumpyNumbers:
    """Reads the state of NumPy's global generator, in 33 µs, only if its words have changed, which takes 2.

    The words of the Mersenne Twister lie where ``BitGenerator.ctypes`` says. Each draw changes them, but that of
    the second of two normal numbers: while that one is kept, the state is always read.
    """

    def __init__(self) -> None:
        self._words, self._state = b"", dict[str, Any]()

    def state(self) -> dict[str, Any]:
        """Return the state; it is not to be changed."""
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        is_known = type(bits) is np.random.MT19937
        words = ctypes.string_at(bits.ctypes.state_address, _WORDS) if is_known else b""
        if not words or words != self._words or self._state["has_gauss"]:
            self._words, self._state = words, np.random.get_state(legacy=False)
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Set the generator back; that may bring the second number of a pair back, and no other word."""
        np.random.set_state(state)
        self._words = b""


_WORDS = 4 * 625  # bytes: 624 words and the position among them
_numpy = _NumpyNumbers()


class RandomState:
    """Random numbers of torch (the host and every device in use), NumPy and Python, as they are now."""

    def __init__(self) -> None:
        self._torch = [(generator, generator.get_state()) for generator in _torch_generators()]
        self._numpy = _numpy.state()
        self._python = random.getstate()

    def is_current(self) -> bool:
        """Return whether no random number was drawn since."""
        same = self._python == random.getstate() and same_values(self._numpy, _numpy.state())
        return same and not have_moved(self._torch)

    def restore(self) -> None:
        """Set every generator back."""
        for generator, state in self._torch:
            generator.set_state(state)
        _numpy.restore(self._numpy)
        random.setstate(self._python)
