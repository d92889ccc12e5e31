"""A few samples of a loader, not collated: read apart from training where that leaves no trace, or shown by a batch.

Training alone reads streams, and datasets that do not give the same sample twice. Their first batch shows what it was
collated from.
"""

import pickle
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from io import IOBase
from itertools import islice
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from lightning_ga.batch.layout import elements, leaves
from lightning_ga.batch.pytree import same_values
from lightning_ga.loading.rebatch import collates, collates_by_index, copy_loader, length_of
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.snapshot.copies import copied
from lightning_ga.snapshot.random_numbers import GENERATORS, reseed
from lightning_ga.snapshot.untouched import datasets_in, untouched

SAMPLES_AT_ONCE = 64
FIRST_SECONDS = 0.3  # after which no further samples are read: no more than a small batch takes if reading is slow
_PER_READ = 4
_FEW = 8  # samples of which some are collated
_QUEUES = {"get", "put", "empty"}  # methods of those between threads or processes
_KINDS = 3  # samples that are collated, of different shapes if there are any
_MOST_ELEMENTS = 2**26  # of a batch that is collated to see how batches grow
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, less their whole part, are spread irregularly and evenly


class Samples:
    """A few samples of a loader, and what it collates of them.

    ``indices`` are those that may be read, by default of the whole dataset. They are ``trusted`` if the user has
    said that samples are read by index: then the first one is not read twice.
    """

    def __init__(
        self, loader: Any, indices: Sequence[Any] | Callable[[], Sequence[Any]] | None = None, *, trusted: bool = False
    ) -> None:
        self.loader = loader
        self._given = indices
        self._trusted = trusted
        self._shown: Path | None = None  # file to which the first batch, maybe that of a worker, writes its samples

    def showing(self) -> Any:
        """Return the loader, or a copy that shows what its first batch is collated from if that alone does not."""
        loader = self.loader
        if not collates(loader) or _finishes_batches(loader) or hasattr(loader.dataset, "__getitems__"):
            return loader
        if loader.collate_fn is default_collate:
            return loader
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self._shown = Path(file.name)
        weakref.finalize(self, self._shown.unlink, missing_ok=True)
        return copy_loader(loader, collate_fn=partial(_collate_and_show, loader.collate_fn, self._shown))

    @cached_property
    def indices(self) -> Sequence[Any]:
        """The indices of the samples that may be read."""
        if self._given is None:
            return range(length_of(self.loader.dataset) or 0)
        return self._given() if callable(self._given) else self._given

    def order(self) -> Iterator[Any]:
        """Yield the indices from all over the dataset first, then ever more densely.

        The first few contain the first and the last, and so the largest of a sorted dataset.
        """
        size = len(self.indices)
        first = [0, size - 1] if size > SAMPLES_AT_ONCE else []
        yield from (self.indices[place] for place in first)
        yield from (self.indices[place] for place in spread(size) if place not in first)

    @cached_property
    def first(self) -> list[Any]:
        """The first samples of ``order``, read once; fewer if that is slow, none if it would leave a trace."""
        found = list(self._repeated)
        if found:
            rest = list(islice(self.order(), 1, SAMPLES_AT_ONCE))
            started = 0.0
            for samples in self._read(rest[at : at + _PER_READ] for at in range(0, len(rest), _PER_READ)):
                started = started or time.monotonic()  # a worker may take long to begin
                found += samples
                if time.monotonic() - started > FIRST_SECONDS:
                    break
        return found

    @property
    def are_handed_out(self) -> bool:
        """Whether the dataset seems to hand out one sample after the other in this process, whatever the index is."""
        if self._trusted or self.loader.num_workers or self._repeated or not self._are_by_index:
            return False
        used_up = self._used_up()
        if used_up:  # who reads files may seek in them
            return not all(isinstance(each, IOBase) for each in used_up)
        firsts = [list(self._read([[index]])) for index in islice(self.order(), 2)]
        return all(firsts) and len(firsts) == 2 and same_values(*firsts)

    @cached_property
    def _repeated(self) -> Sequence[Any]:
        """The first sample, if it is the same when it is read again."""
        if not self._are_by_index:
            return ()
        index = list(islice(self.order(), 1))
        reads = list(self._read([index] * 3))  # the first may draw other random numbers
        is_same = len(reads) == 3 and (self._trusted or same_values(reads[1], reads[2]))
        return reads[1] if is_same else ()

    @property
    def _are_by_index(self) -> bool:
        return collates_by_index(self.loader) and not _finishes_batches(self.loader) and len(self.indices) > 0

    def _used_up(self) -> list[Any]:
        """Return what reading uses up and cannot be put back: iterators, files and queues."""
        held = [value for each in datasets_in(self.loader.dataset) for value in vars(each).values()]
        return [each for each in held if isinstance(each, Iterator) or set(dir(type(each))) >= _QUEUES]

    def _read(self, lists: Iterable[list[Any]]) -> Iterator[Any]:
        """Yield the samples of each list, unless reading them would leave a trace, or they are no list of samples."""
        if self._used_up():
            return
        lists = list(lists)
        with uncounted(), self.fetched(lists, _SeededReader(self.loader.dataset)) as reads:  # samples lie on the host
            for wanted in lists:
                outcome = attempt(next, lambda error: not is_out_of_memory(error), reads)  # training meets errors, too
                samples = outcome.result
                if not isinstance(samples, (list, tuple)) or len(samples) != len(wanted):
                    return  # ``__getitems__`` may return a batch
                yield samples

    @contextmanager
    def fetched(
        self, lists: Iterable[list[Any]], read: Callable[[list[Any]], Any], *, workers: int = 1
    ) -> Iterator[Iterator[Any]]:
        """Return a context that yields ``read(samples)`` for each list of indices, and leaves no trace in training.

        If the loader has workers, separate ones read: files that a dataset opens on first use must not be open in this
        process when training starts its workers.
        """
        loader = self.loader
        settings: dict[str, Any] = {"num_workers": 0, "prefetch_factor": None, "timeout": 0}
        if loader.num_workers:
            settings = {"num_workers": workers, "prefetch_factor": 1, "timeout": loader.timeout}
        settings |= {"persistent_workers": False, "drop_last": False, "pin_memory": False, "collate_fn": read}
        settings |= {"batch_sampler": lists, "sampler": range(0), "generator": torch.Generator()}
        with untouched(loader.dataset):
            yield DataLoader.__iter__(copy_loader(loader, **settings))

    # --- collating -----------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> list[Any]:
        """A few samples that collating keeps, of different shapes if there are any."""
        shapes = [str(list(leaves(sample))) for sample in self._kept]
        first = [place for place, shape in enumerate(shapes) if shape not in shapes[:place]]
        rest = [place for place in range(len(shapes)) if place not in first]
        return [self._kept[place] for place in (*first, *rest)[:_KINDS]]

    @property
    def are_dropped(self) -> bool:
        """Whether some of the samples are left out of batches."""
        return len(self._kept) < len(self._few)

    @cached_property
    def _few(self) -> list[Any]:
        if self.first or self._shown is None:
            return self.first[:_FEW]
        shown = self._shown.read_bytes()
        self._shown.unlink()
        return list(pickle.loads(shown or pickle.dumps([])))

    @cached_property
    def _kept(self) -> list[Any]:
        kept = [sample for sample in self._few if self.is_kept(sample)]
        return kept or [sample for sample in self._few if sample is not None]  # an error of collating is met again

    def is_kept(self, sample: Any) -> bool:
        """Return whether the collate function makes a batch of a sample, and does not leave it out."""
        if sample is None or self.loader.collate_fn is default_collate:
            return sample is not None
        outcome = attempt(self.collate, lambda error: not is_out_of_memory(error), [sample], 2)
        return outcome.result is not None and elements(outcome.result) > 0

    def collate(self, samples: Sequence[Any], count: int, *, seed: int = 0) -> Any:
        """Return a batch of ``count`` samples as the loader makes it, repeating the given ones in turn."""
        collate = self.loader.collate_fn
        with untouched(getattr(collate, "__self__", collate), seed=seed):
            with uncounted():  # copies, as a collate function may change its input; they lie on the host
                chosen = [copied(samples[place % len(samples)]) for place in range(count)]
            return collate(chosen)

    def joins_batches(self, batch_size: int) -> bool:
        """Return whether batches of so many samples were seen to grow as those of few do.

        A collate function may look at the first sample only, or at so many of them.
        """
        if self.loader.collate_fn is default_collate:
            return True
        if not self.kinds:
            return False
        sample = self.kinds[0]
        middle = max(2, min(batch_size, _MOST_ELEMENTS // max(1, elements(sample)) // 2))
        few = min(2, middle - 1)

        def sizes() -> list[int]:
            return [elements(self.collate([sample], count)) for count in (few, middle, 2 * middle)]

        outcome = attempt(sizes, lambda error: not is_out_of_memory(error))  # a collate function may raise anything
        small, single, double = outcome.result or (0, 0, 0)
        return double > single and (double - single) * (middle - few) == (single - small) * middle


def _finishes_batches(loader: "DataLoader[Any]") -> bool:
    """Return whether a loader may finish its batches after they were collated."""
    return type(loader)._get_iterator is not DataLoader._get_iterator


class _SeededReader:
    """Returns what was read, and lets the next read draw the same random numbers as any but the first."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, samples: Any) -> Any:
        held = [value for each in datasets_in(self._dataset) for value in vars(each).values()]
        reseed(0, [value for value in held if isinstance(value, GENERATORS)])
        return samples


def _collate_and_show(collate: Callable[[Any], Any], file: Path, samples: list[Any]) -> Any:
    """Collate samples; write a few of them to a file that is there and empty."""
    worker = get_worker_info()
    if (worker is None or worker.id == 0) and file.exists() and not file.stat().st_size:
        few = attempt(lambda: pickle.dumps([copied(sample) for sample in samples[:_FEW]]), lambda _: True)
        file.write_bytes(few.result or pickle.dumps([]))
    return collate(samples)


def spread(size: int) -> Iterator[int]:
    """Yield the places of a sequence so that the first few of them are spread irregularly over all of it."""
    steps = range(max(1, round(_GOLDEN * size)), size + 1)
    step = next((step for step in steps if gcd(step, size) == 1), 1)
    return (number * step % size for number in range(size))
