"""Keep attributes of modules before an attempt, and restore them."""

import copy
from collections import deque
from collections.abc import Iterator
from functools import cache
from operator import is_, itemgetter
from types import NoneType
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from lightning_ga.snapshot.contents import refill
from lightning_ga.snapshot.copies import SmallCopies, is_small, is_writable
from lightning_ga.snapshot.random_numbers import GENERATORS, generator_state, have_moved, restore_generator

FEW = 64  # tensors of a list that are copied before every attempt
LOOKS = 8  # attempts before which all modules are looked at
_MODE = itemgetter("training")
# What Lightning and nn.Module keep of themselves: modes, tables, hooks, the ``forward`` that a strategy puts back.
_TABLES = {*vars(LightningModule()), "_hparams", "forward"}


class AttributeSnapshot:
    """Attributes of a module's parts that are no tables of tensors: modes, tensors, what steps gather, generators.

    A large tensor, or one with a graph, is most often an output of the step before: it is not kept
    alive. Nor is each element of a long list copied: what a step appends goes, and a change of an
    element in place is noticed. Numbers, and lists of them, are none of this: what counts attempts goes on counting.
    A number that becomes a tensor (``self.total = 0.0``, to which a step adds its loss) comes back.

    Modules that keep nothing of this kind are many. After the first attempts they are looked at where a window
    begins; what one of them has come to gather since then is noticed at a failure, not undone.
    """

    def __init__(self, module: Module) -> None:
        parts = [(path, part) for path, part in module.named_modules() if not isinstance(part, Metric)]
        self._states = [vars(part) for _, part in parts if "training" in vars(part)]
        # PyTorch's own layers keep nothing else, and they are many.
        own = [(path, part) for path, part in parts if not type(part).__module__.startswith("torch.nn.")]
        self._owners = [_Owner(path, vars(part)) for path, part in own]
        self._keeping: list[_Owner] = []  # those that are looked at before every attempt
        self._everywhere = True  # whether all were before the last one
        self._gathered: str | None = None  # what another module has come to gather, nobody knows when
        self._looks = LOOKS
        self._modes: list[bool] = []
        self._kept: list[tuple[dict[str, Any], str, Any]] = []
        self._plain: list[tuple[dict[str, Any], str, Any]] = []  # in the place of which tensors may be gathered
        self._copied: list[Tensor] = []
        self._copies = SmallCopies()
        self._watched: list[tuple[str, Tensor, int]] = []
        self._containers: list[tuple[Any, Any]] = []  # each with its content; a long list with its length
        self._tails: list[tuple[dict[str, Any], str, int, int]] = []  # of lists that are not kept alive
        self._generators: list[tuple[Any, Any]] = []
        self.take()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies."""
        return self._copies.tensors()

    def take(self, *, anew: bool = True) -> None:
        """Remember what there is, before an attempt; ``anew`` where a window begins."""
        self._modes = [*map(_MODE, self._states)]
        self._everywhere = anew or self._looks > 0
        if not self._everywhere and not self._keeping:
            return
        before = self._copied
        self._kept, self._copied, self._watched, self._generators = [], [], [], []
        self._containers, self._tails, self._plain = [], [], []
        self._look()
        if len(self._copied) != len(before) or not all(map(is_, self._copied, before)):
            self._copies = SmallCopies()  # the old ones go first
            self._copies = SmallCopies(self._copied)
        if self._copied:
            self._copies.take()

    def restore(self) -> None:
        """Give attributes their values back, and containers their contents."""
        for state, mode in zip(self._states, self._modes):
            state["training"] = mode
        unseen = [] if self._everywhere else [owner for owner in self._owners if not owner.keeps]
        self._gathered = next((owner.place(name) for owner in unseen for name in owner.names()), None)
        for owner in self._owners:
            for name in owner.new():
                del owner.attributes[name]
        for attributes, name, value in self._plain:
            if _is_gathered(attributes.get(name)):
                attributes[name] = value
        for attributes, name, value in self._kept:
            attributes[name] = value
        self._copies.restore()
        for container, content in self._containers:
            _refill(container, content)
        for attributes, name, key, length in self._tails:
            if id(attributes.get(name)) == key:
                del attributes[name][length:]
        for generator, state in self._generators:
            restore_generator(generator, state)

    def draws_numbers(self) -> bool:
        """Return whether a generator among them has drawn since."""
        return have_moved(self._generators)

    def lost(self) -> str | None:
        """Name a tensor that has changed in place and of which there is no copy."""
        if self._gathered is not None:
            return f"what its modules keep ({self._gathered})"
        changed = (place for place, tensor, version in self._watched if tensor._version != version)
        return next((f"a tensor in place that is no buffer ({place})" for place in changed), None)

    def _look(self) -> None:
        """Look at all modules, or at those that keep something."""
        for owner in self._owners if self._everywhere else self._keeping:
            for name in owner.names():
                self._take(owner, name, owner.attributes[name])
            self._plain += [(owner.attributes, name, owner.attributes[name]) for name in owner.plain]
        if self._everywhere:
            self._looks = max(0, self._looks - 1)
            self._keeping = [owner for owner in self._owners if owner.keeps]

    def _take(self, owner: "_Owner", name: str, value: Any) -> None:
        place = owner.place(name)
        if isinstance(value, Tensor):
            if _is_small_state(value):
                self._kept.append((owner.attributes, name, value))
                self._watch(place, value)
        elif isinstance(value, tuple):
            if not value or (_is_gathered(value) and _is_light(value)):
                self._kept.append((owner.attributes, name, value))
                for tensor in _tensors(value):
                    self._watch(place, tensor)
        elif isinstance(value, (list, deque, dict)):
            if _is_gathered(value) and _is_light(value):
                self._kept.append((owner.attributes, name, value))
                self._gather(place, value)
            elif _is_gathered(value) and isinstance(value, list):
                self._tails.append((owner.attributes, name, id(value), len(value)))
        else:
            self._generators.append((value, generator_state(value)))

    def _gather(self, place: str, container: Any) -> None:
        """Keep what a container of tensors or of containers holds, at any depth of dictionaries and short lists."""
        is_long = isinstance(container, list) and len(container) > FEW
        self._containers.append((container, len(container) if is_long else copy.copy(container)))
        if _holds_tensors(container):
            for tensor in _things(container):
                self._watch(place, tensor, copies=len(container) <= FEW)
            return
        for thing in _things(container) if len(container) <= FEW else ():
            if isinstance(thing, (list, deque, dict)) and _is_gathered(thing):
                self._gather(place, thing)

    def _watch(self, place: str, tensor: Tensor, *, copies: bool = True) -> None:
        if copies and not tensor.is_meta and is_writable(tensor):
            self._copied.append(tensor)
        else:
            self._watched.append((place, tensor, tensor._version))


class _Owner:
    """A part of a module with attributes of its own, searched again only when their names or types have changed."""

    def __init__(self, path: str, attributes: dict[str, Any]) -> None:
        self.path, self.attributes = path, attributes
        self._known: list[str] = []
        self._types: list[type] = []
        self._own: dict[str, type] | None = None  # without what Lightning and PyTorch keep
        self._names: list[str] = []
        self.plain: list[str] = []  # names of attributes that are no more than a number, or nothing yet
        self._has_changed = False

    @property
    def keeps(self) -> bool:
        """Whether it has attributes that are kept, or attributes of it come, go or change their types."""
        return bool(self._names) or self._has_changed

    def place(self, name: str) -> str:
        """Return the path of an attribute."""
        return f"{self.path}.{name}".lstrip(".")

    def names(self) -> list[str]:
        """Return the names of attributes that are kept."""
        known, types = [*self.attributes], [*map(type, self.attributes.values())]
        if known != self._known or types != self._types:
            self._known, self._types = known, types
            before, self._own = self._own, {name: kind for name, kind in zip(known, types) if name not in _TABLES}
            self._has_changed = self._has_changed or before not in (None, self._own)
            self._names = [name for name, kind in self._own.items() if _is_kept(kind) or self._is_state(name, kind)]
            self.plain = [name for name, kind in self._own.items() if kind in (NoneType, int, float)]
        return self._names

    def _is_state(self, name: str, kind: type) -> bool:
        """Return whether it is a tuple of tensors, as the state of an LSTM is, or an empty one."""
        return issubclass(kind, tuple) and (not (value := self.attributes[name]) or _is_gathered(value))

    def new(self) -> list[str]:
        """Return the names under which something was gathered and that did not exist."""
        new = self.attributes.keys() - set(self._known)
        return [name for name in new if _is_gathered(self.attributes[name])]


def _refill(container: Any, content: Any) -> None:
    """Give a container its content back, or a long list its length, unless it has come to hold numbers."""
    if not _is_gathered(container):
        return
    if isinstance(content, int):
        del container[content:]
    else:
        refill(container, content)


@cache
def _is_kept(kind: type) -> bool:
    return issubclass(kind, (Tensor, list, deque, dict, *GENERATORS))


def _things(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _holds_tensors(container: Any) -> bool:
    """Return whether it holds tensors and nothing else; so does an empty one."""
    return all(isinstance(thing, Tensor) for thing in _things(container))


def _is_gathered(value: Any) -> bool:
    """Return whether it is a tensor, a tuple of tensors, or a container of tensors, arrays, records of anything."""
    if isinstance(value, (list, deque, dict)):
        return all(isinstance(thing, (Tensor, np.ndarray, list, tuple, dict)) for thing in _things(value))
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(thing, (Tensor, tuple)) and _is_gathered(thing) for thing in value)
    return isinstance(value, Tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tuple, at any depth of tuples."""
    for thing in value:
        yield from (thing,) if isinstance(thing, Tensor) else _tensors(thing)


def _is_light(container: Any) -> bool:
    """Return whether it may be kept alive: no large tensor, none with a graph; long lists are not searched."""
    if isinstance(container, Tensor):
        return _is_small_state(container)
    if not isinstance(container, (list, deque, dict, tuple)):
        return True
    return all(map(_is_light, list(_things(container))[-FEW:]))


def _is_small_state(tensor: Tensor) -> bool:
    return is_small(tensor) and tensor.grad_fn is None and not tensor.is_inference()
