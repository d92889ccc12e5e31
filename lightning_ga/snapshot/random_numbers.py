"""Keep and restore generators of random numbers: torch's, NumPy's and Python's."""

import ctypes
import random
from collections.abc import Callable, Iterable
from functools import partial
from operator import eq
from types import NoneType
from typing import Any, NamedTuple

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
        self._torch = torch.get_rng_state()
        self._cuda: list[torch.Tensor] = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = [generator.get_state() for generator in torch.cuda.default_generators]
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


class _Memory(NamedTuple):
    """Some memory, a multiple of eight bytes."""

    address: int
    size: int
    owner: object  # keeps it from being freed


_END = 128


class _WatchedGenerator:
    """A global generator whose state is read only where its memory has changed.

    To read it takes up to a tenth of a millisecond, as each of 624 words becomes an object, or memory is allocated.

    Args:
        read: Returns the state.
        lies_in: Returns the memory that all of the state lies in, and whatever may put another in its place; nothing
            where that is not known.
        besides: Returns what else belongs to the state.
    """

    def __init__(
        self, read: Callable[[], Any], lies_in: Callable[[], tuple[_Memory, ...]], besides: Callable[[], Any] = NoneType
    ) -> None:
        self._read, self._lies_in, self._besides = read, lies_in, besides
        self._memory: tuple[_Memory, ...] = ()
        self._now: list[memoryview] = []
        self._before: list[memoryview] = []  # a copy
        self._beside: object = None
        self._state: Any = None

    def state(self) -> Any:
        """Return the state; it belongs to all that have asked for it."""
        if not self._now or self._besides() != self._beside or not all(map(eq, self._now, self._before)):
            self._memory, self._beside, self._state = self._lies_in(), self._besides(), self._read()
            self._now = [_view(address, size) for place in self._memory for address, size in _ends(*place[:2])]
            self._before = [memoryview(bytes(view)).cast("Q") for view in self._now]
        return self._state


def _ends(address: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the ends of some memory: a draw moves the position, at one of them, or renews all words."""
    return ((address, size),) if size <= 2 * _END else ((address, _END), (address + size - _END, _END))


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint64 * (size // 8)).from_address(address)).cast("B").cast("Q")


def _within(value: object) -> _Memory:
    """Return the memory of an object, but for its head, which counts references."""
    head = object.__basicsize__
    return _Memory(id(value) + head, (type(value).__basicsize__ - head) // 8 * 8, value)


def _lies_in_numpy(generator: Any, bits: object) -> tuple[_Memory, ...]:
    """NumPy's bits may come from another generator than the Mersenne Twister, whose state lies elsewhere."""
    return (_within(generator), _within(bits)) if type(bits) is np.random.MT19937 else ()


def _shows(memory: tuple[_Memory, ...], draw: Callable[[], object]) -> bool:
    """Return whether memory shows each of two draws, of which the second may be what is left of a pair."""
    seen = []
    for _ in range(3):
        seen.append([ctypes.string_at(*end) for place in memory for end in _ends(*place[:2])])
        draw()
    return seen[0] != seen[1] != seen[2]


def _can_be_watched() -> tuple[bool, bool]:
    """Return whether the memory of new generators shows their draws: NumPy's and Python's."""
    of_numpy, of_python = np.random.RandomState(0), random.Random(0)
    bits = of_numpy._bit_generator
    return (
        _shows(_lies_in_numpy(of_numpy, bits), of_numpy.randn),
        _shows((_within(of_python),), of_python.random),
    )


_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_NUMPY: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
_WATCHES = _can_be_watched()
_PYTHONS_MEMORY = (_within(_PYTHON),) if _WATCHES[1] else ()
_numpy = _WatchedGenerator(
    np.random.get_state,
    lambda: _lies_in_numpy(_NUMPY, np.random.get_bit_generator()) if _WATCHES[0] else (),  # type: ignore[attr-defined]
)
_python = _WatchedGenerator(random.getstate, lambda: _PYTHONS_MEMORY, partial(getattr, _PYTHON, "gauss_next"))
