"""Keep what a window of training may change besides gradients, and put it back where the window begins again.

A savepoint is taken once a window (in evaluation: once a batch), so it may cost some ten microseconds. It keeps random
numbers, buffers up to a size, tensors that the exactness check saw change, states of metrics, and the tensors and
containers that are attributes of the LightningModule itself. Larger buffers, weights, and networks that lie in plain
lists are not copied: the versions of some of them tell whether they have changed.
"""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from math import inf
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from lightning_ga.snapshot.contents import refill
from lightning_ga.snapshot.copies import SmallCopies, is_small, is_writable, versions
from lightning_ga.snapshot.plain import LIGHTNINGS_OWN, PlainState, hidden_modules, state_of
from lightning_ga.snapshot.random_numbers import (
    RandomState,
    generator_state,
    generators_of,
    have_moved,
    restore_generator,
    torch_generators,
)
from lightning_ga.snapshot.state import metric_state, set_metric_state

_CONTAINERS = (deque, dict, set)
_FEW = 64  # entries of a container that is copied
_DEEP = 1  # containers in containers that are copied
_NOTED = 8  # windows without a change after which changes by passes are no longer looked for
_LOOKED_AT = 32  # tensors and parts, spread over the module, that are looked at once a window
_TRAINS, _MODE = attrgetter("requires_grad"), attrgetter("training")


