"""Read a user's DataLoader and copy it with other batches, without calling its constructor.

Lightning re-creates loaders from captured arguments, which fails for subclasses with arguments of their own and for
custom batch samplers. A shallow copy keeps everything, and the user's own loader stays untouched. A stream can be read
ahead of training, which still gets every item.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ga.errors import UserError
from lightning_ga.loading.sampler import (
    FromBatches,
    FromSampler,
    Order,
    Sequential,
    Shuffled,
    Stream,
    WindowBatchSampler,
)

_END = object()
MOST = 64  # items that are held


def length_of(data: Any) -> int | None:
    """Return the length of a dataset; ``None`` if that is not known."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # as Lightning asks
        return None


class PeekableStream(IterableDataset[Any]):
    """A stream that can be read ahead, started once per epoch, as its source may continue where it was left.

    Other attributes are looked up at the dataset that it stands for, ``of``.
    """

    def __init__(self, start: Callable[[], Iterator[Any]], length: int | None = None, of: Any = None) -> None:
        self._start, self._length, self._of = start, length, of
        self._waiting: Iterator[Any] | None = None
        self._peeked: list[Any] = []
        self._begun = False

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("a stream of unknown length has no len()")
        return self._length

    def peek(self, most: int) -> list[Any]:
        """Return the first items of the next epoch, which still yields them; none once training reads the stream."""
        if self._begun:
            return []
        waiting = self._started()
        while len(self._peeked) < min(most, MOST) and (item := next(waiting, _END)) is not _END:
            self._peeked.append(item)
        return self._peeked[:most]

    def peeked(self) -> Iterator[Any]:
        """Yield these items one by one, reading each when it is asked for."""
        number = 0
        while len(self.peek(number + 1)) > number:
            yield self._peeked[number]
            number += 1

    def __iter__(self) -> Iterator[Any]:
        self._started()
        return self._read()

    def _started(self) -> Iterator[Any]:
        self._waiting = self._start() if self._waiting is None else self._waiting
        return self._waiting

    def _read(self) -> Iterator[Any]:
        items = self._started()
        peeked, self._peeked, self._waiting, self._begun = self._peeked, [], None, True
        while peeked:
            yield peeked.pop(0)
        yield from items

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._of is None:
            raise AttributeError(name)
        return getattr(self._of, name)


class WholeBatches(IterableDataset[Any]):
    """A stream without the incomplete batch of ``size`` samples at its end, which its loader drops.

    It stands for its dataset where data workers inspect that: all other attributes are the dataset's.
    """

    def __init__(self, dataset: Any, size: int) -> None:
        vars(self).update(_of=dataset, _size=size)

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._of)
        while len(batch := list(islice(samples, self._size))) == self._size:
            yield from batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_of" not in vars(self):
            raise AttributeError(name)
        return getattr(self._of, name)

    def __len__(self) -> int:
        return len(self._of)

    def __reduce__(self) -> Any:
        return WholeBatches, (self._of, self._size)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._of) if "_of" in vars(self) else WholeBatches

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of, name, value)


