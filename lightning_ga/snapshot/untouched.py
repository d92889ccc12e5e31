"""Use objects of the user outside of training, and leave them and all random numbers as they were.

Datasets, samplers and collate functions may hold anything; state that they keep elsewhere is not put back.

Tested in tests/loading/test_known_samples.py.
"""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_ga.snapshot.copies import by_id, copies_of, put_back
from lightning_ga.snapshot.random_numbers import RandomState, generators_in, held_by, reseed, seed_generator

_COPIED = 100_000  # entries of a container that is put back: longer ones are data
_LISTED = 500  # entries of a list that may contain datasets


def datasets_in(data: Any) -> list[Any]:
    """Return a dataset and those that it contains, alone or in a list, at any depth."""
    found = dict[int, Any]()
    pending = [data]
    while pending:
        each = pending.pop()
        if id(each) in found or not isinstance(getattr(each, "__dict__", None), dict):
            continue
        found[id(each)] = each
        for value in vars(each).values():
            is_list = isinstance(value, (list, tuple)) and len(value) < _LISTED
            pending += filter(_is_dataset, value if is_list else [value])
    return list(found.values())


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset)


@contextmanager
def untouched(data: object, *, seed: int = 0) -> Iterator[None]:
    """Return a context in which samples may be read or collated, their random numbers drawn from a seed.

    Attributes and small containers of the object, and of datasets that it contains, are put back at its end.
    """
    found = datasets_in(data)
    containers: list[Any] = list(map(vars, found))
    for value in held_by(found):
        if type(value) in (dict, list, set, deque) and len(value) < _COPIED:
            containers.append(value)
    before = copies_of(containers)
    try:
        with seeded(seed, *found):
            yield
    finally:
        put_back(before)


@contextmanager
def borrowed(thing: Any, *shared: Any) -> Iterator[Any]:
    """Yield a deep copy that shares datasets and modules; if copying fails, ``thing``, restored afterwards."""
    own = getattr(thing, "__dict__", {})
    memo = by_id(shared)
    for value in own.values():
        if isinstance(value, (Dataset, torch.nn.Module)) or hasattr(value, "trainer"):
            memo[id(value)] = value
    try:
        lent = copy.deepcopy(thing, memo)
    except Exception:  # it may contain anything: open files, generators
        lent = thing
    before = copies_of([own])
    try:
        yield lent
    finally:
        put_back(before)


@contextmanager
def seeded(seed: int, *holders: object, epoch: int = 0) -> Iterator[None]:
    """Return a context in which random numbers depend on the seed alone; afterwards every generator is as it was.

    This includes generators that are attributes of ``holders``; torch's are seeded with their initial seed + epoch.
    """
    own = generators_in(held_by(holders))
    before = RandomState(own)
    try:
        for generator in own:
            own_seed = generator.initial_seed() + epoch if isinstance(generator, torch.Generator) else seed
            seed_generator(generator, own_seed)
        reseed(seed)
        yield
    finally:
        before.restore()
