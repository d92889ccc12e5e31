"""A loader of any make is read and copied with other batches, and is itself left alone."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from reference import SizedStreamOf, StreamOf
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_ga.errors import UserError
from lightning_ga.loading.rebatch import read_loader, rebatch
from lightning_ga.loading.sampler import FromBatches, WindowBatchSampler
from lightning_ga.loading.samples import collate_samples, collect_samples
from lightning_ga.plan.windows import EpochPlan, RegularWindows

SIZE = 11


class AtOnce(list[int]):
    """Fetches all samples of a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return list(indices)


class OnceOnly(IterableDataset[int]):
    """A stream that is its own iterator and cannot be copied: a socket, a generator."""

    def __init__(self) -> None:
        self.source = iter_numbers()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self.source)


class FixedArguments(DataLoader[int]):
    """A constructor that takes nothing of what DataLoader takes."""

    def __init__(self, flavour: str) -> None:
        super().__init__(range(SIZE), batch_size=3, shuffle=False)
        self.flavour = flavour


class Doubling(DataLoader[int]):
    """Changes what it yields, and computes its length in its own way."""

    def __iter__(self) -> Any:
        return (batch * 2 for batch in super().__iter__())

    def __len__(self) -> int:
        return 1000


class OwnBatches(BatchSampler):
    """A batch sampler of the user's own."""


def iter_numbers() -> Iterator[int]:
    yield from range(SIZE)


def collate(samples: list[int]) -> dict[str, torch.Tensor]:
    return {"n": torch.tensor(samples)}


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "keywords": lambda: DataLoader(range(SIZE), batch_size=3),
    "positions": lambda: DataLoader(range(SIZE), 3, False, None, None, 0, collate),
    "collated by the user": lambda: DataLoader(range(SIZE), 3, collate_fn=collate),
    "fetched at once": lambda: DataLoader(AtOnce(range(SIZE)), 3),
    "drop_last": lambda: DataLoader(range(SIZE), 3, drop_last=True),
    "subclass with arguments of its own": lambda: FixedArguments("sour"),
    "subclass that changes its batches": lambda: Doubling(range(SIZE), 3),
    "custom batch sampler": lambda: DataLoader(
        range(SIZE), batch_sampler=OwnBatches(SequentialSampler(range(SIZE)), 3, False)
    ),
    "list of batches": lambda: DataLoader(range(SIZE), batch_sampler=[[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10]]),
    "sampler": lambda: DataLoader(range(SIZE), 3, sampler=list(range(SIZE))),
    "workers": lambda: DataLoader(range(SIZE), 3, num_workers=1),
    "persistent workers": lambda: DataLoader(range(SIZE), 3, num_workers=1, persistent_workers=True, prefetch_factor=4),
    "stream": lambda: DataLoader(StreamOf(range(SIZE)), 3),
    "stream with a length": lambda: DataLoader(SizedStreamOf(range(SIZE)), 3),
}


