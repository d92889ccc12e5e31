"""Read a user's DataLoader and copy it with other batches, without calling its constructor.

Lightning re-creates loaders from captured arguments, which fails for subclasses with arguments of their own. A shallow
copy keeps everything, and the user's own loader stays untouched.
"""

import copy
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_ga.loading.orders import FromSampler, Order, Sequential, Shuffled
from lightning_ga.loading.sampler import WindowBatchSampler
from lightning_ga.snapshot.random_numbers import own_generators, seed_of


def _of_the_only_rank(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Settings of a Trainer for its training data."""

    recipe_factor: int  # ``Trainer(accumulate_grad_batches=…)`` as the user wrote it
    world_size: int  # data-parallel ranks
    rank: int
    seed: int  # of the epochs' orders, the same on every rank
    limit_batches: int | float = 1.0  # ``Trainer(limit_train_batches=…)``: of the recipe's batches
    shard: bool = True  # whether the trainer may share one order among ranks (``use_distributed_sampler``)
    may_shuffle: bool = True  # false if the trainer asks for the order of the dataset (``overfit_batches``)
    must_shuffle: bool = False  # whether it shuffles whatever the loader says, as it does on several ranks
    epoch: int = 0  # that the data are set up in
    of_first_rank: Callable[[Any], Any] = _of_the_only_rank  # returns the first rank's value; all ranks call it


def length_of(data: Any) -> int | None:
    """Return the length of a dataset; ``None`` if that is not known."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # as Lightning asks
        return None


def collates(loader: Any) -> bool:
    """Return whether a loader makes its batches of samples as torch's own does."""
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return is_plain and loader.batch_sampler is not None


def finishes_batches(loader: "DataLoader[Any]") -> bool:
    """Return whether a loader may finish its batches after they were collated."""
    return type(loader)._get_iterator is not DataLoader._get_iterator


def has_own_collate(loader: Any) -> bool:
    """Return whether collating may drop samples, or make tensors of text: torch's own function does not."""
    return loader.collate_fn is not default_collate


def why_in_step(loader: Any) -> str:
    """Return why the batches of a loader can only be cut in the step; empty if they can be cut in the loader."""
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        if isinstance(loader, (dict, list, tuple)) or hasattr(loader, "iterables"):
            return "several loaders"
        return f"a {kind.__name__} that is no DataLoader"
    if loader.batch_sampler is None:
        return "batch_size=None"
    if isinstance(loader.dataset, IterableDataset):
        return "an iterable dataset"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"a batch sampler of its own ({type(loader.batch_sampler).__name__})"
    if kind.__iter__ is not DataLoader.__iter__ or kind.__len__ is not DataLoader.__len__:
        return f"a DataLoader with an __iter__ or __len__ of its own ({kind.__name__})"
    if all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        return "a loader that saves its place"
    if length_of(loader.dataset) is None and isinstance(loader.batch_sampler.sampler, SequentialSampler):
        return "a dataset without len()"
    if not isinstance(loader.batch_sampler.sampler, Sized):
        return f"a sampler without len() ({type(loader.batch_sampler.sampler).__name__})"
    return ""


def read_order(loader: "DataLoader[Any]", settings: SourceSettings) -> Order | None:
    """Return the order that all ranks share; ``None`` if each has one of its own.

    Datasets may change their length from epoch to epoch, so orders ask for it.
    """
    batches: Any = loader.batch_sampler
    sampler = batches.sampler
    world_size = settings.world_size
    if not settings.may_shuffle and not isinstance(sampler, SequentialSampler):  # Lightning replaces others
        return Sequential(partial(len, loader.dataset))  # type: ignore[arg-type]
    if type(sampler) is DistributedSampler and sampler.num_replicas == world_size:
        # Its ranks read samples in turn from one order; windows of that order need no padding to equal shares.
        length = partial(len, sampler.dataset)  # type: ignore[arg-type]
        multiple = world_size if sampler.drop_last else 1
        if sampler.shuffle:
            return Shuffled(length, sampler.seed, multiple=multiple)
        return Sequential(length, multiple=multiple)
    if world_size > 1 and (isinstance(sampler, DistributedSampler) or not settings.shard):
        return None
    if type(sampler) is SequentialSampler:
        length = partial(len, sampler.data_source)
        if settings.must_shuffle and settings.may_shuffle:
            return Shuffled(length, settings.seed)
        return Sequential(length)
    # Each rank may have seeded its own generators differently.
    seeds = settings.of_first_rank([*map(seed_of, own_generators(sampler))])
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return Shuffled(partial(len, sampler), [*seeds, settings.seed][0])
    # Lightning leaves a DistributedSampler as it is; here there is one on a single rank.
    shuffles = settings.must_shuffle and settings.may_shuffle and not isinstance(sampler, DistributedSampler)
    batch = 1 if batches.drop_last else batches.batch_size  # to which the length is rounded up
    return FromSampler(sampler, loader.dataset, seed=settings.seed, seeds=seeds, batch=batch, shuffles=shuffles)


def rebatch(
    loader: "DataLoader[Any]",
    sampler: WindowBatchSampler,
    *,
    shuffle: bool = True,
    fill: Callable[[Iterator[Any]], Iterator[Any]] = iter,
) -> "DataLoader[Any]":
    """Copy a loader so that it yields the micro-batches of a window batch sampler, in the order of that sampler.

    ``fill`` gets what each iteration yields, and returns what the loop shall get.

    Windows and weights are planned in this order, so ``in_order=False`` (PyTorch 2.6) is not kept.

    ``iter`` draws a seed for data workers, which has to move the user's generator once, as in stock Lightning. The loop
    begins with a dry run, before the limit is known, that yields nothing: it moves the generator. The first real
    iteration draws the same seed from a copy of the generator as it was ``before_dry_run``, and forgets the copy.
    ``LoaderWindows._read_first`` iterates before training, and puts the copy back.
    """
    settings: dict[str, Any] = {"batch_sampler": sampler, "drop_last": False, "in_order": True}
    if not shuffle:  # Lightning re-creates loaders whose sampler looks shuffled under ``overfit_batches``
        settings["sampler"] = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    copied = copy_loader(loader, **settings)
    kind = type(loader)

    def begin(self: Any) -> Iterator[Any]:
        users_generator = self.generator
        if not sampler.enabled:  # the dry run
            self.before_dry_run = torch.Generator()
            self.before_dry_run.set_state((users_generator or torch.default_generator).get_state())
            torch.empty((), dtype=torch.int64).random_(generator=users_generator)
            return iter(())
        self.generator = self.before_dry_run or users_generator
        self.before_dry_run = None
        try:
            return fill(kind.__iter__(self))
        finally:
            self.generator = users_generator

    object.__setattr__(copied, "__class__", type(kind.__name__, (kind,), {"__iter__": begin, "before_dry_run": None}))
    return copied


def copy_loader(loader: "DataLoader[Any]", **settings: Any) -> "DataLoader[Any]":
    """Return a shallow copy of a loader of any class, with some attributes replaced."""
    clone = copy.copy(loader)
    for name, value in {"_iterator": None, "_IterableDataset_len_called": None, **settings}.items():
        object.__setattr__(clone, name, value)  # DataLoader refuses to have its batch sampler set
    return clone
