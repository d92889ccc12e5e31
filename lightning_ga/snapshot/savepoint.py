"""What a window may change besides gradients, kept where it begins, and put back where it begins again.

Taken once a window (in evaluation: once a batch), so it may cost some ten microseconds: random numbers, buffers up to
a size, tensors that the exactness check saw change, states of metrics, and plain attributes of the LightningModule
itself. Of larger buffers and frozen weights the version tells whether they have changed; these are told, not undone.
"""

import copy
from collections import deque
from collections.abc import Collection, Iterator
from itertools import chain
from operator import is_
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from lightning_ga.snapshot.contents import refill
from lightning_ga.snapshot.copies import SmallCopies, is_small, is_writable, versions
from lightning_ga.snapshot.metrics import FIXED, MetricState, _deep
from lightning_ga.snapshot.random_numbers import (
    RandomState,
    generator_state,
    generators_of,
    have_moved,
    restore_generator,
)

_OWN = {*vars(LightningModule()), "_hparams", "forward"}  # what Lightning keeps of itself in a module
_CONTAINERS = (deque, dict, set)
_FEW = 64  # entries of a container that is copied


class Savepoint:
    """State of a module where a window begins.

    Args:
        module: The LightningModule.
        changing: Names of tensors that steps are known to change: they are copied, however large.
    """

    def __init__(self, module: Module, changing: Collection[str] = ()) -> None:
        self._module, self._changing = module, set(changing)
        self._random = RandomState()
        self._look()

    def _look(self) -> None:
        """See which tensors there are."""
        named = [*self._module.named_modules()]
        self.metrics = [part for _, part in named if isinstance(part, Metric)]
        tables = [part._buffers for _, part in named]
        self._tables = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._had = [dict(table) for table in self._tables]
        self._buffers = [*chain.from_iterable(map(dict.values, self._tables))]
        buffers = {id(each): (name, each) for name, each in self._module.named_buffers() if is_writable(each)}
        frozen = [(name, each) for name, each in self._module.named_parameters() if not each.requires_grad]
        weights = [pair for pair in frozen if pair[0] in self._changing]
        known = [pair for pair in buffers.values() if is_small(pair[1]) or pair[0] in self._changing]
        copied = {id(each) for _, each in (*known, *weights)}
        self._copies, self._weights = SmallCopies(each for _, each in known), SmallCopies(each for _, each in weights)
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        self._names_of = [name for name, each in named if id(each) not in copied]
        self._watched = [each for _, each in named if id(each) not in copied]
        self._versions = versions(())
        self._own_generators = generators_of(self._module)
        self._generators: list[tuple[Any, Any]] = []
        self.is_taken = False

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies."""
        yield from self._copies.tensors()
        yield from self._weights.tensors()

    def look_again(self) -> None:
        """Look at the module anew if parts have been added to it."""
        if sum(1 for part in self._module.modules() if part._buffers) != len(self._tables) or {
            id(part) for part in self._module.modules() if isinstance(part, Metric)
        } != set(map(id, self.metrics)):
            self._look()

    def take(self) -> None:
        """Remember everything, as a window begins."""
        self.is_taken = False
        self._random = RandomState()  # first: numbers drawn are told even where copies fail
        if self._tables:
            now = [*chain.from_iterable(map(dict.values, self._tables))]
            if len(now) != len(self._buffers) or not all(map(is_, now, self._buffers)):
                self._look()
        self._copies.take()
        self.accept()
        self._generators = [(each, generator_state(each)) for each in self._own_generators]
        own = vars(self._module)
        self._names = set(own)
        self._numbers = {name: each for name, each in own.items() if isinstance(each, (int, float)) or each is None}
        self._attributes = {name: own[name] for name in own if name not in _OWN and _is_gathered(own[name])}
        self._lists = [each for each in self._attributes.values() if type(each) is list]
        self.mark()
        held = [each for each in self._attributes.values() if isinstance(each, _CONTAINERS) and len(each) <= _FEW]
        self._contents = [(each, copy.copy(each)) for each in held]
        self._states = [(metric, _state(metric)) for metric in self.metrics]
        self.is_taken = True

    def accept(self) -> None:
        """Take weights as they are for those before the window: hooks that do not run again have changed them."""
        self._weights.take()
        self._versions = versions(self._watched)

    def mark(self) -> None:
        """Remember how long lists are, before each batch: hooks between two of them append to lists too."""
        self._lengths = [*map(len, self._lists)]

    def shorten(self) -> None:
        """Drop what an attempt has appended to lists, and what batches append that run again."""
        for listed, length in zip(self._lists, self._lengths):
            if _is_gathered(listed[length:]):
                del listed[length:]

    def restore(self) -> str | None:
        """Put everything back; name what cannot be. Nothing, if memory ran out before it was all taken."""
        if not self.is_taken:
            return None
        self._random.restore()
        for generator, state in self._generators:
            restore_generator(generator, state)
        for table, had in zip(self._tables, self._had):
            if table.keys() != had.keys() or not all(map(is_, table.values(), had.values())):
                refill(table, had)
        for table in self._empty:
            table.clear()
        self._copies.restore()
        self._weights.restore()
        own = vars(self._module)
        for name in [name for name in own if name not in self._names and _is_gathered(own[name])]:
            del own[name]
        own.update(self._attributes)
        own.update({n: number for n, number in self._numbers.items() if isinstance(own.get(n), Tensor)})  # 0.0 + a loss
        self.shorten()
        for container, content in self._contents:
            refill(container, content)
        for metric, state in self._states:
            states = metric._defaults
            vars(metric).update({n: _copied(value) if n in states else _deep(value) for n, value in state.items()})
        changed = (at for at, pair in enumerate(zip(versions(self._watched), self._versions)) if pair[0] != pair[1])
        lost = next((self._names_of[at] for at in changed), None)
        return None if lost is None else f"weights or buffers of which no copies are made ({lost})"

    def draws_numbers(self) -> bool:
        """Return whether random numbers were drawn since."""
        return not self._random.is_current() or have_moved(self._generators)


def _is_gathered(value: Any) -> bool:
    """Return whether it is a tensor, or a container of anything but numbers: what counts attempts goes on counting."""
    if isinstance(value, (list, *_CONTAINERS)):
        first = next(iter(value.values() if isinstance(value, dict) else value), None)
        return not isinstance(first, (int, float, str))
    return isinstance(value, Tensor)


def _state(metric: Metric) -> MetricState:
    """Return the attributes of a metric, with copies of tensors and containers that updates write to."""
    states = metric._defaults
    held = ((name, value) for name, value in vars(metric).items() if name not in FIXED)
    return {name: _copied(value) if name in states else _deep(value) for name, value in held}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, (list, *_CONTAINERS)) else value