def armed(loader: DataLoader[Any], *, size: int = 4, limit: int = 2, total: int | None = SIZE) -> WindowBatchSampler:
    """Windows of 4 in micro-batches of 2, of the order that was read off the loader."""
    order = read_loader(loader, world_size=1).order
    if isinstance(order, FromBatches):
        order.batches(0, 1)
    cut = WindowBatchSampler(order, share=0, seed=1)
    cut.arrange(0, EpochPlan(RegularWindows(total, size), limit, -(-size // limit), 1), enabled=True)
    return cut


def numbers(batches: Any) -> list[list[int]]:
    return [(batch["n"] if isinstance(batch, dict) else batch).tolist() for batch in batches]


@pytest.mark.parametrize("way", LOADERS)
def test_any_loader_is_cut_anew_and_left_alone(way: str) -> None:
    """Its copy yields the micro-batches, made in its own way; the user's loader is what it was."""
    loader = LOADERS[way]()
    before, kind = dict(vars(loader)), type(loader)
    whole = numbers(LOADERS[way]())
    sized = way != "stream"
    copied = rebatch(loader, armed(loader, total=SIZE if sized else None), sized=sized)
    scale = 2 if isinstance(loader, Doubling) else 1
    ours = numbers(copied)
    assert ours == [[scale * i for i in part] for part in ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10])]
    if sized:
        assert len(copied) == len(ours)
    else:
        with pytest.raises(TypeError):  # as the loader itself
            len(copied)
    assert isinstance(copied, kind)
    assert type(loader) is kind
    assert vars(loader).keys() == before.keys()
    differ = {name for name, value in before.items() if vars(loader)[name] is not value}
    assert {name for name in differ if not name.startswith("__pl_")} == set()
    assert numbers(loader) == whole
    changed = {"batch_sampler", "generator", "drop_last", "_iterator", "_IterableDataset_len_called"}
    differ = {name for name, value in before.items() if vars(copied)[name] is not value}
    assert {name for name in differ if not name.startswith("__pl_")} <= changed  # Lightning's own, after an error


@pytest.mark.parametrize("own", [False, True])
def test_what_ranks_share_is_shuffled_as_by_lightning(own: bool) -> None:
    """Its samplers of ranks take turns in one order, of the dataset or of a sampler of the user's own."""
    given = range(SIZE - 1, -1, -1) if own else SequentialSampler(range(SIZE))
    order = read_loader(DataLoader(range(SIZE), 3, sampler=given), world_size=2, shuffles=True).order
    of_rank = partial(DistributedSamplerWrapper if own else DistributedSampler, given if own else range(SIZE))
    shares = [of_rank(num_replicas=2, rank=rank, shuffle=True, seed=7) for rank in range(2)]
    for share in shares:
        share.set_epoch(3)
    theirs = [index for turn in zip(*shares, strict=True) for index in turn]
    assert [int(index) for index in order.draw(3, 7)] == theirs[:SIZE]


class Endless:
    """A sampler of indices, or of batches, without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield [0]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], "training data is a list and not one torch.utils.data.DataLoader"),
        ({"a": DataLoader(range(SIZE))}, "training data is a dict and not one torch.utils.data.DataLoader"),
        (DataLoader(range(SIZE), batch_size=None), "has batch_size=None, so that its dataset yields whole batches"),
        (
            DataLoader(StreamOf(range(SIZE)), batch_size=None),
            "has batch_size=None, so that its dataset yields whole batches",
        ),
        (DataLoader(range(SIZE), batch_sampler=Endless()), "batch sampler Endless has no len.*give it a __len__"),
        (DataLoader(range(SIZE), 3, sampler=Endless()), "sampler Endless has no len.*give it a __len__"),
    ],
)
def test_a_loader_that_cannot_be_cut_is_refused(loader: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_loader(loader, world_size=1)


def test_a_stream_that_can_be_read_only_once_is_left_alone() -> None:
    loader = DataLoader(OnceOnly(), 3)
    with pytest.raises(UserError, match=r"OnceOnly can be read only once.*give micro_batch_size="):
        collect_samples(loader, [None] * 4)
    assert numbers(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_looking_at_samples_uses_up_no_random_numbers(shuffle: bool) -> None:
    """A pass over the copy uses up as many as one over the user's loader: seeds of workers and of the order."""
    loader = DataLoader(TensorDataset(torch.arange(SIZE)), 3, shuffle=shuffle)
    with torch.random.fork_rng():
        assert len(list(loader)) == 4
        after = torch.get_rng_state()
    before = torch.get_rng_state()
    collate_samples(loader, collect_samples(loader, [1, 2]), 2)
    assert torch.equal(torch.get_rng_state(), before)
    order = read_loader(loader, world_size=1).order
    cut = WindowBatchSampler(order, share=0, seed=1, draws=order.draws_seed)
    cut.arrange(0, EpochPlan(RegularWindows(SIZE, 4), 2, 2, 1), enabled=True)
    with torch.random.fork_rng():
        assert len(list(rebatch(loader, cut))) == 6
        assert torch.equal(torch.get_rng_state(), after)
