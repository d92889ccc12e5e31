"""Count and cut the batches of one loader: by their layout, by the module's hook, or by collating samples anew.

The layout is read off what is known of the batches: their samples, or some of the batches.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import gcd
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_ga.batch.layout import (
    WAY_OUT,
    BatchSlices,
    Layout,
    LayoutError,
    SampleAxis,
    leaves,
    length_of_first,
    slices_by_hook,
    slices_of,
    uncuttable,
)
from lightning_ga.batch.pytree import same_values
from lightning_ga.batch.read_layout import Samples, read_layout, read_ready_made
from lightning_ga.errors import UserError
from lightning_ga.loading.padding import Padding, SizedSlices, find_padding, shows_lengths, slices_by_size
from lightning_ga.loading.rebatch import length_of
from lightning_ga.loading.samples import collate_samples, collect_samples, spread
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.lengths import SizeLimits

Prepare = Callable[[Any], Any]

LOOKED_AT = 8  # samples of a loader that are read
_WITHOUT_HOOK = ' size_of= does without that hook if a map-style dataset is cut with micro_batching="loader".'
_KINDS = 3  # of these, of different shapes if there are any, are collated


@dataclass(frozen=True, slots=True)
class CollatedBatches:
    """Batches of DataLoaders, whose samples are at hand."""

    loaders: Sequence["DataLoader[Any]"]  # that a batch comes from
    combine: Callable[[list[Any]], Any] = lambda batches: batches[0]  # makes one batch out of those of all loaders
    # Returns some samples from all over a loader's dataset.
    samples: Callable[["DataLoader[Any]"], list[Any]] = lambda loader: collect_samples(loader, indices_of(loader))
    size_of: str | None = None  # what shows the sizes of samples in a batch, if it is cut by these

    def layout(self, prepare: Prepare) -> Layout:
        """Read the layout of batches that are prepared for the step, by collating a few samples as 3 and as 4."""
        try:
            kinds = [_various(self.samples(loader)) for loader in self.loaders]
            if not all(kinds):
                raise LayoutError(
                    "It is not known where batches can be cut, as the loader yields no sample in the first epoch: let "
                    'that epoch have some, or use micro_batching="loader", which trains it as it is.'
                )
            make = partial(self._batch, kinds, prepare)
            return _of_crops(read_layout(Samples(make, len(kinds), max(map(len, kinds)))), kinds)
        except Exception as error:
            if isinstance(error, LayoutError) or is_out_of_memory(error):
                raise
            raise LayoutError(
                f"The batch cannot be cut into samples, as collating a few of them apart ended in "
                f"{type(error).__name__}: {error}. A way out: {WAY_OUT}."
            ) from error

    def some(self, prepare: Prepare) -> list[Any]:
        """Return batches of different samples: of one each, and of all together."""
        found = [self.samples(loader) for loader in self.loaders]
        kinds = [_various(samples) for samples in found]
        alone = range(min(map(len, kinds)))
        ones = [
            self._batch([[samples[kind]] for samples in kinds], prepare, [2] * len(kinds), [0], 0) for kind in alone
        ]
        numbers = [len(samples) for samples in found]
        return [self._batch(found, prepare, numbers, range(max(numbers)), 0), *ones]

    def _batch(
        self, found: list[list[Any]], prepare: Prepare, counts: Sequence[int], kinds: Sequence[int], seed: int
    ) -> Any:
        batches = [
            collate_samples(loader, [samples[kind % len(samples)] for kind in kinds], count, seed=seed)
            for loader, samples, count in zip(self.loaders, found, counts)
        ]
        return prepare(self.combine(batches))


@dataclass(frozen=True, slots=True)
class ReadyMadeBatches:
    """Batches that come ready-made, of which ``batches`` returns some; ``prepared`` if these are so for the step."""

    batches: Callable[[], Iterable[Any]]
    prepared: bool = False
    size_of: str | None = None  # as above

    def layout(self, prepare: Prepare) -> Layout:
        """Read the layout by comparing the batches' shapes."""
        batches, size_of = self.some(prepare), self.size_of
        return read_ready_made(batches, None if size_of is None else partial(shows_lengths, batches, size_of))

    def some(self, prepare: Prepare) -> list[Any]:
        """Return these batches."""
        return [batch if self.prepared else prepare(batch) for batch in self.batches()]


BatchSource = CollatedBatches | ReadyMadeBatches
"""Samples or other batches of a loader, from which the layout of a batch can be read."""


def _of_crops(layout: Layout, kinds: Sequence[Sequence[Any]]) -> Layout:
    """Return the layout, if parts with several entries for each sample come from samples that are lists of as many.

    Otherwise a sample that was not read may have another number of entries.
    """
    for path, role in layout.roles.items():
        if not isinstance(role, SampleAxis) or role.per == 1:
            continue
        if not all(isinstance(each, (list, tuple)) and len(each) == role.per for each in kinds[role.loader]):
            raise uncuttable(
                f"{path} holds {role.per} entries for each of those looked at, and may hold another number for others"
            )
    return layout


def _various(samples: list[Any]) -> list[Any]:
    """Return a few samples, of different shapes if there are any."""
    shapes = [str(list(leaves(sample))) for sample in samples]
    first = [position for position, shape in enumerate(shapes) if shape not in shapes[:position]]
    rest = [position for position in range(len(samples)) if position not in first]
    return [samples[position] for position in (*first, *rest)[:_KINDS]]


def is_collated(loader: Any) -> bool:
    """Return whether a loader collates samples, which can be fetched one by one."""
    return isinstance(loader, DataLoader) and loader.batch_sampler is not None


