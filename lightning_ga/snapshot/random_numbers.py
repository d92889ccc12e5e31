"""Keep and restore generators of random numbers: torch's, NumPy's and Python's."""

import pickle
import random
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any
from zlib import crc32

import numpy as np
import torch

from lightning_ga.batch.pytree import same_values
from lightning_ga.memory.vendors import vendors_in_use

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, (random.Random, np.random.RandomState)):
        return generator.__getstate__()  # NumPy's ``get_state`` warns of any bit generator but MT19937
    return generator.get_state()


def seed_of(generator: Any) -> int:
    """Return a number that tells how a generator was seeded: of NumPy and Python, as long as nothing was drawn."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    return crc32(pickle.dumps(generator_state(generator)))


def restore_generator(generator: Any, state: Any) -> None:
    """Restore the state of a generator."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def held_by(objects: Iterable[object]) -> list[Any]:
    """Return the values of the attributes of objects."""
    return [value for each in objects for value in getattr(each, "__dict__", {}).values()]


def generators_in(values: Iterable[Any]) -> list[Any]:
    """Return those values that are generators."""
    return list(filter(_is_generator, values))


def _is_generator(value: Any) -> bool:
    # ``isinstance`` of ``torch.Generator`` is slow.
    if type(value).__module__ in ("builtins", "collections") or isinstance(value, random.SystemRandom):  # has no state
        return False
    return isinstance(value, GENERATORS)


def own_generators(thing: object) -> list[Any]:
    """Return the generators among the attributes of an object."""
    return generators_in(held_by([thing]))


def generators_of(module: torch.nn.Module) -> list[Any]:
    """Return the generators that a module or one of its parts has."""
    return generators_in(held_by(module.modules()))


def global_generators() -> list[Any]:
    """Return the default generators of torch, on the host and on every device in use, of NumPy and of Python."""
    of_devices = chain.from_iterable(vendor.generators() for vendor in vendors_in_use())
    methods: Any = (np.random.get_state, random.getstate)  # of the generators that these modules keep
    return [torch.default_generator, *of_devices, *map(attrgetter("__self__"), methods)]


def seed_generator(generator: Any, seed: int) -> None:
    """Seed one generator, of torch, NumPy or Python, with any whole number that is not negative."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed % 2**63)
    elif isinstance(generator, (np.random.Generator, np.random.RandomState)):
        # ``RandomState.seed`` takes MT19937 alone.
        restore_generator(generator, type(generator._bit_generator)(seed).state)  # type: ignore[union-attr]
    else:
        generator.seed(seed % 2**32)


def reseed(seed: int, generators: Iterable[Any] = ()) -> None:
    """Seed the global generators, those of devices in use included, and these.

    Unlike ``torch.manual_seed``, leave no seed behind for a device that is used only later.
    """
    for generator in (*global_generators(), *generators):
        seed_generator(generator, seed)


class RandomState:
    """Random numbers of torch, on the host and on every device in use, of NumPy and Python, and others, as of now."""

    def __init__(self, others: Iterable[Any] = ()) -> None:
        self._generators = [*others, *global_generators()]
        self._states = list(map(generator_state, self._generators))

    def is_current(self) -> bool:
        """Return whether no random number was drawn since."""
        return all(map(same_values, self._states, map(generator_state, self._generators)))

    def restore(self) -> None:
        """Set every generator back."""
        for generator, state in zip(self._generators, self._states):
            restore_generator(generator, state)