class Savepoint:
    """The state of a module at the start of a window, and before later batches of it where hooks run between.

    Args:
        module: The LightningModule.
        changing: Names of tensors that steps are known to change: they are copied, however large.
    """

    def __init__(self, module: Module, changing: Collection[str] = ()) -> None:
        self._module, self._changing = module, set(changing)
        self._to_note: float = _NOTED
        self._look()

    def _look(self) -> None:
        """See which tensors there are."""
        self._parts = [*self._module.modules()]
        self.metrics = [part for part in self._parts if isinstance(part, Metric)]
        self._generators, self._of_torch = generators_of(self._module), torch_generators()
        tables = [part._buffers for part in self._parts]
        self._tables, self._empty = [table for table in tables if table], [table for table in tables if not table]
        self._had = [dict(table) for table in self._tables]
        # Layers with a table of their own making may keep its length beside it, as rotary embeddings do.
        self._layers = [part for part in self._parts if part._buffers and not _is_stock(part)]
        self._buffers = [*chain.from_iterable(map(dict.values, self._tables))]
        buffers, weights = dict(self._module.named_buffers()), dict(self._module.named_parameters())
        self._weights = [*weights.values()]
        self._copied = [b for n, b in buffers.items() if is_writable(b) and (is_small(b) or n in self._changing)]
        # Not those that an optimizer within the backward pass updates: its states do not come back.
        self._copied += [w for n, w in weights.items() if n in self._changing and not w._post_accumulate_grad_hooks]
        self._copies, copied = SmallCopies(self._copied), set(map(id, self._copied))
        self._change = {id(tensor) for name, tensor in (buffers | weights).items() if name in self._changing}
        hidden = [*_hidden(self._module)]
        self._named = [*{id(pair[1]): pair for pair in [*hidden, *buffers.items(), *weights.items()]}.values()]
        self._watched = [pair for pair in self._named if id(pair[1]) not in copied]
        self._uncopied = [tensor for _, tensor in _spread(self._watched)]
        self._seen = [*self._uncopied, *_spread(self._copied)]
        self._some_weights, self._some_parts = _spread(self._weights), _spread(self._parts)
        self._read_flags()
        self.is_taken = False

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies."""
        return self._copies.tensors()

    def look_again(self) -> None:
        """Look at the module anew if parts have been added to it."""
        if [*map(id, self._module.modules())] != [*map(id, self._parts)]:
            self._look()
        self._of_torch = torch_generators()  # a device may have been started
        self._read_flags()

    def take(self) -> None:
        """Remember everything, as a window begins."""
        self.is_taken = False
        now = [*chain.from_iterable(map(dict.values, self._tables))]
        if any(self._empty) or len(now) != len(self._buffers) or not all(map(is_, now, self._buffers)):
            self._look()
        self._marks: dict[int, _Values] = {}
        self._zeroed: SmallCopies | None = None
        self._changed_by_passes: str | None = None
        self.changed_by_hooks: str | None = None
        self._before_hooks: Any = None
        self._start = self._read(self._copies)
        self._versions, self._lengths = self._summary()
        self._to_note = max(0, self._to_note - 1)
        self.is_taken = True

    def begin_hooks(self, *, always: bool = True) -> None:
        """Let hooks run that do not run again with the window: what changed before was changed by passes."""
        if always or self._to_note:
            self._before_hooks = self._summary()
            self._changed_by_passes = self._changed_by_passes or self._first_changed(self._before_hooks[0])

    def mark(self, number: int, *, always: bool = True) -> None:
        """Remember everything before a later batch too, as hooks have run; not ``always``, if none has changed any."""
        now, start = self._summary(), (self._versions, self._lengths)
        self._to_note = self._to_note if now == start else inf
        if always or now != (self._before_hooks or start):
            self._marks[number] = self._read(SmallCopies(self._copied), self._start)
            self._end_hooks()

    def around_zeroing(self, zero: Callable[[], None], *, look: bool) -> tuple[str, ...]:
        """Zero gradients, with hooks of the user's that do not run again: what they change is changed for good.

        The first batch of the window has met the values before: it meets them again if the window is run again.
        Return the names of what has changed, if it is to be looked at.
        """
        state = PlainState(self._module, self._named, ()) if look else None
        before = versions(self._copied)
        self.begin_hooks()
        zero()
        self._end_hooks()
        pairs = zip(self._copied, before, versions(self._copied))  # ``tensor.data`` counts no versions
        changed = [each for each, was, now in pairs if was != now or id(each) in self._change]
        if changed:
            self._zeroed = SmallCopies(changed)
            self._zeroed.take()
        return () if state is None else state.changed()

    def restore(self) -> str | None:
        """Put everything back as the window began; name what cannot be."""
        if not self.is_taken:
            return None
        self._write(self._start)
        changed = self._changed_by_passes or self._first_changed(versions(self._seen))
        return None if changed is None else f"weights or buffers of which no copies are made ({changed})"

    def go_on(self, number: int) -> None:
        """Set again what hooks had changed just before the batch of this number."""
        if self.is_taken and number == 1 and self._zeroed is not None:
            self._zeroed.restore()
        if self.is_taken and number in self._marks:
            self._write(self._marks[number])

    def draws_numbers(self) -> bool:
        """Return whether random numbers were drawn since the window began."""
        return self.is_taken and (not self._start.random.is_current() or have_moved(self._start.generators))

    def not_put_back(self, gradients: Iterable[tuple[str, Tensor]]) -> PlainState:
        """Return the state, as it is now, that ``restore`` leaves alone, and gradients that are left."""
        known = set(map(id, self.metrics))
        metrics = {name for name, part in self._module.named_modules() if id(part) in known}
        return PlainState(self._module, [*self._watched, *gradients], self._start.put_back | metrics)

    def _summary(self) -> tuple[Any, ...]:
        return versions(self._seen), [len(listed) for listed, *_ in self._start.tails]

    def _end_hooks(self) -> None:
        """Note what hooks have changed that has no copy."""
        if self._before_hooks is not None:
            now, self._before_hooks = versions(self._seen), None
            self.changed_by_hooks = self.changed_by_hooks or self._first_changed(now)
            self._versions = now

    def _first_changed(self, now: Sequence[int]) -> str | None:
        """Return the name of what has no copy and has been written to, by versions as they are now."""
        number = len(self._uncopied)
        if now[:number] == self._versions[:number]:
            return None
        pairs = zip(_spread(self._watched), self._versions, now)
        return next((str(name) for (name, _), was, is_now in pairs if was != is_now), None)

    def _read_flags(self) -> None:
        """Read what is trained, and in which mode parts are: all of it only if some has changed, as it takes long."""
        self._trains, self._modes = [*map(_TRAINS, self._weights)], [*map(_MODE, self._parts)]
        self._some_flags = self._flags_of_some()

    def _flags_of_some(self) -> list[bool]:
        return [*map(_TRAINS, self._some_weights), *map(_MODE, self._some_parts)]

    def _read(self, copies: SmallCopies, start: "_Values | None" = None) -> "_Values":
        if self._some_flags != self._flags_of_some():
            self._read_flags()
        values = _Values(self._module, copies, start, RandomState(of_torch=self._of_torch))
        values.generators = [(each, generator_state(each)) for each in self._generators]
        values.numbers = [(part, _numbers(vars(part))) for part in self._layers]
        values.metrics = [(metric, metric_state(metric, whole=True)) for metric in self.metrics]
        return values

    def _write(self, values: "_Values") -> None:
        values.random.restore()
        for generator, state in values.generators:
            restore_generator(generator, state)
        replaced = set()
        for table, had in zip(self._tables, self._had):
            if table.keys() != had.keys() or not all(map(is_, table.values(), had.values())):
                refill(table, had)
                replaced.add(id(table))
        for part, numbers in values.numbers:
            if id(part._buffers) in replaced:
                vars(part).update(numbers)
        for table in self._empty:
            table.clear()
        values.copies.restore()
        if self._some_flags != self._flags_of_some():  # else nothing, as hooks may have changed few of them before
            for weight, trains in zip(self._weights, self._trains):
                if weight.requires_grad != trains:
                    weight.requires_grad_(trains)
            for part, mode in zip(self._parts, self._modes):
                part.training = mode
        values.write_attributes(vars(self._module))
        for metric, state in values.metrics:
            set_metric_state(metric, state)


class _Values:
    """What a module holds at one moment: where its window begins, or later, in a window with that ``start``."""

    generators: list[tuple[Any, Any]]
    numbers: list[tuple[Module, dict[str, Any]]]
    metrics: list[tuple[Metric, dict[str, Any]]]

    def __init__(self, module: Module, copies: SmallCopies, start: "_Values | None", random: RandomState) -> None:
        self.random = random
        self.copies = copies
        self.copies.take()
        self._begins: dict[int, int] = {} if start is None else start._begins  # of lists, by id: their lengths
        own = self._own = dict(vars(module))
        self._attributes = {n: value for n, value in own.items() if n not in LIGHTNINGS_OWN and _is_gathered(value)}
        self._contents: list[tuple[Any, Any]] = []
        self.tails: list[tuple[list[Any], int, list[Any]]] = []  # of lists: entries since the window began
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self.put_back: set[str] = set()  # paths
        for name, value in self._attributes.items():
            self._keep(value, name, depth=0)

    def _keep(self, value: Any, path: str, *, depth: int) -> None:
        """Remember what a tensor holds, or a container and the tensors and containers in it; of a list its length."""
        if isinstance(value, Tensor):
            if not is_writable(value) or not is_small(value) or value.is_inference():
                return
            self._tensors.append((value, value._version, value.detach().clone()))
        elif isinstance(value, tuple):  # as the state of an LSTM
            for place, inner in enumerate(value):
                if isinstance(inner, Tensor):
                    self._keep(inner, f"{path}.{place}", depth=depth + 1)
        elif type(value) is list:
            begin = self._begins.setdefault(id(value), len(value))
            self.tails.append((value, begin, value[begin:]))
        elif len(value) <= _FEW:
            self._contents.append((value, copy.copy(value)))
            for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
                if inner is None or isinstance(inner, (int, float, str)):
                    self.put_back.add(f"{path}.{name}")
                elif isinstance(inner, (Tensor, list, *_CONTAINERS)) and depth < _DEEP:
                    self._keep(inner, f"{path}.{name}", depth=depth + 1)
        else:
            return
        self.put_back.add(path)

    @torch.no_grad()
    def write_attributes(self, own: dict[str, Any]) -> None:
        """Put them back. Numbers stay, because they may count attempts, unless one has become a tensor."""
        for name in [name for name in own if name not in self._own and _is_gathered(own[name])]:
            del own[name]
        own.update(self._attributes)
        own.update({name: number for name, number in _numbers(self._own).items() if _is_gathered(own.get(name))})
        for container, content in self._contents:
            refill(container, content)
        for listed, begin, tail in self.tails:
            if _is_gathered(listed[begin:]):
                listed[begin:] = tail
        for tensor, version, value in self._tensors:
            if tensor._version != version:
                tensor.copy_(value)


def _is_stock(part: Module) -> bool:
    return isinstance(part, Metric) or type(part).__module__.startswith("torch.")


def _numbers(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if value is None or isinstance(value, (int, float))}


def _spread(things: list[Any]) -> list[Any]:
    """Return some of many things, at equal distances."""
    return things[:: max(1, -(-len(things) // _LOOKED_AT))]


def _hidden(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and buffers of networks that are no submodules, as in a plain list, with their names."""
    for path, part in hidden_modules(module):
        yield from state_of(part, path).items()


def _is_gathered(value: Any) -> bool:
    """Return whether it is a tensor, or a container of anything but numbers, which may count attempts."""
    if isinstance(value, (list, *_CONTAINERS)):
        first = next(iter(value.values() if isinstance(value, dict) else value), None)
        return not isinstance(first, (int, float, str))
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value))
