"""Data-parallel ranks (gloo): the same windows and the same gradients as one rank with the whole batch."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rank_records import joined, run_ranks
from reference import Samples, cut, permutation, plain_loop, worst_error

pytestmark = pytest.mark.distributed


def row(
    size: int, batch_size: int, micro: int, windows: list[list[int]] | None = None, ranks: int = 2, **settings: Any
) -> dict[str, Any]:
    """A training of two epochs on some ranks, and the windows of each epoch; those of a shuffled loader are known."""
    accumulate = {"micro_batch_size": micro, **settings.pop("accumulate", {})}
    effective = accumulate.get("effective_batch_size", batch_size * ranks)
    given = {"size": size, "batch_size": batch_size, "ranks": ranks, "accumulate": accumulate, **settings}
    if windows is not None:
        return {"windows": windows * 2, "settings": given}
    windows = [window for epoch in range(2) for window in cut(permutation(size, 7, epoch), effective)]
    return {"windows": windows, "settings": given}


def both(*shares: list[list[int]]) -> list[list[int]]:
    """Windows of which each rank has its own part."""
    return [[index for part in parts for index in part] for parts in zip(*shares, strict=True)]


SHARED: dict[str, Any] = {"trainer": {"use_distributed_sampler": False}}
ENDS = ([0, 9, 12, 17, 19], [20, 24, 30, 31, 38])
MASKED = [6, 7, 12, 13]
ROWS = {
    "streams of the ranks": row(43, 5, 3, both(*(cut(range(rank, 43, 2), 5) for rank in range(2))), loader="stream"),
    "batches that the ranks cut themselves": row(
        *(45, 0, 4, both(*([[*range(*span)] for span in pairwise(share)] for share in ENDS))),
        **{**SHARED, "loader": "own batches", "accumulate": {"verify": False}},
    ),
    "batches that the ranks cut themselves, in the step": row(
        *(45, 0, 4, both(*([[*range(*span)] for span in pairwise(share)] for share in ENDS))),
        **{**SHARED, "loader": "own batches", "accumulate": {"verify": False, "micro_batching": "step"}},
    ),
    "streams of the ranks that end apart": row(  # after 23 and 22 micro-batches, and six batches each
        *(45, 4, 1, both(*(cut(range(rank, 45, 2), 4) for rank in range(2)))), loader="stream"
    ),
    "shares of different sizes": row(
        45, 4, 2, both(cut(range(0, 45, 2), 4), cut(range(1, 45, 2), 4)), **SHARED, loader="own share"
    ),
    "an empty micro-batch, NaN over nothing": row(
        *(16, 4, 2, [[i for i in window if i not in MASKED] for window in cut(range(16), 8)]),
        accumulate={"effective_batch_size": 8, "verify": False},
        **{"trainer": {"overfit_batches": 1.0}, "loader": "in order", "masked": MASKED},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_windows_and_gradients_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    windows, settings = ROWS[name]["windows"], ROWS[name]["settings"]
    records = run_ranks(tmp_path, **settings)
    if "masked" not in settings and settings.get("loader") != "stream":
        assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(settings["size"]), windows)) <= 1e-12


@pytest.mark.parametrize("micro_batching", ["loader", "step"])
def test_ranks_shuffle_what_the_loader_does_not(micro_batching: str, tmp_path: Path) -> None:
    """As stock Lightning does, where it shares the samples out; one rank that goes on keeps that order."""
    accumulate = {"effective_batch_size": 12, "micro_batch_size": 4, "micro_batching": micro_batching}
    settings: dict[str, Any] = {"size": 40, "batch_size": 6, "loader": "in order", "accumulate": accumulate}
    records = run_ranks(tmp_path / "two", ranks=2, save=True, **settings)
    windows = [w for epoch in range(2) for w in cut(permutation(40, 7, epoch), 12)]
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(40), windows)) <= 1e-12
    checkpoint = str(tmp_path / "two" / "step2.ckpt")
    settings["batch_size"] = 12
    assert joined(run_ranks(tmp_path / "one", ranks=1, ckpt_path=checkpoint, **settings))[-4:] == joined(records)[-4:]


def test_ranks_that_take_over_from_one_keep_its_order(tmp_path: Path) -> None:
    """That of the dataset, which one rank reads in order."""
    settings: dict[str, Any] = {"size": 40, "loader": "in order", "accumulate": {"effective_batch_size": 12}}
    settings["accumulate"]["micro_batch_size"] = 4
    alone = {"max_epochs": 1, "strategy": "auto"}
    first = run_ranks(tmp_path / "one", ranks=1, batch_size=12, save=True, trainer=alone, **settings)
    assert joined(first) == cut(range(40), 12)
    checkpoint = str(tmp_path / "one" / "step2.ckpt")
    records = run_ranks(tmp_path / "two", ranks=2, batch_size=6, ckpt_path=checkpoint, **settings)
    assert joined(records)[-4:] == cut(range(40), 12)


def test_ranks_probe_together_and_agree(tmp_path: Path) -> None:
    accumulate = {"effective_batch_size": 64, "memory_budget": 6000}
    records = run_ranks(tmp_path, ranks=2, size=128, batch_size=8, accumulate=accumulate, trainer={"max_epochs": 1})
    assert records[0]["limit"] == records[1]["limit"] < 32
    windows = cut(permutation(128, 7, 0), 64)
    assert worst_error(records[0]["gradients"], plain_loop(Samples(128), windows)) <= 1e-12
