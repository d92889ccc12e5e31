"""Keep attributes of modules before an attempt, and restore them."""

import copy
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from lightning_ga.snapshot.contents import refill
from lightning_ga.snapshot.copies import SMALL, SmallCopies, is_small, is_writable
from lightning_ga.snapshot.metrics import is_metric
from lightning_ga.snapshot.owners import CONTAINERS, FEW, NUMBERS, MetricOwner, Owner, is_gathered, owners_of, things
from lightning_ga.snapshot.random_numbers import GENERATORS, generator_state, have_moved, restore_generator

LOOKS = 8  # attempts before which all modules are looked at
_MODE = itemgetter("training")


class AttributeSnapshot:
    """Attributes of a module's parts that are no tables of tensors: modes, tensors, what steps gather, generators.

    A large tensor, or one with a graph, is most often an output of the step before: it is not kept
    alive. Nor is each element of a long list copied: what a step appends goes, and a change of an
    element in place is noticed. Numbers of the LightningModule itself and of objects, and lists of numbers, are none of
    this: what counts attempts goes on counting, and ``left`` names it. A number that becomes a tensor (``self.total =
    0.0``, to which a step adds its loss) comes back, and what is known of tensors that go (the length of a table that
    a layer fills) goes with them. So do attributes of objects of the user's own that the parts hold.
    Of metrics everything is put back, numbers too, as each batch counts in them once.

    Modules that keep nothing of this kind are many. After the first attempts they are looked at where a window
    begins; what one of them has come to gather since then is noticed at a failure, not undone.
    """

    def __init__(self, module: Module) -> None:
        modules = [*module.named_modules()]
        self._metrics = [MetricOwner(path, vars(part)) for path, part in modules if is_metric(part)]
        parts = [(path, part) for path, part in modules if not is_metric(part)]
        self._states = [vars(part) for _, part in parts if "training" in vars(part)]
        self._owners = owners_of(parts, module)
        self._keeping: list[Owner] = []  # those that are looked at before every attempt
        self._everywhere = True  # whether all were before the last one
        self._gathered: str | None = None  # what another module has come to gather, nobody knows when
        self._looks = LOOKS
        self._modes: list[bool] = []
        self._kept: list[tuple[dict[str, Any], str, Any]] = []
        self._plain: list[tuple[Owner, dict[str, Any]]] = []  # numbers, in the place of which tensors may be gathered
        self._numbers: list[tuple[Owner, str, Any]] = []  # containers of numbers, each with an outline of its content
        self._large: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self.left: list[str] = []  # names of what a failed attempt has changed and that was not put back
        self._copied: list[Tensor] = []
        self._copies = SmallCopies()
        self._watched: list[tuple[str, Tensor, int]] = []
        self._containers: list[tuple[Any, Any]] = []  # each with its content; a long list with its length
        self._whole: list[tuple[Any, Any]] = []  # what metrics hold, with all that it contains
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
        if self._everywhere or self._keeping or self._metrics:
            self._take_anew()
        # Of all: hooks may have changed them since the window began, and do not run again where a pass does.
        self._plain = [(owner, owner.numbers()) for owner in self._owners if owner.plain]

    def _take_anew(self) -> None:
        """Keep what is put back, but for numbers."""
        before = self._copied
        self._kept, self._copied, self._watched, self._generators = [], [], [], []
        self._containers, self._tails, self._whole = [], [], []
        self._numbers, self._large, self._arrays = [], [], []
        self._look()
        if len(self._copied) != len(before) or not all(map(is_, self._copied, before)):
            self._copies = SmallCopies()  # the old ones go first
            self._copies = SmallCopies(self._copied)
        if self._copied:
            self._copies.take()

    def restore(self, put_back: Collection[int] = ()) -> None:
        """Give attributes their values back, and containers their contents.

        Args:
            put_back: Ids of the tables of buffers that were others: what their modules know of them (the length of
                a table that was filled, say) goes with them.
        """
        for state, mode in zip(self._states, self._modes):
            state["training"] = mode
        unseen = [] if self._everywhere else [owner for owner in self._owners if not owner.keeps]
        self._gathered = next((owner.place(name) for owner in unseen for name in owner.names()), None)
        emptied = set[int]()  # objects of tensors that go: what they know of these, such as a size, goes with them
        for owner in self._owners:
            for name in owner.new():
                del owner.attributes[name]
                emptied.add(id(owner))
        for owner, numbers in self._plain:
            gathered = {name: value for name, value in numbers.items() if is_gathered(owner.attributes.get(name))}
            of_tensors = owner.is_object and (bool(gathered) or id(owner) in emptied)
            everything = of_tensors or owner.is_layer or id(owner.attributes.get("_buffers")) in put_back
            owner.attributes.update(numbers if everything else gathered)
        self.left = [*self._find_left()]
        for attributes, name, value in self._kept:
            attributes[name] = value
        for container, content in self._whole:
            refill(container, content)
        self._copies.restore()
        for array, kept in self._arrays:
            array[...] = kept
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
        if self._everywhere:
            self._looks = max(0, self._looks - 1)
            self._keeping = [owner for owner in self._owners if owner.keeps]
        seen = set[int]()
        for metric in self._metrics:
            self._whole.append((metric.attributes, dict(metric.attributes)))
            for name in metric.names():
                # What lies in the list of a state never changes.
                self._take_all(metric.place(name), metric.attributes[name], seen, deep=name not in metric.states)

    def _take(self, owner: "Owner", name: str, value: Any) -> None:
        place = owner.place(name)
        if isinstance(value, Tensor):
            if _is_small_state(value):
                self._kept.append((owner.attributes, name, value))
                self._watch(place, value)
            else:
                self._watch_large(place, value)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= SMALL:
                self._kept.append((owner.attributes, name, value))
                self._keep_array(value)
        elif isinstance(value, tuple):
            if not value or (is_gathered(value) and _is_light(value)):
                self._kept.append((owner.attributes, name, value))
                for tensor in _tensors(value):
                    self._watch(place, tensor)
        elif isinstance(value, CONTAINERS):
            if not is_gathered(value):
                self._numbers.append((owner, name, _outline(value)))
            elif _is_light(value):
                self._kept.append((owner.attributes, name, value))
                self._gather(place, value)
            elif isinstance(value, list):
                self._tails.append((owner.attributes, name, id(value), len(value)))
            else:
                for thing in things(value) if len(value) <= FEW else ():
                    if isinstance(thing, Tensor):
                        self._watch_large(place, thing)
        else:
            self._generators.append((value, generator_state(value)))

    def _take_all(self, place: str, value: Any, seen: set[int], *, deep: bool) -> None:
        """Keep what a metric holds, which others of its collection may hold as well."""
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_inference() or torch.is_inference_mode_enabled():  # else nothing can write to it
                self._watch(place, value)
        elif isinstance(value, GENERATORS):
            self._generators.append((value, generator_state(value)))
        elif isinstance(value, np.ndarray):
            self._keep_array(value)
        elif isinstance(value, (*CONTAINERS, tuple)):
            if not isinstance(value, tuple):
                self._whole.append((value, copy.copy(value)))
            for thing in things(value) if deep and len(value) <= FEW else ():
                self._take_all(place, thing, seen, deep=True)

    def _gather(self, place: str, container: Any) -> None:
        """Keep what a container of tensors or of containers holds, at any depth of dictionaries and short lists."""
        is_long = isinstance(container, list) and len(container) > FEW
        self._containers.append((container, len(container) if is_long else copy.copy(container)))
        if _holds_tensors(container):
            for tensor in things(container):
                self._watch(place, tensor, copies=len(container) <= FEW)
            return
        for thing in things(container) if len(container) <= FEW else ():
            if isinstance(thing, (list, deque, dict)) and is_gathered(thing):
                self._gather(place, thing)
            elif isinstance(thing, np.ndarray):
                self._keep_array(thing)
            elif isinstance(thing, Tensor):
                self._watch(place, thing)

    def _keep_array(self, array: "np.ndarray[Any, Any]") -> None:
        if array.nbytes <= SMALL and array.flags.writeable and not array.dtype.hasobject:
            self._arrays.append((array, array.copy()))

    def _watch_large(self, place: str, tensor: Tensor) -> None:
        """Note a tensor that is not kept alive: one that attempts write to is no output of the step before."""
        if not tensor.is_inference():
            self._large.append((place, weakref.ref(tensor), tensor._version))

    def _find_left(self) -> Iterator[str]:
        """Yield the names of numbers, of containers of them and of large tensors that are others now."""
        for owner, numbers in self._plain:
            now = owner.attributes
            for name, value in numbers.items():
                if isinstance(now.get(name, value), NUMBERS) and now.get(name, value) not in (value,):
                    yield owner.place(name)
        for owner, name, outline in self._numbers:
            held = owner.attributes.get(name)
            if isinstance(held, CONTAINERS) and _outline(held) != outline:
                yield owner.place(name)
        for place, held, version in self._large:
            tensor = held()
            if tensor is not None and tensor._version != version:
                yield place

    def _watch(self, place: str, tensor: Tensor, *, copies: bool = True) -> None:
        if copies and not tensor.is_meta and is_writable(tensor):
            self._copied.append(tensor)
        else:
            self._watched.append((place, tensor, tensor._version))


def _refill(container: Any, content: Any) -> None:
    """Give a container its content back, or a long list its length, unless it has come to hold numbers."""
    if not is_gathered(container):
        return
    if isinstance(content, int):
        del container[content:]
    else:
        refill(container, content)


def _outline(container: Any) -> Any:
    """Return what tells whether a container holds the same, without keeping that alive; of a long one the length.

    Examples:
        >>> _outline([1, 2.0]) == _outline([1, 2.0]), _outline({"step": 1}) == _outline({"step": 2})
        (True, False)
    """
    if len(container) > FEW:
        return len(container)
    held = [*container.items()] if isinstance(container, dict) else [*enumerate(container)]
    outline = [(name, value if isinstance(value, NUMBERS) else id(value)) for name, value in held]
    return {value for _, value in outline} if isinstance(container, set) else outline


def _holds_tensors(container: Any) -> bool:
    """Return whether it holds tensors and nothing else; so does an empty one."""
    return all(isinstance(thing, Tensor) for thing in things(container))


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
    return all(map(_is_light, list(things(container))[-FEW:]))


def _is_small_state(tensor: Tensor) -> bool:
    return is_small(tensor) and tensor.grad_fn is None and not tensor.is_inference()
