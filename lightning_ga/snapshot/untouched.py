"""Use objects of the user outside of training, and leave them and all random numbers as they were.

Datasets, samplers and collate functions may hold anything; state that they keep elsewhere is not put back.

Tested in tests/loading/test_known_samples.py.
"""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_ga.snapshot import random_numbers
from lightning_ga.snapshot.copies import refill

_COPIED = 100_000  # entries of a container that is put back: longer ones are data
_LISTED = 500  # entries of a list that may contain datasets


def datasets_in(data: Any) -> list[Any]:
    """Return a dataset and those that it contains, alone or in a list, at any depth."""
    found = dict[int, Any]()
    pending = [data]
    while pending:
        each = pending.pop()
        if id(each) not in found and isinstance(getattr(each, "__dict__", None), dict):
            found[id(each)] = each
            held = vars(each).values()
            lists = (value for value in held if isinstance(value, (list, tuple)) and len(value) < _LISTED)
            pending += [value for value in chain(held, *lists) if isinstance(value, Dataset)]
    return list(found.values())


def values_held_by(data: Any) -> list[Any]:
    """Return the attributes of a dataset, and of those that it contains."""
    return list(chain.from_iterable(vars(each).values() for each in datasets_in(data)))


@contextmanager
def untouched(data: object, *, seed: int = 0) -> Iterator[None]:
    """Return a context in which samples may be read or collated, their random numbers drawn from a seed.

    Attributes and small containers of the object, and of datasets that it contains, are put back at its end.
    """
    found = datasets_in(data)
    before = [(own, copy.copy(own)) for own in map(vars, found)]
    for value in values_held_by(data):
        if type(value) in (dict, list, set, deque) and len(value) < _COPIED:
            before.append((value, copy.copy(value)))
    try:
        with seeded(seed, *found):
            yield
    finally:
        for container, content in before:
            refill(container, content)


@contextmanager
def borrowed(thing: Any, *shared: Any) -> Iterator[Any]:
    """Yield a deep copy that shares datasets and modules; if copying fails, ``thing``, restored afterwards."""
    own = getattr(thing, "__dict__", {})
    held = [each for each in own.values() if isinstance(each, (Dataset, torch.nn.Module)) or hasattr(each, "trainer")]
    try:
        lent = copy.deepcopy(thing, {id(each): each for each in (*held, *shared)})
    except Exception:  # it may contain anything: open files, generators
        lent = thing
    before = dict(own)
    try:
        yield lent
    finally:
        if lent is thing:
            own.clear()
            own.update(before)


@contextmanager
def seeded(seed: int, *holders: object, epoch: int = 0) -> Iterator[None]:
    """Return a context in which random numbers depend on the seed alone; afterwards every generator is as it was.

    This includes generators that are attributes of ``holders``; torch's are seeded with their initial seed + epoch.
    """
    held = {id(value): value for holder in holders for value in getattr(holder, "__dict__", {}).values()}
    own: list[Any] = [generator for generator in held.values() if isinstance(generator, random_numbers.GENERATORS)]
    before = random_numbers.RandomState(own)
    try:
        for generator in own:
            is_torch = isinstance(generator, torch.Generator)
            random_numbers.seed_generator(generator, generator.initial_seed() + epoch if is_torch else seed)
        random_numbers.reseed(seed)
        yield
    finally:
        before.restore()
