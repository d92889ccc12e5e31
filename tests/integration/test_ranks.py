"""Data-parallel ranks (gloo): the same windows and the same gradients as one rank with the whole batch."""

import os
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ddp, joined, on_ranks
from reference import Regression, Samples, SaveAll, StreamOf, cut, fit, permutation, plain_loop, worst_error
from torch.distributed import get_rank
from torch.utils.data import DataLoader, Sampler, default_collate

from lightning_ga import AutoAccumulate, ExactnessWarning

pytestmark = pytest.mark.distributed
MASKED = torch.tensor([6, 7, 12, 13])


class Masked(Regression):
    """Its loss is a mean over samples that are not masked, made by hand: NaN where there are none."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mask = mask_of(batch).double()[:, None]
        self.micro_batches.append((self.global_step, batch[2].tolist()))
        return ((self.net(batch[0]) - batch[1]).square() * mask).sum() / mask.sum()


def mask_of(batch: Any) -> torch.Tensor:
    """Which samples of a batch count."""
    return ~torch.isin(batch[2], MASKED)


OWN = [[*range(a, b)] for ends in ([0, 9, 12, 17, 19], [20, 24, 30, 31, 38]) for a, b in pairwise(ends)]


class OwnBatches(Sampler[list[int]]):
    """A batch sampler that knows its rank; batches of the ranks differ in size."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return iter(OWN[4 * get_rank() :][:4])


class OwnShare(Sampler[int]):
    """A sampler that knows its rank; the ranks have 23 and 22 samples."""

    def __len__(self) -> int:
        return len(range(get_rank(), 45, 2))

    def __iter__(self) -> Any:
        return iter(range(get_rank(), 45, 2))


class Share(StreamOf):
    """Every rank its own half of the samples, as streams of different ends."""

    def __iter__(self) -> Any:
        return (self.dataset[index] for index in range(get_rank(), len(self.dataset), 2))


def without_0_2_4(batch: list[Any]) -> Any:
    return default_collate([sample for sample in batch if sample[2] not in (0, 2, 4)])


LOADERS = {
    "in order": lambda size, batch: DataLoader(Samples(size), batch),
    "stream": lambda size, batch: DataLoader(Share(Samples(size)), batch),
    "left out": lambda size, batch: DataLoader(Share(Samples(size)), batch, collate_fn=without_0_2_4),
    "own batches": lambda size, _: DataLoader(Samples(size), batch_sampler=OwnBatches()),
    "own share": lambda size, batch: DataLoader(Samples(size), batch, sampler=OwnShare()),
    "own seeds": lambda size, batch: DataLoader(
        Samples(size), batch, shuffle=True, generator=torch.Generator().manual_seed(100 + int(os.environ["RANK"]))
    ),
}


def trained(loader: str, size: int, batch: int, accumulate: Any, trainer: Any, folder: Path, resume: Any) -> Any:
    """What this rank records of a fit, in which nothing is found inexact; checkpoints of all steps are kept."""
    warnings.simplefilter("error", ExactnessWarning)
    module = Masked() if "overfit_batches" in trainer else Regression()
    normalize = {"normalize": lambda batch: mask_of(batch).sum()} if isinstance(module, Masked) else {}
    callback, data = AutoAccumulate(**accumulate, **normalize), LOADERS[loader](size, batch)
    fit(data, callback, SaveAll(folder), module=module, ckpt_path=resume, **{**ddp(), **trainer})
    return {"windows": module.windows, "gradients": module.gradients}


def run(folder: Path, loader: str, size: int, batch: int, *, ranks: int = 2, resume: Any = None, **more: Any) -> Any:
    trainer = more.pop("trainer", {})
    return on_ranks(trained, folder, loader, size, batch, more, trainer, folder, resume, ranks=ranks)


def both(*shares: list[list[int]]) -> list[list[int]]:
    """Windows of which each rank has its own part."""
    return [[index for part in parts for index in part] for parts in zip(*shares, strict=True)]


