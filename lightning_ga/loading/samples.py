"""Read and collate samples of the user's loader outside of training, and leave no trace in training."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import gcd
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from lightning_ga.batch.layout import elements
from lightning_ga.batch.pytree import tensors_in
from lightning_ga.loading.orders import seeded
from lightning_ga.loading.rebatch import copy_loader
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import attempt, is_out_of_memory
from lightning_ga.snapshot.copies import refill

SAMPLES_PER_READ = 8
_COPIED = 100_000  # entries of a container that is put back: longer ones are data
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, less their whole part, are spread irregularly and evenly
_MAP_STYLE = DataLoader(TensorDataset(torch.zeros(1)))._dataset_kind


@dataclass(frozen=True)
class Read:
    """A sample that only a batch shows: its index, and what the dataset reads of it alone, if it can be read alone."""

    index: Any
    alone: Any = None


class _OneByOne:
    """Reads the samples of a dataset whose ``__getitems__`` may return a batch of them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._lists_samples: bool | None = None  # none before it was seen

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        if self._lists_samples is None:
            numbers = (indices[:1], indices[:1] * 2)  # a batch of one or of two fields is no list of both lengths
            self._lists_samples = all(_is_list(self._dataset.__getitems__(some), len(some)) for some in numbers)
        if self._lists_samples:
            return list(self._dataset.__getitems__(indices))
        return [Read(index, self._dataset.__getitems__([index])) for index in indices]


def _is_list(found: Any, length: int) -> bool:
    return isinstance(found, (list, tuple)) and len(found) == length


def spread(size: int) -> Iterator[int]:
    """Yield the places of a sequence so that the first few of them are spread irregularly over all of it."""
    steps = range(max(1, round(_GOLDEN * size)), size + 1)
    step = next((step for step in steps if gcd(step, size) == 1), 1)
    return (number * step % size for number in range(size))


def collect_samples(loader: "DataLoader[Any]", indices: list[Any]) -> list[Any]:
    """Return the samples of some indices, not collated."""
    with fetched(loader, [indices], list) as found:
        return list(next(found, []))


@contextmanager
def fetched(
    loader: "DataLoader[Any]", batches: Iterable[list[Any]], read: Callable[[list[Any]], Any], *, workers: int = 1
) -> Iterator[Iterator[Any]]:
    """Return a context that yields ``read(samples)`` for each list of indices, and leaves no trace in training.

    If the loader has workers, separate ones read: files that a dataset opens on first use must not be open in this
    process when training starts its workers. A stream is copied; an error of copying is raised.
    """
    dataset: Any = loader.dataset
    if type(loader)._get_iterator is not DataLoader._get_iterator and not isinstance(dataset, IterableDataset):
        # It may finish batches, or change them.
        yield (read([Read(index) for index in indices]) for indices in batches)
        return
    settings = dict[str, Any](collate_fn=read, pin_memory=False)
    if loader.num_workers:
        settings |= {"num_workers": workers, "prefetch_factor": 1, "timeout": loader.timeout}
    elif isinstance(dataset, IterableDataset):
        dataset = copy.deepcopy(dataset)
    if loader.collate_fn is not default_collate and callable(getattr(dataset, "__getitems__", None)):
        settings["dataset"] = _OneByOne(dataset)
    with untouched(dataset):
        yield DataLoader.__iter__(_reading_copy(loader, batches, **{"dataset": dataset, **settings}))


def collate_samples(loader: "DataLoader[Any]", samples: Sequence[Any], count: int, *, seed: int = 0) -> Any:
    """Return a batch of ``count`` samples as the loader makes it, repeating the given ones in turn."""
    chosen = [samples[position % len(samples)] for position in range(count)]
    batches: list[list[Any]] = [[each.index if isinstance(each, Read) else place for place, each in enumerate(chosen)]]
    dataset: Any = loader.dataset
    if not any(isinstance(each, Read) for each in chosen):
        with uncounted():  # copies, as a collate_fn may change its input; they lie on the host
            dataset = [copied(each) for each in chosen]
    with untouched(dataset), untouched(getattr(loader.collate_fn, "__self__", loader.collate_fn), seed=seed):
        read = _reading_copy(loader, batches, dataset=dataset, _dataset_kind=_MAP_STYLE)
        return next(DataLoader.__iter__(read))


def is_kept(loader: "DataLoader[Any]", sample: Any) -> bool:
    """Return whether the collate function makes a batch of a sample, and does not leave it out."""
    if sample is None or loader.collate_fn is default_collate:
        return sample is not None
    outcome = attempt(collate_samples, lambda error: not is_out_of_memory(error), loader, [sample], 2)
    return outcome.result is not None and elements(outcome.result) > 0


def copied(sample: Any) -> Any:
    """Return a deep copy; of a tensor that is a view, only what it shows and not its whole storage.

    Nested tensors are cloned: autograd fails on deep copies of them (PyTorch 2.15).
    """
    return copy.deepcopy(sample, {id(tensor): tensor.clone() for tensor in tensors_in(sample) if _is_cloned(tensor)})


def copied_if_possible(batch: Any) -> Any:
    """Return a copy of a batch, because steps may remove labels from it; the batch itself if it cannot be copied."""
    try:
        return copied(batch)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return batch


def _is_cloned(tensor: torch.Tensor) -> bool:
    if tensor.is_nested or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor.is_nested
    return tensor._is_view() or tensor.untyped_storage().nbytes() > tensor.nbytes


def datasets_in(data: Any) -> list[Any]:
    """Return a dataset and those that it contains, alone or in a list, at any depth."""
    found, pending = dict[int, Any](), [data]
    while pending:
        each = pending.pop()
        if id(each) not in found and isinstance(getattr(each, "__dict__", None), dict):
            found[id(each)] = each
            held = vars(each).values()
            lists = (value for value in held if isinstance(value, (list, tuple)) and len(value) < SAMPLES_PER_READ**3)
            pending += [value for value in chain(held, *lists) if isinstance(value, Dataset)]
    return list(found.values())


@contextmanager
def untouched(data: object, *, seed: int = 0) -> Iterator[None]:
    """Return a context in which samples may be read or collated, their random numbers drawn from a seed.

    Attributes and small containers of the object, and of datasets that it contains, are put back at its end.
    """
    found = datasets_in(data)
    attributes = [(vars(each), dict(vars(each))) for each in found]
    held = [value for _, before in attributes for value in before.values()]
    caches = [(value, copy.copy(value)) for value in held if type(value) in (dict, list, set) and len(value) < _COPIED]
    try:
        with seeded(seed, *found):
            yield
    finally:
        for own, before in attributes:
            refill(own, before)
        for cache, before in caches:
            refill(cache, before)


def _reading_copy(loader: "DataLoader[Any]", batches: Iterable[list[Any]], **settings: Any) -> "DataLoader[Any]":
    plain = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0, "drop_last": False}
    generator = torch.Generator()
    return copy_loader(loader, batch_sampler=batches, sampler=range(0), generator=generator, **(plain | settings))
