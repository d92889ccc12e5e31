"""Read the layout of a loader's batches off what is known of them: its samples, or some of its batches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_ga.batch.layout import WAY_OUT, Layout, LayoutError, SampleAxis, uncuttable
from lightning_ga.batch.read_layout import Samples, read_layout, read_ready_made
from lightning_ga.batch.sizes import leaves
from lightning_ga.loading.peekable import length_of
from lightning_ga.loading.samples import GOLDEN, collate_samples, collect_samples
from lightning_ga.memory.oom import is_out_of_memory

Prepare = Callable[[Any], Any]

LOOKED_AT = 8  # samples of a loader that are read
_KINDS = 3  # of these, of different shapes if there are any, are collated


@dataclass(frozen=True, slots=True)
class CollatedBatches:
    """Batches of DataLoaders, whose samples are at hand."""

    loaders: Sequence["DataLoader[Any]"]  # that a batch comes from
    combine: Callable[[list[Any]], Any] = lambda batches: batches[0]  # makes one batch out of those of all loaders
    # Returns some samples from all over a loader's dataset.
    samples: Callable[["DataLoader[Any]"], list[Any]] = lambda loader: collect_samples(loader, indices_of(loader))

    def layout(self, prepare: Prepare) -> Layout:
        """Read the layout of batches that are prepared for the step, by collating a few samples as 3 and as 4."""
        try:
            kinds = [_various(self.samples(loader)) for loader in self.loaders]
            if not all(kinds):
                raise uncuttable("its loader has none")
            make = partial(self._batch, kinds, prepare)
            return _of_crops(read_layout(Samples(make, len(kinds), max(map(len, kinds)))), kinds)
        except Exception as error:
            if isinstance(error, LayoutError) or is_out_of_memory(error):
                raise
            raise LayoutError(
                f"The batch cannot be cut into samples, as collating a few of them apart ended in "
                f"{type(error).__name__}: {error}. A way out: {WAY_OUT}."
            ) from error

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

    def layout(self, prepare: Prepare) -> Layout:
        """Read the layout by comparing the batches' shapes."""
        return read_ready_made([batch if self.prepared else prepare(batch) for batch in self.batches()])


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
    """Return indices of some samples, at irregular distances, as broken samples may be regular; ``None`` for a stream.

    Examples:
        >>> indices_of(DataLoader(range(100)))
        [0, 61, 23, 85, 47, 9, 70, 32]
    """
    if isinstance(loader.dataset, IterableDataset):
        return [None] * LOOKED_AT
    size = length_of(loader.dataset)
    if size is None:
        return list(next(iter(loader.batch_sampler or ()), ()))[:LOOKED_AT]
    if size <= LOOKED_AT:
        return list(range(size))
    return [int(number * GOLDEN * size) % size for number in range(LOOKED_AT)]