SHARED: dict[str, Any] = {"trainer": {"use_distributed_sampler": False}}
ROWS: dict[str, tuple[list[list[int]], Any, dict[str, Any]]] = {
    "batches that the ranks cut themselves": (
        *(both(OWN[:4], OWN[4:]), ("own batches", 45, 0)),
        {"micro_batch_size": 4, "verify": False, **SHARED},
    ),
    "generators that each rank has seeded in its own way": (  # the first rank's seed is that of all
        cut(permutation(40, 100, 0), 12),
        *(("own seeds", 40, 4), {"effective_batch_size": 12, "trainer": {"max_epochs": 1}}),
    ),
    "streams of the ranks that end apart": (  # after 23 and 22 micro-batches, and six batches each
        both(*(cut(range(rank, 45, 2), 4) for rank in range(2))),
        *(("stream", 45, 4), {"micro_batch_size": 1}),
    ),
    "shares of different sizes": (
        both(cut(range(0, 45, 2), 4), cut(range(1, 45, 2), 4)),
        *(("own share", 45, 4), {"micro_batch_size": 2, **SHARED}),
    ),
    "a first batch of which one rank has a single sample left": (
        [[6, 1, 3, 5, 7], [8, 10, 12, 14, 9, 11, 13, 15]],
        *(("left out", 16, 4), {"effective_batch_size": 8, "verify": False}),
    ),
    "an empty micro-batch, NaN over nothing": (
        [[i for i in window if i not in MASKED] for window in cut(range(16), 8)],
        *(("in order", 16, 4), {"micro_batch_size": 2, "verify": False, "trainer": {"overfit_batches": 1.0}}),
    ),
}


def assert_trained(records: list[dict[str, Any]], windows: list[list[int]], size: int) -> None:
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(size), windows)) <= 1e-12


@pytest.mark.parametrize("name", ROWS)
def test_windows_and_gradients_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    """Of two epochs, or one."""
    windows, data, settings = ROWS[name]
    epochs = settings.get("trainer", {}).get("max_epochs", 2)
    records = run(tmp_path, *data, **settings)
    if data[0].startswith("own"):
        assert joined(records) == [sorted(window) for window in windows * epochs]
    assert_trained(records, windows * epochs, data[1])


@pytest.mark.parametrize("micro_batching", ["loader", "step"])
def test_ranks_shuffle_what_the_loader_does_not(micro_batching: str, tmp_path: Path) -> None:
    """As stock Lightning does, where it shares the samples out; one rank that goes on keeps that order."""
    settings = {"effective_batch_size": 12, "micro_batch_size": 4, "micro_batching": micro_batching}
    records = run(tmp_path / "two", "in order", 40, 6, **settings)
    windows = [w for epoch in range(2) for w in cut(permutation(40, 7, epoch), 12)]
    assert joined(records) == [sorted(window) for window in windows]
    assert_trained(records, windows, 40)
    if micro_batching == "loader":  # the step's loader is the user's own, and begins anew in the middle of an epoch
        resume = tmp_path / "two" / "step2.ckpt"
        alone = run(tmp_path / "one", "in order", 40, 12, ranks=1, resume=resume, **settings)
        assert joined(alone)[-4:] == joined(records)[-4:]


def test_ranks_that_take_over_from_one_keep_its_order(tmp_path: Path) -> None:
    """That of the dataset, which one rank reads in order."""
    settings: dict[str, Any] = {"effective_batch_size": 12, "micro_batch_size": 4}
    alone = {"max_epochs": 1, "strategy": "auto"}
    first = run(tmp_path / "one", "in order", 40, 12, ranks=1, trainer=alone, **settings)
    assert joined(first) == cut(range(40), 12)
    records = run(tmp_path / "two", "in order", 40, 6, resume=tmp_path / "one" / "step2.ckpt", **settings)
    assert joined(records)[-4:] == cut(range(40), 12)
