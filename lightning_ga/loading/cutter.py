"""Count and cut the batches that a step gets: by their layout, or by the module's ``split_batch``."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_ga.batch.layout import Field, Layout, cut_batch, cut_by_hook, elements, leaves, length_of_first
from lightning_ga.batch.pytree import REMEDY, LayoutError
from lightning_ga.batch.read_layout import Samples, read_layout, read_ready_made, read_rows
from lightning_ga.loading.rebatch import collates, length_of
from lightning_ga.loading.samples import SAMPLES_PER_READ, collate_samples, collect_samples, is_kept, spread
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.plan.accumulation import split_evenly
from lightning_ga.snapshot.random_numbers import RandomState

_MOST_ELEMENTS = 2**26  # of two batches that are collated to one
_KINDS = 3  # samples that are collated, of different shapes if there are any


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A batch, and two parts of it as training would get them; all on the device."""

    whole: Any
    parts: tuple[Any, Any]
    sizes: tuple[int, int]  # samples of the parts


class BatchCutter:
    """Counts and cuts the batches that ``combine`` makes of one batch of each loader.

    The layout is read once, from a few samples. If no samples can be read, each batch is read by itself.
    """

    def __init__(self, loaders: Sequence[Any], combine: Callable[[list[Any]], Any], transfer: Any) -> None:
        self._loaders, self._combine, self._transfer = loaders, combine, transfer
        self.drops_samples = False  # whether some of the samples that were read are left out of batches

    def count(self, batch: Any) -> int:
        """Return the samples of a batch; raise ``LayoutError`` if they cannot be separated."""
        if self._transfer.split_batch is not None:
            rows = self._rows_of_sample
            return length_of_first(batch) // (rows if isinstance(rows, int) else 1)
        return self._layout(batch).samples(batch)

    def count_left(self, batch: Any) -> int | None:
        """Return how many samples the collate function has left in a batch; ``None`` if that is not known.

        It is known if a few samples, collated apart, have shown how batches grow with them.
        """
        by_hook = self._transfer.split_batch is not None
        shown = self._rows_of_sample if by_hook else self._collated
        outcome = attempt(self.count, lambda error: isinstance(error, LayoutError), batch)
        return None if shown is None or isinstance(shown, str) else outcome.result

    def weight(self, batch: Any, samples: int) -> int:
        """Return a batch's weight in samples: with several loaders, the most that one of them gives."""
        several = len(self._loaders) > 1 and self._transfer.split_batch is None
        return max(self._layout(batch).sizes(batch).values()) if several else samples

    def cut(self, batch: Any, start: int, stop: int) -> Any:
        """Return the samples ``start`` to ``stop - 1`` of a batch, as views of it if possible."""
        hook = self._transfer.split_batch
        if hook is not None:
            return cut_by_hook(hook, batch, self.count(batch), start, stop)
        return cut_batch(batch, start, stop, layout=self._layout(batch))

    def halves(self, batch: Any, multiple: int = 1) -> CutBatch:
        """Cut a batch in two parts that are multiples, if there are two."""
        samples = self.count(batch)
        if samples < 2:
            raise LayoutError(f"A batch of {samples} samples cannot be cut in two.")
        middle = split_evenly(samples, 2, multiple)[0]
        parts = self.cut(batch, 0, middle), self.cut(batch, middle, samples)
        return CutBatch(batch, parts, (middle, samples - middle))

    def _layout(self, batch: Any) -> Layout:
        collated = self._collated
        if isinstance(collated, str):
            raise LayoutError(collated)
        return collated or read_ready_made(batch)

    @cached_property
    def _collated(self) -> Layout | str | None:
        """The layout of collated batches, or why there is none; ``None`` if no samples can be read."""
        layout: Layout | str | None = self._read(read_layout)
        return layout

    @cached_property
    def _rows_of_sample(self) -> int | str | None:
        """How many rows of a batch's first tensor a sample has, or why that is not known."""
        rows: int | str | None = self._read(read_rows)
        return rows

    def _read(self, read: Callable[[Samples], Any]) -> Any:
        """Return what is read of small batches, or why it cannot be read; ``None`` if there are no samples."""
        if not all(map(collates, self._loaders)):
            return None
        try:
            found = [_samples_of(loader) for loader in self._loaders]
            there = [[each for each in samples if each is not None] for samples in found]
            self.drops_samples |= _count(there) < _count(found)
            outcome = self._read_from(there, read)
            if not isinstance(outcome, str):
                return outcome
            pairs = zip(self._loaders, there)
            kept = [[each for each in samples if is_kept(loader, each)] for loader, samples in pairs]
            if _count(kept) == _count(there) or not all(kept):
                return outcome
            self.drops_samples = True
            return self._read_from(kept, read)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return _refusal(error)

    def _read_from(self, found: list[list[Any]], read: Callable[[Samples], Any]) -> Any:
        if not all(found):
            return None
        kinds = [_various(samples) for samples in found]
        state = RandomState()  # hooks of the transfer may draw
        try:
            return read(Samples(lambda *args: self._batch(kinds, *args), len(kinds), max(map(len, kinds))))
        except LayoutError as error:
            return str(error)  # the error itself would keep batches alive
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return _refusal(error)
        finally:
            state.restore()

    def _batch(self, found: list[list[Any]], counts: Sequence[int], kinds: Sequence[int], seed: int) -> Any:
        batches = [
            collate_samples(loader, [samples[kind % len(samples)] for kind in kinds], count, seed=seed)
            for loader, samples, count in zip(self._loaders, found, counts)
        ]
        return self._transfer.to_device(self._combine(batches))