def keeps_place(loader: Any) -> bool:
    """Return whether a loader saves and restores its position."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(frozen=True, slots=True)
class LoaderRecipe:
    """The order and the batches of an epoch, read from a DataLoader."""

    order: Order
    batch_size: int | None  # on one rank; None where a custom batch sampler decides
    drop_last: bool
    shared: bool  # whether the order is that of all ranks together; otherwise each rank has its own


def read_loader(
    loader: object, *, world_size: int, shard: bool = True, shuffle: bool = True, shuffles: bool = False
) -> LoaderRecipe:
    """Read order, batch size and sharding from a loader; refuse one whose batches cannot be made anew.

    ``shard``: whether the trainer may share one order among ranks (``Trainer(use_distributed_sampler=…)``);
    ``shuffle`` is false if the trainer asks for the order of the dataset (``overfit_batches``); ``shuffles``: whether
    it shuffles any other, as stock Lightning does where it gives each of several ranks a share.
    """
    if not isinstance(loader, DataLoader):
        raise UserError(f"The training data is a {type(loader).__name__} and not one torch.utils.data.DataLoader.")
    if loader.batch_sampler is None:
        raise UserError("The training DataLoader has batch_size=None, so that its dataset yields whole batches.")
    if keeps_place(loader):
        raise UserError("The training DataLoader saves and restores its place, in batches of its own.")
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return LoaderRecipe(Stream(length_of(dataset)), loader.batch_size, loader.drop_last, shared=world_size == 1)
    batch_sampler = loader.batch_sampler
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is not BatchSampler:
        _require_length(batch_sampler, "batch sampler")
        shared = (shard and not isinstance(sampler, DistributedSampler)) or world_size == 1
        return LoaderRecipe(FromBatches(batch_sampler, runs_out=loader.num_workers > 0), None, False, shared)
    if not shuffle and loader.batch_size is not None:  # a batch sampler that was given stays, as in Lightning
        return LoaderRecipe(Sequential(len(dataset)), loader.batch_size, loader.drop_last, shared=True)
    order, shared = _read_sampler(loader, sampler, world_size, shard=shard or world_size == 1, shuffles=shuffles)
    return LoaderRecipe(order, batch_sampler.batch_size, batch_sampler.drop_last, shared)


def rebatch(
    loader: "DataLoader[Any]", batch_sampler: WindowBatchSampler, *, sized: bool = True, shuffle: bool = True
) -> "DataLoader[Any]":
    """Copy a loader so that it yields the micro-batches of a window batch sampler."""
    settings: dict[str, Any] = {"batch_sampler": batch_sampler, "generator": batch_sampler.generator}
    if not shuffle:
        # Lightning re-creates loaders whose sampler looks shuffled under ``overfit_batches``.
        settings["sampler"] = SequentialSampler(range(batch_sampler.order.size or 0))
    if isinstance(loader.dataset, IterableDataset) and loader.drop_last and loader.batch_size:
        settings["dataset"] = WholeBatches(loader.dataset, loader.batch_size)
    methods: dict[str, Any] = {}
    if sized and (isinstance(loader.dataset, IterableDataset) or type(loader).__len__ is not DataLoader.__len__):
        methods["__len__"] = lambda _: len(batch_sampler)
    if loader.num_workers:  # no worker starts for the loop's first iter(), which fetches nothing
        started = type(loader).__iter__

        def start(copied: "DataLoader[Any]") -> Iterator[Any]:
            if batch_sampler.enabled:
                return started(copied)
            empty = iter(batch_sampler)
            torch.empty((), dtype=torch.int64).random_(generator=copied.generator)  # the workers' seed
            return empty

        methods["__iter__"] = start
    return copy_loader(loader, methods, drop_last=False, **settings)


def copy_loader(
    loader: "DataLoader[Any]", methods: Mapping[str, Any] | None = None, **settings: Any
) -> "DataLoader[Any]":
    """Return a shallow copy of a loader of any class, with some attributes replaced and methods of its own."""
    clone = copy.copy(loader)  # DataLoader refuses to have its batch sampler set
    for name, value in {"_iterator": None, "_IterableDataset_len_called": None, **settings}.items():
        object.__setattr__(clone, name, value)
    if methods:
        cls = type(loader)
        object.__setattr__(clone, "__class__", type(cls.__name__, (cls,), dict(methods)))
    return clone


def _read_sampler(loader: Any, sampler: Any, world_size: int, *, shard: bool, shuffles: bool) -> tuple[Order, bool]:
    """Return the order, and whether all ranks share it: by the sampler itself, or because the trainer may shard it."""
    if type(sampler) is SequentialSampler:
        size = len(sampler.data_source)
        return Shuffled(size) if shuffles else Sequential(size), shard
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        own = sampler.generator
        return Shuffled(len(sampler), None if own is None else own.initial_seed()), shard
    if type(sampler) is DistributedSampler and sampler.num_replicas == world_size:
        # Its ranks take samples in turn from one order; windows of that order need no padding to equal shares.
        whole = len(sampler.dataset)  # type: ignore[arg-type]
        size = whole - whole % world_size if sampler.drop_last else whole
        if sampler.shuffle:
            return Shuffled(size, sampler.seed, whole=whole), True
        return Sequential(size), True
    _require_length(sampler, "sampler")
    size, batches = len(sampler), loader.batch_sampler
    # The loader asks for more than there is: workers fetch ahead, and a last batch is not full.
    runs_out = loader.num_workers > 0 or (not batches.drop_last and size % batches.batch_size > 0)
    shares = isinstance(sampler, DistributedSampler)
    return FromSampler(sampler, size, runs_out=runs_out, shuffles=shuffles and not shares), shard and not shares


def _require_length(sampler: Iterable[Any], what: str) -> None:
    if not isinstance(sampler, Sized):
        raise UserError(
            f"The training DataLoader's {what} {type(sampler).__name__} has no len(), so its epoch cannot be cut into "
            "windows: give it a __len__ that returns what it yields in one epoch."
        )