def indices_of(loader: "DataLoader[Any]") -> list[Any]:
    """Return indices of some samples; ``None`` for a stream.

    Examples:
        >>> indices_of(DataLoader(range(100)))
        [0, 63, 26, 89, 52, 15, 78, 41]
    """
    if isinstance(loader.dataset, IterableDataset):
        return [None] * LOOKED_AT
    size = length_of(loader.dataset)
    if size is None:
        return list(next(iter(loader.batch_sampler or ()), ()))[:LOOKED_AT]
    return list(islice(spread(size), LOOKED_AT))


class BatchReader:
    """Counts and cuts the batches of one loader, on the host or as the step gets them by a ``compat`` transfer."""

    def __init__(self, transfer: Any, source: BatchSource) -> None:
        self._transfer, self._source = transfer, source
        self._layouts: dict[bool, Layout | str] = {}  # or the reason why there is none
        self._paddings: dict[bool, tuple[Padding, ...]] = {}
        self.makes_anew = False  # whether parts of a batch are collated from its samples
        self.trims = True  # whether pieces of a batch are without columns of padding alone, where they are cut by size
        self.has_trimmed = False  # whether a piece was cut so
        self._within: tuple[int, SizeLimits] | None = None  # limits if so many of the longest samples fit

    def on_host(self, batch: Any) -> Any:
        """Return a batch as it is before it is moved to the device."""
        return self._prepare(True)(batch)

    def is_read(self, *, on_host: bool = False) -> bool:
        """Return whether everything needed to cut a batch is known."""
        return self._key(on_host) in self._layouts or self._hook is not None

    def _key(self, on_host: bool) -> bool:
        return on_host or not self._transfer.has_hooks

    def _prepare(self, on_host: bool) -> Prepare:
        prepare: Prepare = self._transfer.on_host if on_host else self._transfer.to_device
        return prepare

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
            raise LayoutError(found + (_WITHOUT_HOOK if self.cuts_by_size else ""))
        return found

    def look(self, *, on_host: bool = False) -> None:
        """Read the layout now, if it can be read."""
        with suppress(LayoutError):
            layout = self.layout(on_host=on_host)
            if self.cuts_by_size:
                self._padding(layout, on_host)

    @property
    def cuts_by_size(self) -> bool:
        """Whether batches are cut by the sizes of samples that they show."""
        return self._source.size_of is not None

    def keep_within(self, limits: SizeLimits, micro_batch: int) -> None:
        """Cut by these limits, which hold if ``micro_batch`` of the longest samples fit."""
        self._within = micro_batch, limits

    def limits(self, micro_batch: int | None) -> tuple[SizeLimits, int]:
        """Return the limits if so many of the longest samples fit, and what one of these counts as."""
        assert self._within is not None, "the limit is known"
        of, limits = self._within
        each = max(1, limits.budget // of)
        return (
            replace(limits, budget=2**31 * each) if micro_batch is None else limits.lowered(micro_batch, of=of)
        ), each

    def _padding(self, layout: Layout, on_host: bool) -> tuple[Padding, ...]:
        key, size_of = self._key(on_host), self._source.size_of
        assert size_of is not None
        if key not in self._paddings:
            self._paddings[key] = find_padding(self._source.some(self._prepare(key)), layout, size_of)
        return self._paddings[key]

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
        if self.cuts_by_size:
            return self.sorted_slices(batch, on_host=on_host)
        if self._hook is not None:
            return self._by_hook(batch, self.count(batch, expected=expected, on_host=on_host), on_host)
        again = samples() if self.makes_anew else None
        if again is not None:
            return self.collated_anew(batch, again, on_host=on_host)
        try:
            layout = self.layout(on_host=on_host)
            slices = slices_of(batch, layout)
            if slices.samples == 1:
                check_proportion(layout.sizes(batch).values())
            if expected is not None and slices.samples > expected:
                raise uncuttable(f"it seems to hold {slices.samples} where the loader was asked for {expected}")
        except LayoutError:
            again = samples()
            if again is None:
                raise
            return self.collated_anew(batch, again, on_host=on_host)
        return slices

    def sorted_slices(self, batch: Any, *, on_host: bool = False) -> SizedSlices:
        """Return what cuts a batch with its longest samples first."""
        if self._hook is not None:
            raise UserError(
                "size_of= sorts the samples of a batch, and split_batch cuts neighbours: leave one of them out."
            )
        layout = self.layout(on_host=on_host)
        paddings = self._padding(layout, on_host)
        return slices_by_size(batch, layout, paddings, trims=self.trims, on_trim=self._note_trim)

    def _note_trim(self) -> None:
        self.has_trimmed = True

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
        self.makes_anew = True
        return BatchSlices(again.count, lambda start, stop: prepare(again.collate(start, stop)))

    def _by_hook(self, batch: Any, samples: int, on_host: bool) -> BatchSlices:
        layout: Layout | None = None
        with suppress(LayoutError):  # slices are counted where the layout tells how many samples there are
            layout = self.layout(on_host=on_host)
            layout = layout if layout.samples(batch) == samples else None
        return slices_by_hook(self._hook, batch, samples, layout)

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


def check_proportion(sizes: Collection[int]) -> None:
    """Refuse to cut a batch of several loaders whose proportion no smaller batch has."""
    if gcd(*sizes) == 1 < max(sizes, default=1):
        given = " and ".join(map(str, sizes))
        raise uncuttable(f"its loaders give {given} of them, and no smaller batch holds whole ones in that proportion")
