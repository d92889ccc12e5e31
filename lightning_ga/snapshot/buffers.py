"""Keep a module's buffers before an attempt, and restore them."""

from collections.abc import Iterator
from itertools import chain
from operator import is_

from torch import Tensor
from torch.nn import Module

from lightning_ga.snapshot.checksums import checksums, differ
from lightning_ga.snapshot.contents import refill
from lightning_ga.snapshot.copies import LargeCopy, SmallCopies, is_small, is_writable


class BufferSnapshot:
    """A module's buffers: small ones copied before every attempt, large ones when they have changed.

    Small ones are copied in any case: BatchNorm changes its statistics without raising their version,
    and so does all that writes to ``buffer.data``. A step may also put new tensors in the place of its
    buffers: then the old ones come back.
    """

    def __init__(self, module: Module) -> None:
        self._paths = [path for path, _ in module.named_modules()]
        self._tables = [part._buffers for part in module.modules()]
        self._occupied: list[dict[str, Tensor | None]] = []  # tables that hold buffers
        self._tables_had: list[dict[str, Tensor | None]] = []
        self._buffers: list[Tensor | None] = []  # of all tables, in order
        self._small = SmallCopies()
        self._large: list[LargeCopy] = []
        self._uncopied: list[tuple[str, Tensor]] = []
        self._versions: list[int] = []
        self._anew = True  # whether all modules were looked at
        self.put_back = set[int]()  # ids of the tables of which the last restore changed something
        self._first: str | None = None  # a module that had no buffers and has come to hold some, nobody knows when
        self._watch()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the copies."""
        yield from self._small.tensors()
        yield from (large.copy for large in self._large)

    def take(self, *, anew: bool = True) -> None:
        """Copy what may have changed since the last time; modules without buffers are looked at ``anew`` only."""
        tables = self._tables if anew else self._occupied
        if tables and self._are_others(tables):
            self._watch()
            anew = True
        self._anew = anew
        if not self._buffers:
            return
        self._small.take()
        for large in self._large:
            large.take()
        self._versions = [buffer._version for _, buffer in self._uncopied]

    @property
    def is_learning(self) -> bool:
        """Whether an attempt that goes through shows more."""
        return any(large.is_learning for large in self._large)

    def learn(self) -> None:
        """Note that an attempt went through: what changes in one shows."""
        for large in self._large:
            large.learn()

    def restore(self) -> None:
        """Put the buffers back, and their values."""
        marks = zip(self._paths, self._tables, self._tables_had)
        first = (path for path, table, had in marks if table and not had and not self._anew)
        self._first = next(first, None)
        self.put_back = {id(table) for table, had in zip(self._tables, self._tables_had) if not _is_same(table, had)}
        for table, had in zip(self._tables, self._tables_had):
            refill(table, had)
        places = [(id(table), part) for table in self._tables for part in table.values() if part is not None]
        failed = checksums(part for _, part in places)
        self._small.restore()
        for large in self._large:
            large.restore()
        sums = zip(places, failed, checksums(part for _, part in places))
        self.put_back |= {table for (table, _), before, now in sums if differ(before, now)}

    def lost(self) -> str | None:
        """Name a buffer that has changed and of which there is no copy."""
        if self._first is not None:
            return f"the buffers of a module that had none ({self._first})"
        for (name, buffer), version in zip(self._uncopied, self._versions):
            if buffer._version != version:
                return f"a buffer that is not dense in place ({name})"
        return next((f"a buffer by its .data ({large.name})" for large in self._large if large.is_lost()), None)

    def _are_others(self, tables: list[dict[str, Tensor | None]]) -> bool:
        """Return whether buffers have been added, removed, replaced or renamed."""
        now = [*chain.from_iterable(map(dict.values, tables))]
        return len(now) != len(self._buffers) or not all(map(is_, now, self._buffers))

    def _watch(self) -> None:
        """See which tensors are the buffers now."""
        self._occupied = [table for table in self._tables if table]
        self._tables_had = [dict(table) for table in self._tables]
        self._buffers = [*chain.from_iterable(map(dict.values, self._tables))]
        named: dict[int, tuple[str, Tensor]] = {}
        for path, table in zip(self._paths, self._tables):
            for name, buffer in table.items():
                if buffer is not None and not buffer.is_meta:
                    named[id(buffer)] = (f"{path}.{name}".lstrip("."), buffer)
        known = {id(large.tensor): large for large in self._large}
        copied = [pair for pair in named.values() if is_writable(pair[1])]
        self._uncopied = [pair for pair in named.values() if not is_writable(pair[1])]
        self._small = SmallCopies(buffer for _, buffer in copied if is_small(buffer))
        self._large = [known.get(id(pair[1])) or LargeCopy(*pair) for pair in copied if not is_small(pair[1])]


def _is_same(table: dict[str, Tensor | None], had: dict[str, Tensor | None]) -> bool:
    return table.keys() == had.keys() and all(map(is_, table.values(), had.values()))
