"""A few samples of a loader, not collated: read apart from training where that leaves no trace, or shown by a batch.

Training alone reads streams, and datasets that do not give the same sample twice. Their first batch shows what it was
collated from.
"""

import pickle
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from io import IOBase
from itertools import chain, cycle, islice
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset, default_collate, get_worker_info

from lightning_ga.batch.layout import elements, leaves
from lightning_ga.batch.pytree import same_values
from lightning_ga.loading.rebatch import collates, collates_by_index, copy_loader, length_of
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.snapshot.copies import copied
from lightning_ga.snapshot.random_numbers import generators_in, reseed
from lightning_ga.snapshot.untouched import reached_from, untouched

SAMPLES_AT_ONCE = 64
_IN_LISTS = 11  # samples of the lists in ``_reads_one_by_one``: 3 + 1 + 3 + 1 + 3
FIRST_SECONDS = 0.2  # after which no further samples are read: no more than a small batch takes if reading is slow
_FEW = 8  # samples of which some are collated
_QUEUES = ("get", "put", "empty")  # methods of those between threads or processes
_EXAMPLES = 3  # samples that are collated, of different shapes if there are any
_MOST_ELEMENTS = 2**26  # of a batch that is collated to see how batches grow
WHY_IN_STEP = (
    "",
    "a dataset that hands out its samples one after the other",
    "a dataset whose __getitems__ lets a sample depend on others, or changes their number",
    "samples of different shapes, which are collated only in the DataLoader's own batches",
    "a collate function that takes only so many samples of a batch",
)
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, less their whole part, are spread irregularly and evenly


