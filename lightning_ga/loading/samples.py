"""Samples of a user's loader, read and collated aside from training, which goes on as if none was read."""

import copy
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_ga.errors import UserError
from lightning_ga.loading.peekable import PeekableStream, length_of, peekable_stream
from lightning_ga.loading.rebatch import copy_loader
from lightning_ga.loading.sampler import seeded
from lightning_ga.loading.stateful import keeps_place
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.snapshot.contents import ObjectState, contained, reachable


def collect_samples(loader: "DataLoader[Any]", indices: list[Any]) -> list[Any]:
    """The samples behind some indices, not yet collated."""
    with closing(fetch(loader, [indices], list)) as found:
        return list(next(found, []))


def fetch(
    loader: "DataLoader[Any]", batches: Iterable[list[Any]], read: Callable[[list[Any]], Any], *, workers: int = 1
) -> Generator[Any, None, None]:
    """What ``read`` says of the samples behind each list of indices; training goes on as if none was fetched.

    Where the user has workers others of the kind fetch: files that a dataset opens on first use must
    not be open in this process when training starts its workers.

    Args:
        loader: The user's loader.
        batches: Indices to fetch at once.
        read: Takes samples, in the process that fetches them.
        workers: How many fetch, where the user has any.
    """
    dataset, settings = loader.dataset, dict[str, Any](collate_fn=read, pin_memory=False)
    if loader.num_workers:
        settings |= {"num_workers": workers, "prefetch_factor": 1, "timeout": loader.timeout}
    elif isinstance(dataset, IterableDataset):
        dataset = _fresh_stream(dataset)
    with untouched(dataset):
        yield from DataLoader.__iter__(_apart(loader, batches, dataset=dataset, **settings))


def collate_samples(loader: "DataLoader[Any]", samples: list[Any], count: int, *, seed: int = 0) -> Any:
    """A batch of ``count`` samples as the loader makes it, repeating the given ones in turn.

    Args:
        loader: The user's loader.
        samples: Samples of its dataset.
        count: How many the batch holds.
        seed: Of the random numbers that the collate function draws.
    """
    with uncounted():  # a collate_fn may change what it is given; on a device samples lie on the host
        copies = [_copied(samples[position % len(samples)]) for position in range(count)]
    with untouched(getattr(loader.collate_fn, "__self__", loader.collate_fn), seed=seed):
        read = DataLoader.__iter__ if keeps_place(loader) else iter  # the place is not that of these samples
        return next(read(_apart(loader, [list(range(count))], dataset=copies, _dataset_kind=_MAP_STYLE)))


def _copied(sample: Any) -> Any:
    """A deep copy; of a tensor that is a view, of what it shows alone and not of a whole dataset behind it."""
    seen: set[int] = set()
    places = [sample, *map(vars, reachable(sample))]
    inner = [value for place in places for value in contained(place, seen) if type(value) is torch.Tensor]
    views = [t for t in inner if t.layout is torch.strided and t.untyped_storage().nbytes() > t.nbytes]
    return copy.deepcopy(sample, {id(view): view.clone() for view in views})


@contextmanager
def untouched(data: object, *, seed: int = 0) -> Iterator[None]:
    """Within, samples may be read: counters, caches and random numbers are put back at the end."""
    within = list(reachable(data))
    state = ObjectState(thing for thing in within if thing is data or isinstance(thing, Dataset))
    try:
        with seeded(seed, seed, *within):
            yield
    finally:
        state.restore()


_MAP_STYLE = DataLoader(TensorDataset(torch.zeros(1)))._dataset_kind


def _apart(loader: "DataLoader[Any]", batches: Iterable[list[Any]], **settings: Any) -> "DataLoader[Any]":
    alone = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0, "drop_last": False}
    generator = torch.Generator()
    return copy_loader(loader, batch_sampler=batches, sampler=range(0), generator=generator, **(alone | settings))


def peekable(loader: Any) -> Any:
    """A loader whose stream can be looked into without training missing what was read; any other as it is.

    A copy of a stream may be read as far as one likes. What cannot be copied (open files, generators) is
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
        return copy_loader(loader, dataset=peekable_stream(partial(iter, dataset), length_of(dataset), dataset))
    return loader


def _fresh_stream(dataset: Any) -> Any:
    """A stream from which samples may be taken without the training missing them."""
    if isinstance(dataset, PeekableStream):
        return _Once(dataset.peeked)
    try:
        return copy.deepcopy(dataset)
    except Exception:
        raise UserError(
            f"The stream of {type(dataset).__name__} can be read only once, so the probe cannot look at its samples "
            "without losing them: give micro_batch_size=… to do without a probe."
        ) from None


class _Once(IterableDataset[Any]):
    """A stream of what a function yields."""

    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return self._read()
