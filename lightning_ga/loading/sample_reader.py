"""Read samples of a loader apart from training, where that leaves no trace.

Training alone reads streams, and datasets that do not give the same sample twice.

Tested in tests/loading/test_known_samples.py.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from itertools import chain, islice
from math import gcd
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_ga.batch.layout import leaves
from lightning_ga.batch.pytree import same_values
from lightning_ga.loading.rebatch import collates, copy_loader, finishes_batches, length_of
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.snapshot.random_numbers import generators_in, reseed
from lightning_ga.snapshot.user_objects import is_written_file, moved_by_reading, reached_from, untouched

T = TypeVar("T")
SAMPLES_AT_ONCE = 64
FIRST_SECONDS = 0.2  # after which no further samples are read: no more than a small batch takes if reading is slow
_IN_A_LIST = 3  # samples of the lists in ``lists_change_nothing``
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, less their whole part, are spread irregularly and evenly


class SampleReader:
    """Reads samples that are not collated.

    ``indices`` returns those that may be read, by default of the whole dataset. They are ``trusted`` if the user has
    said that samples are read by index: then none need be the same again.
    """

    def __init__(
        self, loader: Any, indices: Callable[[], Sequence[Any]] | None = None, *, trusted: bool = False
    ) -> None:
        self.loader = loader
        self._indices = indices
        self._trusted = trusted
        self.seconds_each = 0.0  # that reading one of the first samples has taken

    @cached_property
    def indices(self) -> Sequence[Any]:
        """The indices of the samples that may be read."""
        if self._indices is None:
            return range(length_of(self.loader.dataset) or 0)
        return self._indices()

    def order(self) -> Iterator[Any]:
        """Return the indices, from all over the dataset first, then ever more densely.

        The first few contain the first and the last, and so the largest of a sorted dataset.
        """
        size = len(self.indices)
        ends = [0, size - 1] if size > SAMPLES_AT_ONCE else []
        others = (place for place in spread(size) if place not in ends)
        return map(self.indices.__getitem__, chain(ends, others))

    @cached_property
    def first(self) -> list[Any]:
        """The first samples of ``order``, read once; fewer if that is slow, none if it would leave a trace.

        The second is read twice: it must be the same again. Random numbers are reset after each read, so the first of
        all reads, which may draw others, is compared with none.
        """
        if not self._are_by_index:
            return []
        most = SAMPLES_AT_ONCE
        if self.reads_lists:
            most -= sum(map(len, self._lists()))  # which ``lists_change_nothing`` reads besides
        index, *others = islice(self.order(), most)
        from_second = others or [index]
        # The reads: first, second, then from the second on again; of one sample, that sample three times.
        with closing(self._read(chain([index, from_second[0]], self._in_time(from_second)))) as reads:
            first_three = list(islice(reads, 3))
            if len(first_three) < 3:
                return []
            first, second, second_again = first_three
            if not self._trusted and not same_values(second, second_again):
                return []
            if not others:
                return [second_again]
            return [first, second_again, *reads]

    def _in_time(self, indices: Iterable[Any]) -> Iterator[Any]:
        """Yield indices until reading takes too long, and note how long it takes.

        A worker is asked for the next sample once it has sent one.
        """
        started = time.monotonic()
        for count, index in enumerate(indices, 1):
            yield index
            elapsed = time.monotonic() - started
            self.seconds_each = elapsed / count
            if elapsed > FIRST_SECONDS:
                break

    @property
    def _are_by_index(self) -> bool:
        is_indexed = collates(self.loader) and not isinstance(self.loader.dataset, IterableDataset)
        return is_indexed and not finishes_batches(self.loader) and len(self.indices) > 0

    def _read(self, indices: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield the samples, unless reading them would leave a trace; up to one that cannot be read by itself."""
        if self._moved_by_reading():
            return
        lists = map(list, zip(indices))
        with uncounted(), self.fetched(lists, self._reseeding) as reads:  # samples lie on the host
            for samples in until_error(reads):
                if not isinstance(samples, (list, tuple)) or len(samples) != 1:
                    return  # ``__getitems__`` returns a batch
                yield samples[0]

    @property
    def _reseeding(self) -> Callable[[Any], Any]:
        """A function that returns what was read; every read but the first draws the same random numbers."""
        return partial(_then_reseeded, self.loader.dataset)

    def _moved_by_reading(self) -> list[Any]:
        return moved_by_reading(self.loader.dataset, in_workers=self.loader.num_workers > 0)

    @contextmanager
    def fetched(
        self, lists: Iterable[list[Any]], read: Callable[[list[Any]], Any], *, workers: int = 1
    ) -> Iterator[Iterator[Any]]:
        """Return a context that yields ``read(samples)`` of each list in its order, and leaves no trace in training.

        If the loader has workers, separate ones read: files that a dataset opens on first use must not be open in this
        process when training starts its workers.
        """
        loader = copy_loader(
            self.loader,
            num_workers=min(workers, self.loader.num_workers),
            prefetch_factor=1,
            persistent_workers=False,
            drop_last=False,
            pin_memory=False,
            collate_fn=read,
            batch_sampler=lists,
            sampler=range(0),
            generator=torch.Generator(),
            in_order=True,
        )
        with untouched(loader.dataset):
            yield DataLoader.__iter__(loader)

    # --- kinds of datasets ---------------------------------------------------------------------

    @property
    def are_handed_out(self) -> bool:
        """Whether the dataset seems to hand out one sample after the other in this process, whatever the index is."""
        if self._trusted or self.loader.num_workers or self.first or not self._are_by_index:
            return False
        moved = self._moved_by_reading()
        if moved:  # an iterator or a queue gives one sample after another; a file that is written to may be a log
            return not all(map(is_written_file, moved))
        # Both read from the same state: equal samples for different indices mean that the index is ignored.
        found = [list(self._read([index])) for index in islice(self.order(), 2)]
        return len(found) == 2 and len(found[0]) > 0 and same_values(*found)

    @property
    def reads_lists(self) -> bool:
        """Whether the dataset reads several samples at once by a method of its own."""
        dataset = self.loader.dataset
        while isinstance(dataset, Subset):  # has the method whatever it contains
            dataset = dataset.dataset
        return hasattr(dataset, "__getitems__")

    def _lists(self) -> list[list[Any]]:
        """Return lists of indices, the first and the last of a few each alone and among others."""
        few = list(islice(self.order(), _IN_A_LIST))
        last_first = few[::-1]
        return [few, few[:1], few, last_first[:1], last_first]  # the first read of all may draw other random numbers

    @cached_property
    def lists_change_nothing(self) -> bool:
        """Whether a sample is the same in whichever list it is read, as far as a few show; it may be padded.

        The first of each list is looked at, which draws the same random numbers.
        """
        if not self._are_by_index or not self.reads_lists or self._moved_by_reading():
            return True
        lists = self._lists()
        with uncounted(), self.fetched(lists, self._reseeding) as reads:
            found = attempt(list, anything_but_out_of_memory, reads).result or []
        if not found or not all(isinstance(samples, (list, tuple)) for samples in found):
            return True  # an error is left to training; a batch has no samples to look at
        if list(map(len, found)) != list(map(len, lists)):
            return False
        _, alone, among, last_alone, last_among = found
        is_changed = _is_changed(alone[0], among[0]) or _is_changed(last_alone[0], last_among[0])
        is_random = not self.first  # samples that change whenever they are read: they show nothing of their list
        return is_random or not is_changed


def anything_but_out_of_memory(error: Exception) -> bool:
    """Return whether memory has not run out: user code may raise anything else."""
    return not is_out_of_memory(error)


def until_error(reads: Iterator[T]) -> Iterator[T]:
    """Yield what is read, up to the first error: training meets it, too, if it reads that sample."""
    while True:
        outcome = attempt(next, anything_but_out_of_memory, reads)
        if outcome.failure is not None:  # at the end that is ``StopIteration``
            return
        yield outcome.result


def _then_reseeded(dataset: Any, samples: Any) -> Any:
    reseed(0, generators_in(reached_from(dataset)))
    return samples


def _is_changed(sample: Any, again: Any) -> bool:
    """Return whether a sample of the same shape has other values."""
    return list(leaves(sample)) == list(leaves(again)) and not same_values(sample, again)


def spread(size: int) -> Iterator[int]:
    """Yield the places of a sequence so that the first few of them are spread irregularly over all of it."""
    steps = range(max(1, round(_GOLDEN * size)), size + 1)
    step = next((step for step in steps if gcd(step, size) == 1), 1)
    return (number * step % size for number in range(size))
