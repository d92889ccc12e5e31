"""Count and cut the batches of one loader: by their layout, by the module's hook, or by collating samples anew."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader

from lightning_ga.batch.layout import Layout, LayoutError, Slice, uncuttable
from lightning_ga.batch.pytree import extents, is_constant, open_container, same_values
from lightning_ga.batch.split import cut, split_by_hook
from lightning_ga.loading.batch_source import BatchSource, CollatedBatches, Prepare
from lightning_ga.loading.samples import collate_samples


class Transfer(Protocol):
    """The transfer of a loader's batches from the host to the step."""

    @property
    def has_hooks(self) -> bool:
        """True if the user's own hooks change a batch during the transfer or after it."""

    @property
    def split_batch(self) -> Any:
        """The module's own ``split_batch``; ``None`` if it has none."""

    def on_host(self, batch: Any) -> Any:
        """Run the part that precedes the transfer."""

    def to_device(self, batch: Any) -> Any:
        """Run that part, and move the batch."""


@dataclass(frozen=True, slots=True)
class BatchSlices:
    """A batch of so many samples, of which ``take(start, stop)`` cuts out those from ``start`` to ``stop - 1``."""

    samples: int
    take: Callable[[int, int], Any]


class BatchReader:
    """Counts and cuts the batches of one loader, on the host or as the step gets them."""

    def __init__(self, transfer: Transfer, source: BatchSource) -> None:
        self._transfer, self._source = transfer, source
        self._layouts: dict[bool, Layout | str] = {}  # or the reason why there is none
        self._anew = False

    @property
    def collates_anew(self) -> bool:
        """True if batches are not cut by their layout, so that no other way to cut them is left."""
        return self._anew or self._hook is not None

    @property
    def makes_anew(self) -> bool:
        """True if parts of a batch are collated from its samples."""
        return self._anew

    def is_read(self, *, on_host: bool = False) -> bool:
        """Return whether everything needed to cut a batch is known."""
        return self._key(on_host) in self._layouts or self._hook is not None

    def _key(self, on_host: bool) -> bool:
        return on_host or not self._transfer.has_hooks

    def _prepare(self, on_host: bool) -> Prepare:
        return self._transfer.on_host if on_host else self._transfer.to_device

    def layout(self, *, on_host: bool = False) -> Layout:
        """Return the layout of batches as the step gets them, or as they are on the host before."""
        key = self._key(on_host)
        if key not in self._layouts:
            try:
                self._layouts[key] = self._source.layout(self._prepare(key))
            except LayoutError as error:
                self._layouts[key] = str(error)  # the error itself would keep the batches alive
        found = self._layouts[key]
        if isinstance(found, str):
            raise LayoutError(found)
        return found

    def look(self, *, on_host: bool = False) -> None:
        """Read the layout now, if it can be read."""
        with suppress(LayoutError):
            self.layout(on_host=on_host)

    def count(
        self, batch: Any, *, expected: int | None = None, otherwise: int | None = None, on_host: bool = False
    ) -> int:
        """Count the samples of a batch: those expected, minus those that the collate function has dropped.

        ``expected`` were fetched for it. If it does not show its samples, the answer is ``otherwise`` or ``expected``.
        """
        try:
            found = self.layout(on_host=on_host).samples(batch)
        except LayoutError:
            if expected is None and self._hook is not None:
                return length_of_first(batch)
            if expected is None and otherwise is None:
                raise
            return expected or otherwise or 0
        return found if expected is None else min(found, expected)

    def check(self, samples: Callable[[], "CollatedAgain | None"], *, on_host: bool = False) -> None:
        """Check in advance that batches can be cut; ``samples`` fetches those of some batch, if they are at hand."""
        if self._hook is not None:
            return
        try:
            self.layout(on_host=on_host)
        except LayoutError:
            again = samples()
            if again is None:
                raise
            batch = self._prepare(on_host)(again.collate(0, again.count, seed=1))
            self.collated_anew(batch, again, on_host=on_host)

    def slices(
        self,
        batch: Any,
        *,
        expected: int | None = None,
        on_host: bool = False,
        samples: Callable[[], "CollatedAgain | None"] = lambda: None,
    ) -> BatchSlices:
        """Return the function that cuts a batch."""
        if self._hook is not None:
            return self._by_hook(batch, self.count(batch, expected=expected, on_host=on_host), on_host)
        again = samples() if self._anew else None
        if again is not None:
            return self.collated_anew(batch, again, on_host=on_host)
        try:
            layout = self.layout(on_host=on_host)
            whole = layout.whole(batch)
            found = whole.stop
            check_proportion(found, list(whole.sizes.values()))
            if expected is not None and found > expected:
                raise uncuttable(f"it seems to hold {found} where the loader was asked for {expected}")
        except LayoutError:
            again = samples()
            if again is None:
                raise
            return self.collated_anew(batch, again, on_host=on_host)
        return BatchSlices(found, lambda start, stop: cut(batch, layout, Slice(start, stop, whole.sizes)))

    def samples_again(self, loader: "DataLoader[Any]", samples: list[Any]) -> "CollatedAgain | None":
        """Return samples to be collated in parts; ``None`` where batches come ready-made."""
        return CollatedAgain(loader, samples) if isinstance(self._source, CollatedBatches) else None

    def collated_anew(self, batch: Any, again: "CollatedAgain", *, on_host: bool = False) -> BatchSlices:
        """Cut this batch, and later ones, by collating their samples anew, if that gives the same batch again."""
        prepare = self._prepare(on_host)
        if not same_values(batch, prepare(again.collate(0, again.count))):
            raise uncuttable(
                "it is not the same when its samples are read and collated again (random augmentation, or a type that "
                "cannot be compared)"
            )
        self._anew = True
        return BatchSlices(again.count, lambda start, stop: prepare(again.collate(start, stop)))

    def _by_hook(self, batch: Any, samples: int, on_host: bool) -> BatchSlices:
        count: Callable[[Any], int] | None = None
        with suppress(LayoutError):  # slices are counted where the layout tells how many samples there are
            layout = self.layout(on_host=on_host)
            count = layout.samples if layout.samples(batch) == samples else None

        def take(start: int, stop: int) -> Any:
            sizes = [size for size in (start, stop - start, samples - stop) if size]
            return list(split_by_hook(self._hook, batch, sizes, count=count))[1 if start else 0]

        return BatchSlices(samples, take)

    @property
    def _hook(self) -> Any:
        return self._transfer.split_batch