def _samples_of(loader: "DataLoader[Any]") -> list[Any]:
    """Return a few samples from all over a loader's dataset; none of a stream that cannot be copied."""
    if isinstance(loader.dataset, IterableDataset):
        try:
            return collect_samples(loader, [None] * SAMPLES_PER_READ)
        except Exception as error:  # a stream may raise anything
            if is_out_of_memory(error):
                raise
            return []
    size = length_of(loader.dataset)
    if size is None:
        return collect_samples(loader, list(next(iter(loader.batch_sampler or ()), ()))[:SAMPLES_PER_READ])
    return collect_samples(loader, list(islice(spread(size), SAMPLES_PER_READ)))


def _count(found: list[list[Any]]) -> int:
    return sum(map(len, found))


def _refusal(error: Exception) -> str:
    return (
        f"The batch cannot be cut into samples, as collating a few of them apart ended in {type(error).__name__}: "
        f"{error}: {REMEDY}."
    )


def _various(samples: list[Any]) -> list[Any]:
    """Return a few samples, of different shapes if there are any."""
    shapes = [str(list(leaves(sample))) for sample in samples]
    first = [position for position, shape in enumerate(shapes) if shape not in shapes[:position]]
    rest = [position for position in range(len(samples)) if position not in first]
    return [samples[position] for position in (*first, *rest)[:_KINDS]]


def joins_batches(loader: "DataLoader[Any]", batch_size: int) -> bool:
    """Return whether collating the samples of two batches at once was seen to give those of both.

    A collate function may look at the first sample only, or at so many of them. Batches of more than 2²⁶ elements are
    halved for this.
    """
    if loader.collate_fn is default_collate:
        return True
    found = _samples_of(loader)
    samples = _various([each for each in found if each is not None])
    if not samples:
        return False
    while batch_size > 1 and 2 * batch_size * elements(samples[0]) > _MOST_ELEMENTS:
        batch_size //= 2
    both = [samples[position % len(samples)] for position in range(2 * batch_size)]
    try:
        sizes = [
            _sizes_of_fields(collate_samples(loader, part, len(part)))
            for part in (both[:batch_size], both[batch_size:], both)
        ]
    except Exception as error:  # a collate function may raise anything
        if is_out_of_memory(error):
            raise
        return False
    if not sizes[0].keys() == sizes[1].keys() == sizes[2].keys():  # lists, one entry for each sample
        sizes = [Counter({(): each.total()}) for each in sizes]
    pairs = [(first, sizes[1][field], sizes[2][field]) for field, first in sizes[0].items()]
    grown = [0 < first + second <= joined for first, second, joined in pairs]
    # Other fields are shared by all samples, or the places at which packed samples begin and end.
    others = [first == second == joined or joined == first + second - 1 for first, second, joined in pairs]
    return any(grown) and all(is_grown or is_other for is_grown, is_other in zip(grown, others))


def _sizes_of_fields(batch: Any) -> Counter[Field]:
    """Return how many elements the fields of a batch have."""
    found = Counter[Field]()
    for field, shape in leaves(batch):
        found[field] += prod(shape)
    return found
