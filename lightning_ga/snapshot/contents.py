"""Containers and the objects that hold them, refilled in place or searched through; iterators, which are lent."""

import copy
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_ga.snapshot.random_numbers import GENERATORS

_CONTAINERS = (dict, list, set, deque)
_LONGEST = 1000  # longer containers hold data: they are not searched
_COPIED = 100_000  # entries of a container that is put back: longer ones, as of a dataset, would take long
_OPAQUE = (torch.Tensor, np.ndarray, str, bytes, int, float, type, ModuleType)


class Contents:
    """Dictionaries, lists, sets and queues, refilled in place; what lies in them is left as it is."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._kept = [(thing, copy.copy(thing)) for thing in things if isinstance(thing, _CONTAINERS)]

    def restore(self) -> None:
        """Put everything back."""
        for container, content in self._kept:
            refill(container, content)


def refill(container: Any, content: Any) -> None:
    """Put content back into the container that it was copied from."""
    if isinstance(container, dict) and list(container) == list(content):
        dict.update(container, content)  # never empty: the trainer may read it meanwhile; a Counter's own would add
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(content)


class ObjectState(Contents):
    """Attributes of objects, and containers in them: counters, caches, settings."""

    def __init__(self, objects: Iterable[Any]) -> None:
        seen: set[int] = set()
        attributes = [vars(owner) for owner in objects]
        found = (thing for kept in attributes for thing in contained(kept, seen, longest=_LONGEST))
        super().__init__(each for each in found if not isinstance(each, _CONTAINERS) or len(each) <= _COPIED)


def contained(value: Any, seen: set[int], longest: int = sys.maxsize) -> Iterator[Any]:
    """Yield containers, tensors and generators of random numbers, each once; not what those above ``longest`` hold."""
    value = vars(value) if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)) else value
    if id(value) in seen or isinstance(value, torch.nn.Parameter):
        return
    seen.add(id(value))
    if isinstance(value, (torch.Tensor, *_CONTAINERS, *GENERATORS)):
        yield value
    if isinstance(value, (dict, list, tuple, deque)) and len(value) <= longest:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from contained(inner, seen, longest)


def reachable(value: Any, most: int = 10_000) -> Iterator[Any]:
    """Yield an object and those with attributes that it holds, at any depth; of large data only ``most`` values.

    Not the Trainer, which a datamodule holds, and a dataset by a method of one: it holds all else.
    """
    pending, seen = deque([value]), set[int]()
    while pending and len(seen) < most:
        value = pending.popleft()
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, tuple, set, deque)):
            inner = value.values() if isinstance(value, dict) else value
            pending.extend(inner if len(value) <= _LONGEST else ())
        elif isinstance(getattr(value, "__dict__", None), dict) and not _is_trainer(value):
            yield value
            pending.extend(vars(value).values())


def _is_trainer(value: Any) -> bool:
    """Return whether an object is a Trainer, of either namespace of Lightning or derived from one."""
    return any(
        each.__name__ == "Trainer" and each.__module__.endswith("trainer.trainer") for each in type(value).__mro__
    )


class LentIterator:
    """An iterator, which cannot be copied: items are kept once they are read, and each loan begins with these."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source, self.read = source, list[Any]()

    def loan(self) -> Iterator[Any]:
        """Yield what the source does from where it was when it was lent."""
        for position in count():
            if position == len(self.read):
                self.read.extend(islice(self.source, 1))
            if position == len(self.read):
                return
            yield self.read[position]


def lent(value: Any) -> Any:
    """Return an iterator as one that can be lent; any other value, and an object of another class, as it is."""
    is_plain = hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools")
    return LentIterator(value) if is_plain or is_of_loader(value) else value


def is_of_loader(value: Any) -> bool:
    """Return whether a DataLoader has made an iterator (``torch/utils/data/dataloader.py``, read in 2.15)."""
    return isinstance(value, _BaseDataLoaderIter)


def given_back(value: Any) -> Any:
    """Return a lent iterator, with what was read of it before all else; any other value as it is."""
    if not isinstance(value, LentIterator):
        return value
    return chain(value.read.copy(), value.source) if value.read else value.source
