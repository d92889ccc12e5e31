"""Keep and restore generators of random numbers: torch's, NumPy's and Python's."""

import random
from collections.abc import Iterable
from types import MethodType
from typing import Any, cast

import numpy as np
import torch

from lightning_ga.batch.pytree import same_values
from lightning_ga.memory.vendors import vendors_in_use

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def restore_generator(generator: Any, state: Any) -> None:
    """Restore the state of a generator."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def generators_of(module: torch.nn.Module) -> list[Any]:
    """Return the generators that a module or one of its parts has."""
    values = (value for part in module.modules() for value in vars(part).values())
    # ``isinstance`` of ``torch.Generator`` is slow.
    foreign = (value for value in values if type(value).__module__ not in ("builtins", "collections"))
    return [value for value in foreign if isinstance(value, GENERATORS)]


def torch_generators() -> list[torch.Generator]:
    """Return the default generators of the host and of every device in use."""
    return [torch.default_generator, *(each for vendor in vendors_in_use() for each in vendor.generators())]


def global_generators() -> list[Any]:
    """Return the default generators of torch, on the host and on every device in use, of NumPy and of Python."""
    methods = (np.random.get_state, random.getstate)  # of the generators that these modules keep
    return [*torch_generators(), *(cast(MethodType, method).__self__ for method in methods)]


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


class RandomState:
    """Random numbers of torch, on the host and on every device in use, of NumPy and Python, and others, as of now."""

    def __init__(self, others: Iterable[Any] = ()) -> None:
        generators = (*others, *torch_generators())
        self._states = [(generator, generator_state(generator)) for generator in generators]
        self._numpy = np.random.get_state(legacy=False)
        self._python = random.getstate()

    def is_current(self) -> bool:
        """Return whether no random number was drawn since."""
        pairs = [(state, generator_state(generator)) for generator, state in self._states]
        pairs += [(self._numpy, np.random.get_state(legacy=False)), (self._python, random.getstate())]
        return all(same_values(before, now) for before, now in pairs)

    def restore(self) -> None:
        """Set every generator back."""
        for generator, state in self._states:
            restore_generator(generator, state)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