class KnownSamples:
    """A few samples of a loader, and what it collates of them.

    ``indices`` are those that may be read, by default of the whole dataset. They are ``trusted`` if the user has
    said that samples are read by index: then the first one need not be the same again.
    """

    def __init__(
        self, loader: Any, indices: Sequence[Any] | Callable[[], Sequence[Any]] | None = None, *, trusted: bool = False
    ) -> None:
        self.loader = loader
        self._given = indices
        self._trusted = trusted
        self.seconds_each = 0.0  # that reading one of the first samples has taken
        self._shown_file: Path | None = None  # to which the first batch, maybe that of a worker, writes its samples
        self._shown: list[Any] = []  # what it has written; the file is gone then

    def with_shown_batch(self) -> Any:
        """Return a copy of the loader that writes to a file what its first batch is collated from.

        Return the loader itself if it makes no batches of samples, or batches that show as much themselves.
        """
        loader = self.loader
        if not collates(loader) or _finishes_batches(loader) or not self.has_own_collate:
            return loader
        if hasattr(loader.dataset, "__getitems__"):  # which may return a batch
            return loader
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self._shown_file = Path(file.name)
        weakref.finalize(self, self._shown_file.unlink, missing_ok=True)
        return copy_loader(loader, collate_fn=partial(_collate_and_show, loader.collate_fn, self._shown_file))

    @cached_property
    def indices(self) -> Sequence[Any]:
        """The indices of the samples that may be read."""
        if callable(self._given):
            return self._given()
        if self._given is None:
            return range(length_of(self.loader.dataset) or 0)
        return self._given

    def order(self) -> Iterator[Any]:
        """Yield the indices from all over the dataset first, then ever more densely.

        The first few contain the first and the last, and so the largest of a sorted dataset.
        """
        size = len(self.indices)
        ends = [0, size - 1] if size > SAMPLES_AT_ONCE else []
        yield from map(self.indices.__getitem__, ends)
        for place in spread(size):
            if place not in ends:
                yield self.indices[place]

    @cached_property
    def first(self) -> list[Any]:
        """The first samples of ``order``, read once; fewer if that is slow, none if it would leave a trace.

        The very first is read twice: it must be the same again.
        """
        if not self._are_by_index:
            return []
        most = SAMPLES_AT_ONCE
        if self._reads_lists:
            most -= _IN_LISTS
        index, *rest = islice(self.order(), most)
        other = rest[0] if rest else index  # is read before: the first of all reads may draw other random numbers
        with closing(self._read(chain([other, index], self._in_time([index, *rest[1:]])))) as reads:
            begun = list(islice(reads, 3))
            if len(begun) < 3:
                return []
            sample_of_other, sample, again = begun
            if not self._trusted and not same_values(sample, again):
                return []
            if not rest:
                return [sample]
            return [sample, sample_of_other, *reads]

    def _in_time(self, indices: Iterable[Any]) -> Iterator[Any]:
        """Yield indices until reading takes too long: a worker is asked for the next sample once it has sent one."""
        started = time.monotonic()
        for count, index in enumerate(indices, 1):
            yield index
            elapsed = time.monotonic() - started
            self.seconds_each = elapsed / count
            if elapsed > FIRST_SECONDS:
                break

    @property
    def can_be_read_apart(self) -> bool:
        """Whether samples can be read apart from training, and make batches as those of training."""
        return bool(self.first) and self.collates_unlike and self._reads_one_by_one

    @property
    def are_handed_out(self) -> bool:
        """Whether the dataset seems to hand out one sample after the other in this process, whatever the index is."""
        if self._trusted or self.loader.num_workers or self.first or not self._are_by_index:
            return False
        moved = self._moved_by_reading()
        if moved:  # files alone do not tell: a dataset may seek in them by the index
            return not all(isinstance(each, IOBase) for each in moved)
        one, *others = (list(self._read([index])) for index in islice(self.order(), 2))
        return bool(one) and bool(others) and same_values(one, others[0])

    @property
    def _are_by_index(self) -> bool:
        return collates_by_index(self.loader) and not _finishes_batches(self.loader) and len(self.indices) > 0

    def _moved_by_reading(self) -> list[Any]:
        """Return what the dataset holds that reading moves on and nothing puts back: iterators, files and queues."""
        _, *held = reached_from(self.loader.dataset)
        return [
            each for each in held if isinstance(each, Iterator) or all(hasattr(type(each), name) for name in _QUEUES)
        ]

    def _read(self, indices: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield the samples, unless reading them would leave a trace; up to one that cannot be read by itself."""
        if self._moved_by_reading():
            return
        lists = map(list, zip(indices))
        reseeding = partial(_then_reseeded, self.loader.dataset)
        with uncounted(), self.fetched(lists, reseeding) as reads:  # samples lie on the host
            while True:
                samples = attempt(next, anything_but_out_of_memory, reads, None).result  # training meets errors, too
                if not isinstance(samples, (list, tuple)) or len(samples) != 1:
                    return  # at the end, or ``__getitems__`` returns a batch
                yield samples[0]

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

    # --- collating -----------------------------------------------------------------------------

    def why_in_step(self, batch_size: int) -> int:
        """Return the place in ``WHY_IN_STEP`` of why only the loader's batches are right; 0 if others are, too."""
        if self.are_handed_out:
            return 1
        if not self._reads_one_by_one:
            return 2
        if not self.collates_unlike:
            return 3
        return 4 if self.can_be_read_apart and self.takes_only_some(batch_size) else 0

    @property
    def may_drop(self) -> bool:
        """Whether batches may lack samples: a function or method of the user makes them of several."""
        return self.has_own_collate or self._reads_lists

    @property
    def _reads_lists(self) -> bool:
        """Whether the dataset reads several samples at once by a method of its own."""
        dataset = self.loader.dataset
        while isinstance(dataset, Subset):  # has the method whatever it contains
            dataset = dataset.dataset
        return hasattr(dataset, "__getitems__")

    @cached_property
    def _reads_one_by_one(self) -> bool:
        """Whether a sample is the same in whichever list it is read, as far as a few show; it may be padded.

        The first of each list is looked at, which draws the same random numbers.
        """
        if not self._are_by_index or not self._reads_lists or self._moved_by_reading():
            return True
        few = list(islice(self.order(), _EXAMPLES))
        last_first = few[::-1]
        lists = [few, few[:1], few, last_first[:1], last_first]  # the first of all may draw other random numbers
        reseeding = partial(_then_reseeded, self.loader.dataset)
        with uncounted(), self.fetched(lists, reseeding) as reads:
            found = attempt(list, anything_but_out_of_memory, reads).result or []
        if not found or not all(isinstance(samples, (list, tuple)) for samples in found):
            return True  # an error is left to training; a batch has no samples to look at
        if list(map(len, found)) != list(map(len, lists)):
            return False
        _, alone, among, last_alone, last_among = found
        changed = _is_changed(alone[0], among[0]) or _is_changed(last_alone[0], last_among[0])
        return not changed or not self.first  # none are known if a sample is not the same when it is read again

    @cached_property
    def collates_unlike(self) -> bool:
        """Whether samples of different shapes make a batch, as far as it is known; equal ones do."""
        if not self.first or len(self._by_shapes(self._kept)) < 2:
            return True
        count = len(self._kept)
        return self.elements_of(self._kept, count) > 0 or self.elements_of(self._kept[:1], count) == 0

    def takes_only_some(self, count: int) -> bool:
        """Return whether a batch of so many samples has less of each than one of few, though those grow with them."""
        if not self.has_own_collate or not self.examples:
            return False
        example = max(self.examples, key=elements)
        count = min(count, _MOST_ELEMENTS // max(1, elements(example)))
        if count <= 4:
            return False
        two, three, four, many = (self.elements_of([example], each) for each in (2, 3, 4, count))
        growth = three - two
        return four - three == growth > 0 and 0 < many < two + growth * (count - 2)

    @property
    def has_own_collate(self) -> bool:
        """Whether collating may drop samples, or make tensors of text: torch's own function does not."""
        return self.loader.collate_fn is not default_collate

    @property
    def examples(self) -> list[Any]:
        """A few samples that collating keeps, of different shapes if there are any; none before some are known."""
        return self._examples if self._few else []

    @property
    def were_seen_dropped(self) -> bool:
        """Whether some of the few samples that were collated are left out of batches."""
        return bool(self._few) and len(self._kept) < len(self._few)

    @property
    def _few(self) -> list[Any]:
        """The samples that are known: if the first batch is to show them, none before it has been collated."""
        if self._shown_file is not None and not self.first:
            written = self._shown_file.read_bytes()
            if written:
                self._shown_file.unlink()
                self._shown_file = None
                self._shown = attempt(pickle.loads, lambda _: True, written).result or []  # what a worker wrote
        return self._shown or self._unlike_of_first

    @cached_property
    def _unlike_of_first(self) -> list[Any]:
        return _one_of_each_first(self._by_shapes(self.first))[:_FEW]

    def _by_shapes(self, samples: Iterable[Any]) -> list[list[Any]]:
        """Return samples in groups of one shape; text has one only if collating may make tensors of it."""
        groups: dict[str, list[Any]] = {}
        for sample in samples:
            groups.setdefault(str(list(leaves(sample, text=self.has_own_collate))), []).append(sample)
        return list(groups.values())

    @cached_property
    def _kept(self) -> list[Any]:
        kept = list(filter(self.is_kept, self._few))
        # If each one ends in an error, the layout is read from all of them, and says which.
        return kept or [sample for sample in self._few if sample is not None]

    @cached_property
    def _examples(self) -> list[Any]:
        groups = self._by_shapes(self._kept)
        if not self.collates_unlike:
            return max(groups, key=len)[:_EXAMPLES]
        return _one_of_each_first(groups)[:_EXAMPLES]

    def is_kept(self, sample: Any) -> bool:
        """Return whether the collate function makes a batch of a sample, and does not leave it out."""
        if sample is None or not self.has_own_collate:
            return sample is not None
        return self.elements_of([sample], 2) > 0

    def collate(self, samples: Sequence[Any], count: int, *, seed: int = 0) -> Any:
        """Return a batch of ``count`` samples as the loader makes it, repeating the given ones in turn."""
        collate = self.loader.collate_fn
        with untouched(getattr(collate, "__self__", collate), seed=seed):
            with uncounted():  # copies, as a collate function may change its input; they lie on the host
                chosen = list(map(copied, islice(cycle(samples), count)))
            return collate(chosen)

    def joins_batches(self, batch_size: int) -> bool:
        """Return whether batches of so many samples were seen to grow as those of few do.

        A collate function may look at the first sample only, or at so many of them. Elements must grow in proportion:
        as many for each sample from ``few`` to ``middle`` as from ``middle`` to its double. Only samples that are read
        apart show it: those of the first batch come after its size is planned, and each rank has others.
        """
        if not self.has_own_collate:
            return True
        if not self.can_be_read_apart or not self.examples:
            return False
        middle = max(2, min(batch_size, _MOST_ELEMENTS // max(1, elements(self.examples[0])) // 2))
        few = min(2, middle - 1)
        example = self.examples[:1]
        small = self.elements_of(example, few)
        single = self.elements_of(example, middle)
        double = self.elements_of(example, 2 * middle)
        return double > single and (double - single) * (middle - few) == (single - small) * middle

    def elements_of(self, samples: Sequence[Any], count: int) -> int:
        """Return the elements of a batch of the given samples in turn; 0 if collating them ends in an error."""
        batch = attempt(self.collate, anything_but_out_of_memory, samples, count).result
        return 0 if batch is None else elements(batch)


def anything_but_out_of_memory(error: Exception) -> bool:
    """Return whether memory has not run out: user code may raise anything else."""
    return not is_out_of_memory(error)


def _finishes_batches(loader: "DataLoader[Any]") -> bool:
    """Return whether a loader may finish its batches after they were collated."""
    return type(loader)._get_iterator is not DataLoader._get_iterator


def _then_reseeded(dataset: Any, samples: Any) -> Any:
    """Return what was read, and reseed, so that every read but the first draws the same random numbers."""
    reseed(0, generators_in(reached_from(dataset)))
    return samples


def _is_changed(sample: Any, again: Any) -> bool:
    """Return whether a sample of the same shape has other values."""
    return list(leaves(sample)) == list(leaves(again)) and not same_values(sample, again)


def _one_of_each_first(groups: list[list[Any]]) -> list[Any]:
    return [*(group[0] for group in groups), *chain.from_iterable(group[1:] for group in groups)]


def _collate_and_show(collate: Callable[[Any], Any], file: Path, samples: list[Any]) -> Any:
    """Collate samples; write a few of them to a file that is there and empty."""
    worker = get_worker_info()
    if (worker is None or worker.id == 0) and file.exists() and not file.stat().st_size:
        few = attempt(_pickled, lambda _: True, samples[:_FEW]).result
        file.write_bytes(few or pickle.dumps([]))
    return collate(samples)


def _pickled(samples: list[Any]) -> bytes:
    return pickle.dumps(list(map(copied, samples)))


def spread(size: int) -> Iterator[int]:
    """Yield the places of a sequence so that the first few of them are spread irregularly over all of it."""
    steps = range(max(1, round(_GOLDEN * size)), size + 1)
    step = next((step for step in steps if gcd(step, size) == 1), 1)
    return (number * step % size for number in range(size))
