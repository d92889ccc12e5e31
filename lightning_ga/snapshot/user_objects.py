"""Use objects of the user outside of training, and leave them and all random numbers as they were.

Datasets, samplers and collate functions may hold anything; state that they keep elsewhere, or share with other
processes, is not put back.

Tested in tests/loading/test_known_samples.py.
"""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO, IOBase, StringIO
from logging import Logger
from operator import attrgetter
from tarfile import TarFile
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch.utils.data import Dataset

from lightning_ga.batch.pytree import same_values
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.snapshot.copies import by_id, copies_of, everything_in, is_writable, put_back
from lightning_ga.snapshot.random_numbers import RandomState, generators_in, held_by, reseed

_COPIED = 200_000  # entries of all containers that are put back: longer ones are data
_LISTED = 500  # entries of a container that is searched: longer ones are data
_MOST = 2048  # things that are looked at
_ARRAYS = 2**22  # bytes of all arrays that are put back
_CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict, Counter)
_EMPTY = CellType()
_QUEUES = ("get", "put", "empty")  # methods of those between threads or processes
# Archives are read by name. Modules have snapshots of their own.
_CLOSED = (torch.nn.Module, torch.Tensor, np.ndarray, ModuleType, type, Trainer, Logger, ZipFile, TarFile)


def reached_from(*things: Any) -> list[Any]:
    """Return things and what they hold: attributes, entries of short containers, what functions are bound to.

    The nearest come first, each once. Things that hold many others are not searched in full.
    """
    own = [getattr(thing, "__dict__", None) for thing in things]  # opened whatever they are
    return list(everything_in([*things, *own], _opened, longest=_LISTED, most=_MOST))


def _opened(thing: Any) -> Iterable[Any]:
    """Return what a function is bound to, or the dictionary of an object's attributes."""
    if isinstance(thing, partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, MethodType) and isinstance(thing.__func__, FunctionType):
        return (thing.__self__,)
    if isinstance(thing, FunctionType):
        return [cell.cell_contents for cell in thing.__closure__ or () if cell != _EMPTY]
    own = getattr(thing, "__dict__", None)
    is_open = isinstance(own, dict) and "trainer" not in own and not isinstance(thing, _CLOSED)
    return (own,) if is_open else ()


def moved_by_reading(data: object, *, in_workers: bool) -> list[Any]:
    """Return what data hold that reading moves on and nothing puts back: iterators, files and queues."""
    _, *held = reached_from(data)
    moved = [each for each in held if isinstance(each, Iterator) or all(hasattr(type(each), name) for name in _QUEUES)]
    if in_workers:  # these read on in the same files
        return moved
    return [each for each in moved if not _is_kept_file(each)]


def is_written_file(thing: Any) -> bool:
    """Return whether a thing is an open file that may be written to."""
    return isinstance(thing, IOBase) and not thing.closed and thing.writable()


@contextmanager
def untouched(*owners: object, seed: int = 0) -> Iterator[None]:
    """Return a context in which samples may be read or collated, their random numbers drawn from a seed.

    Attributes, small containers, small arrays and positions in files of these objects, and of what they hold, are put
    back at its end.
    """
    with put_back_after(*owners) as reached, seeded(seed, *reached):
        yield


@contextmanager
def borrowed(thing: Any, *shared: Any) -> Iterator[Any]:
    """Yield a deep copy that shares datasets and modules; if copying fails, ``thing`` itself.

    At the end ``thing`` and ``shared`` are put back; the copy is dropped.
    """
    memo = by_id(shared)
    for value in getattr(thing, "__dict__", {}).values():
        if isinstance(value, (Dataset, torch.nn.Module)) or hasattr(value, "trainer"):
            memo[id(value)] = value
    try:
        lent = copy.deepcopy(thing, memo)
    except Exception:  # it may contain anything: open files, generators
        lent = thing
    with put_back_after(thing, *shared):
        yield lent


@contextmanager
def put_back_after(*owners: object) -> Iterator[list[Any]]:
    """Yield what these objects hold, and leave it as it was; see ``untouched``."""
    things = reached_from(*owners)
    containers = _small((thing for thing in things if type(thing) in _CONTAINERS), len, _COPIED)
    with uncounted():  # they lie on the host
        states = copies_of([*containers, *generators_in(things), *filter(_is_kept_file, things)])
        arrays = copies_of(_small(filter(_is_kept_array, things), attrgetter("nbytes"), _ARRAYS))
    try:
        yield things
    finally:
        put_back(states)
        for array, kept in arrays:
            if not same_values(array, kept):  # memory may be read-only
                put_back([(array, kept)])


def _small(things: Iterable[Any], size_of: Callable[[Any], int], most: int) -> Iterator[Any]:
    """Yield the first of the things that are small together."""
    for each in things:
        if size_of(each) <= most:
            most -= size_of(each)
            yield each


def _is_kept_array(thing: Any) -> bool:
    if type(thing) is torch.Tensor:
        return thing.device.type == "cpu" and is_writable(thing) and not thing.is_shared()  # type: ignore[no-untyped-call]
    return isinstance(thing, np.ndarray) and thing.flags.writeable and not thing.dtype.hasobject


def _is_kept_file(thing: Any) -> bool:
    """Return whether a thing is a file that can be read again from where it is."""
    if not isinstance(thing, IOBase) or thing.closed:
        return False
    if thing.writable() and not isinstance(thing, (BytesIO, StringIO)):
        return False  # what was written would not be taken back
    try:
        thing.tell()
    except OSError:  # it is read line by line, by ``next``
        return False
    return thing.seekable()


@contextmanager
def seeded(seed: int, *holders: object) -> Iterator[None]:
    """Return a context in which random numbers depend on the seed alone; afterwards every generator is as it was.

    The global generators are seeded with it, and so are generators among ``holders`` and their attributes.
    """
    own = generators_in([*holders, *held_by(holders)])
    before = RandomState(own)
    try:
        reseed(seed, own)
        yield
    finally:
        before.restore()