@dataclass(frozen=True, slots=True)
class CollatedAgain:
    """The samples of one batch, fetched again, in its order, and the user's loader, which collates them."""

    loader: "DataLoader[Any]"
    samples: list[Any]
    draws: bool = False  # whether reading them drew random numbers

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def collate(self, start: int, stop: int, *, seed: int = 0) -> Any:
        """Collate the samples ``start`` to ``stop - 1``, random numbers drawn from ``seed``."""
        return collate_samples(self.loader, self.samples[start:stop], stop - start, seed=seed)


def check_proportion(samples: int, sizes: Sequence[int]) -> None:
    """Refuse to cut a batch of several loaders whose proportion no smaller batch has."""
    if samples == 1 < max(sizes, default=1):
        given = " and ".join(map(str, sizes))
        raise uncuttable(f"its loaders give {given} of them, and no smaller batch holds whole ones in that proportion")


def length_of_first(batch: Any) -> int:
    """Return the length of a batch's first tensor, for the sizes that ``split_batch`` is called with."""
    pending, seen = [batch], set[int]()
    while pending:
        node = pending.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(getattr(node, "num_graphs", None), int):
            return int(node.num_graphs)
        shape = extents(node)
        if shape is not None and not isinstance(node, (list, tuple)):
            return shape[0]
        children = open_container(node)
        pending[:0] = getattr(node, "__dict__", {}).values() if children is None else [child for _, child in children]
    if isinstance(batch, (list, tuple)):
        return len(batch)
    name = type(batch).__name__
    raise LayoutError(
        f"How many samples a {name} holds is not known, so split_batch cannot be told their sizes: call "
        f"lightning_ga.split.register_splitter({name}, count=…, take=…) as well."
    )


def largest_extent(batch: Any) -> int:
    """Return the largest extent of any part of a batch; unbounded if it holds an unknown type.

    Examples:
        >>> import torch
        >>> largest_extent({"x": torch.zeros(8, 3), "names": ["a", "b"]})
        8
    """
    if is_constant(batch):
        return 1
    shape, children = extents(batch), open_container(batch)
    if shape is None and children is None:
        graphs = getattr(batch, "num_graphs", None)
        return graphs if isinstance(graphs, int) else sys.maxsize
    return max([*(shape or ()), *(largest_extent(child) for _, child in children or ())], default=1)
