"""Read and collate samples of the user's loader outside training, which goes on as if none had been read."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from math import gcd
from types import CellType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from lightning_ga.batch.pytree import same_values
from lightning_ga.errors import UserError
from lightning_ga.loading.rebatch import PeekableStream, copy_loader, keeps_place, length_of
from lightning_ga.loading.sampler import seeded
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.snapshot.contents import ObjectState, contained, is_of_loader, reachable
from lightning_ga.snapshot.random_numbers import RandomState

_BATCHES = 64  # that a collate function makes of the same samples, if it changes attributes of its own
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, less their whole part, are spread irregularly and evenly


def spread(size: int) -> Iterator[int]:
    """Yield the places of a sequence: any number of them is from all over it, as regular ones may be broken.

    Examples:
        >>> list(spread(10))
        [0, 7, 4, 1, 8, 5, 2, 9, 6, 3]
    """
    steps = range(max(1, round(_GOLDEN * size)), size + 1)
    step = next((step for step in steps if gcd(step, size) == 1), 1)
    return (number * step % size for number in range(size))


def collect_samples(loader: "DataLoader[Any]", indices: list[Any], *, seed: int = 0) -> list[Any]:
    """Return the samples of some indices, not collated; random numbers are drawn from a seed."""
    return read_samples(loader, indices, seed=seed)[0]


def read_samples(loader: "DataLoader[Any]", indices: list[Any], *, seed: int = 0) -> tuple[list[Any], bool]:
    """Return the samples of some indices, not collated, and whether reading them drew random numbers here."""
    with fetched(loader, [indices], list, seed=seed) as found:
        before = RandomState()
        return list(next(found, [])), not before.is_current()


def are_made_by(model: torch.nn.Module, loader: Any) -> bool:
    """Return whether a dataset holds a part of a model, or a method of it: samples may depend on when they are read."""
    if getattr(loader, "num_workers", 0):
        return False  # workers have a copy of it
    held = [*reachable(getattr(loader, "dataset", None))]
    behind = [getattr(each, "__self__", None) for each in held]
    cells = [cell for each in held for cell in getattr(each, "__closure__", None) or ()]
    behind += [cell.cell_contents for cell in cells if cell != CellType()]  # an empty one has no contents
    parts = set(map(id, model.modules()))
    return any(id(each) in parts for each in chain(held, *map(reachable, behind)))


class FirstSamples:
    """The samples that are looked at before training: read once for all who ask, as data workers take time to start."""

    def __init__(self, loader: "DataLoader[Any]", indices: list[Any], found: Sequence[Any] = ()) -> None:
        self._loader, self._indices, self._found = loader, indices, list(found)

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, least: int | None = None, *, most: int | None = None, seconds: float = 0.0) -> list[Any]:
        """Return the first ``least`` samples, all by default, and as many as ``seconds`` allow up to ``most``."""
        least = len(self) if least is None else least
        most = least if most is None else most
        if len(self._found) < min(most, len(self)):
            self._read_on(least, most, seconds)
        return self._found[:most]

    def as_fetched(self, samples: list[Any]) -> Sequence[Any]:
        """Return some of these samples; slices hold what the dataset reads for them, if that depends on which they are.

        Batched transforms pad to the longest of those that are read at once (``__getitems__``).
        """
        dataset: Any = self._loader.dataset
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        if not hasattr(dataset, "__getitems__") or isinstance(dataset, (StackDataset, IterableDataset)):
            return samples
        places = {id(sample): index for index, sample in zip(self._indices, self._found)}
        together = Together(self._loader, [places[id(sample)] for sample in samples])
        return samples if all(map(same_values, together, samples)) else together

    @uncounted()  # samples lie on the host
    def _read_on(self, least: int, most: int, seconds: float) -> None:
        started = time.monotonic()
        if isinstance(self._loader.dataset, IterableDataset):
            self._found = []
        known = len(self._found)
        at_once, singly = self._indices[known:least], self._indices[max(known, least) : most]
        lists = [indices for indices in (at_once, *([index] for index in singly)) if indices]
        with fetched(self._loader, lists, list) as reads:
            for samples in reads:
                self._found += samples
                if len(self._found) >= least and time.monotonic() - started > seconds:
                    break


class Together(Sequence[Any]):
    """Samples that are read together, and a slice of them once more by itself."""

    def __init__(self, loader: "DataLoader[Any]", indices: list[Any]) -> None:
        self._loader, self._indices = loader, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: Any) -> Any:
        return Together(self._loader, self._indices[place]) if isinstance(place, slice) else self._samples[place]

    @cached_property
    def _samples(self) -> list[Any]:
        return collect_samples(self._loader, self._indices)


@contextmanager
def fetched(
    loader: "DataLoader[Any]",
    batches: Iterable[list[Any]],
    read: Callable[[list[Any]], Any],
    *,
    workers: int = 1,
    seed: int = 0,
) -> Iterator[Iterator[Any]]:
    """Return a context that reads ``read(samples)`` for each list of indices; training goes on as if it had not.

    If the loader has workers, separate ones read: files that a dataset opens on first use must not be open in this
    process when training starts its workers.
    """
    dataset, settings = loader.dataset, dict[str, Any](collate_fn=read, pin_memory=False)
    if loader.num_workers:
        settings |= {"num_workers": workers, "prefetch_factor": 1, "timeout": loader.timeout}
    elif isinstance(dataset, IterableDataset):
        dataset = _fresh_stream(dataset)
    with untouched(dataset, seed=seed):
        yield DataLoader.__iter__(_reading_copy(loader, batches, dataset=dataset, **settings))


class _Batches(list[list[int]]):
    """A batch sampler that is its own sampler: loaders that repeat theirs for ever ask that for its length."""

    @property
    def sampler(self) -> "_Batches":
        return self


def collate_samples(loader: "DataLoader[Any]", samples: Sequence[Any], count: int, *, seed: int = 0) -> Any:
    """Return a batch of ``count`` samples as the loader makes it, repeating the given ones in turn."""
    with uncounted():  # copies, as a collate_fn may change its input; they lie on the host
        copies = [copied(samples[position % len(samples)]) for position in range(count)]
    with untouched(getattr(loader.collate_fn, "__self__", loader.collate_fn), seed=seed):
        # Its own iterator would move its position, or go on with the one that it holds, as in YOLO and timm.
        holds_one = any(map(is_of_loader, vars(loader).values()))
        read = DataLoader.__iter__ if keeps_place(loader) or holds_one else iter
        batches = _Batches([list(range(count))])
        return next(read(_reading_copy(loader, batches, dataset=copies, _dataset_kind=_MAP_STYLE)))


def counts_batches(loader: "DataLoader[Any]", samples: Sequence[Any]) -> bool:
    """Return whether a collate function makes something else of the same samples later, as it counts its batches."""
    function = loader.collate_fn
    owner = getattr(function, "__self__", function)
    held, own = [*reachable(owner)], getattr(owner, "__dict__", {})

    def collate() -> Any:
        with seeded(0, 0, *held):  # what it draws is no matter
            return function([copied(sample) for sample in samples])

    with untouched(owner):
        before, first = dict(own), collate()
        has_changed = own.keys() != before.keys() or any(own[name] is not value for name, value in before.items())
        return has_changed and not all(same_values(first, collate()) for _ in range(_BATCHES))


def copied(sample: Any) -> Any:
    """Return a deep copy; of a tensor that is a view, only what it shows and not its whole storage.

    Nested tensors are cloned: no layer can differentiate deep copies of theirs (PyTorch 2.15).
    """
    seen: set[int] = set()
    places = [sample, *map(vars, reachable(sample))]
    inner = [value for place in places for value in contained(place, seen) if isinstance(value, torch.Tensor)]
    return copy.deepcopy(sample, {id(tensor): tensor.clone() for tensor in inner if _is_cloned(tensor)})


def copied_if_possible(batch: Any) -> Any:
    """Return a copy of a batch, or the batch if it cannot be copied: it may hold anything."""
    try:
        return copied(batch)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return batch


def _is_cloned(tensor: torch.Tensor) -> bool:
    if tensor.is_nested or type(tensor) is not torch.Tensor:
        return tensor.is_nested
    if tensor.layout is not torch.strided:
        return False
    return tensor._is_view() or tensor.untyped_storage().nbytes() > tensor.nbytes


@contextmanager
def untouched(data: object, *, seed: int = 0) -> Iterator[None]:
    """Return a context in which samples may be read: counters, caches and random numbers are restored at its end."""
    found = list(reachable(data))
    state = ObjectState(part for part in found if part is data or isinstance(part, Dataset))
    try:
        with seeded(seed, seed, *found):
            yield
    finally:
        state.restore()


_MAP_STYLE = DataLoader(TensorDataset(torch.zeros(1)))._dataset_kind


def _reading_copy(loader: "DataLoader[Any]", batches: Iterable[list[Any]], **settings: Any) -> "DataLoader[Any]":
    plain = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0, "drop_last": False}
    generator = torch.Generator()
    return copy_loader(loader, batch_sampler=batches, sampler=range(0), generator=generator, **(plain | settings))


def peekable(loader: Any) -> Any:
    """Return a loader whose stream can be read ahead without loss for training; any other loader as it is.

    A copy of a stream may be read at will. A stream that cannot be copied (open files, generators) is
    read in the process that trains, and its first samples are kept for training.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not isinstance(dataset, IterableDataset) or loader.num_workers:
        return loader
    try:
        copy.deepcopy(dataset)
    except Exception:  # whatever a dataset may hold
        if isinstance(dataset, Iterator):
            return loader
        return copy_loader(loader, dataset=PeekableStream(partial(iter, dataset), length_of(dataset), dataset))
    return loader


def _fresh_stream(dataset: Any) -> Any:
    """Return a stream whose samples can be read without loss for training."""
    if isinstance(dataset, PeekableStream):
        return PeekableStream(dataset.peeked)
    try:
        return copy.deepcopy(dataset)
    except Exception:
        raise UserError(
            f"The stream of {type(dataset).__name__} can be read only once, so the probe cannot look at its samples "
            "without losing them: give micro_batch_size=… to do without a probe."
        ) from None
