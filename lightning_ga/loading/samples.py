"""Read and collate samples of the user's loader outside of training, and leave no trace in training."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import gcd
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.loading.orders import seeded
from lightning_ga.loading.rebatch import copy_loader
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.snapshot.copies import refill

SAMPLES_PER_READ = 8
_COPIED = 100_000  # entries of a container that is put back: longer ones are data
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, less their whole part, are spread irregularly and evenly
_MAP_STYLE = DataLoader(TensorDataset(torch.zeros(1)))._dataset_kind


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
    dataset, settings = loader.dataset, dict[str, Any](collate_fn=read, pin_memory=False)
    if loader.num_workers:
        settings |= {"num_workers": workers, "prefetch_factor": 1, "timeout": loader.timeout}
    elif isinstance(dataset, IterableDataset):
        dataset = copy.deepcopy(dataset)
    with untouched(dataset):
        yield DataLoader.__iter__(_reading_copy(loader, batches, dataset=dataset, **settings))


def collate_samples(loader: "DataLoader[Any]", samples: Sequence[Any], count: int, *, seed: int = 0) -> Any:
    """Return a batch of ``count`` samples as the loader makes it, repeating the given ones in turn."""
    with uncounted():  # copies, as a collate_fn may change its input; they lie on the host
        copies = [copied(samples[position % len(samples)]) for position in range(count)]
    with untouched(getattr(loader.collate_fn, "__self__", loader.collate_fn), seed=seed):
        batches = [list(range(count))]
        read = _reading_copy(loader, batches, dataset=copies, _dataset_kind=_MAP_STYLE)
        return next(DataLoader.__iter__(read))


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
