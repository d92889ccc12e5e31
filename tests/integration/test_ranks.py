"""Data-parallel ranks (gloo): the same windows and the same gradients as one rank with the whole batch."""

from pathlib import Path
from typing import Any

import pytest
from rank_records import joined, run_ranks
from reference import Samples, cut, permutation, plain_loop, worst_error

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("ranks", "size", "batch_size", "accumulate"),
    [
        (2, 53, 8, {"micro_batch_size": 3}),  # ragged window of 5
        (2, 33, 8, {"micro_batch_size": 1}),  # ragged window of 1: one rank has no sample
        (3, 50, 4, {"effective_batch_size": 16, "micro_batch_size": 2}),  # shares of 6, 5 and 5
        (2, 20, 50, {"effective_batch_size": 7, "micro_batch_size": 100}),
    ],
)
def test_windows_and_gradients_are_those_of_one_rank(
    ranks: int, size: int, batch_size: int, accumulate: dict[str, Any], tmp_path: Path
) -> None:
    """Uneven shares, ragged windows and ranks without a sample change nothing."""
    records = run_ranks(tmp_path, ranks=ranks, size=size, batch_size=batch_size, accumulate=accumulate)
    effective = accumulate.get("effective_batch_size", batch_size * ranks)
    windows = [w for epoch in range(2) for w in cut(permutation(size, 7, epoch), effective)]
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(size), windows)) <= 1e-12


def test_streams_of_the_ranks_are_weighted_by_what_they_yield(tmp_path: Path) -> None:
    """Both ranks end in a ragged window of their own."""
    accumulate = {"micro_batch_size": 3}
    records = run_ranks(tmp_path, ranks=2, size=43, batch_size=5, accumulate=accumulate, loader="stream")
    shares = [cut(range(rank, 43, 2), 5) for rank in range(2)]
    windows = [a + b for a, b in zip(*shares, strict=True)] * 2
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(43), windows)) <= 1e-12


def test_batches_that_the_ranks_cut_themselves_are_weighted_by_what_they_hold(tmp_path: Path) -> None:
    """Windows of 13, 9, 6 and 9 samples, in as many micro-batches on each rank: nobody waits for the other."""
    settings: dict[str, Any] = {"trainer": {"use_distributed_sampler": False}, "loader": "own batches"}
    records = run_ranks(
        tmp_path, ranks=2, size=45, batch_size=0, accumulate={"micro_batch_size": 4, "verify": False}, **settings
    )
    ends = ([0, 9, 12, 17, 19], [20, 24, 30, 31, 38])
    windows = [[i for share in ends for i in range(share[k], share[k + 1])] for k in range(4)] * 2
    assert joined(records) == windows
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(45), windows)) <= 1e-12


def test_shares_of_different_sizes_end_in_an_exact_window(tmp_path: Path) -> None:
    """The last window has three samples on one rank and two on the other."""
    settings: dict[str, Any] = {"trainer": {"use_distributed_sampler": False}, "loader": "own share"}
    records = run_ranks(tmp_path, ranks=2, size=45, batch_size=4, accumulate={"micro_batch_size": 2}, **settings)
    windows = [a + b for a, b in zip(cut(range(0, 45, 2), 4), cut(range(1, 45, 2), 4), strict=True)] * 2
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(45), windows)) <= 1e-12


def test_an_empty_micro_batch_on_one_rank_is_left_out(tmp_path: Path) -> None:
    """Last in its window, where ranks reduce, and with a mean that is NaN over nothing."""
    accumulate = {"effective_batch_size": 8, "micro_batch_size": 2, "verify": False}
    masked = [6, 7, 12, 13]
    settings: dict[str, Any] = {"trainer": {"overfit_batches": 1.0}, "loader": "in order", "masked": masked}
    records = run_ranks(tmp_path, ranks=2, size=16, batch_size=4, accumulate=accumulate, **settings)
    windows = [[i for i in window if i not in masked] for window in cut(range(16), 8)] * 2
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(16), windows)) <= 1e-12


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


def test_a_resume_with_another_number_of_ranks_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    """Two ranks start, three go on: no sample of the epoch is lost or seen twice."""
    settings: dict[str, Any] = {"size": 40, "batch_size": 8, "accumulate": {"effective_batch_size": 12}}
    settings["accumulate"]["micro_batch_size"] = 4
    run_ranks(tmp_path / "first", ranks=2, save=True, trainer={"max_epochs": 1}, **settings)
    checkpoint = str(tmp_path / "first" / "step2.ckpt")
    records = run_ranks(tmp_path / "second", ranks=3, ckpt_path=checkpoint, **settings)
    windows = [w for epoch in range(2) for w in cut(permutation(40, 7, epoch), 12)]
    assert joined(records)[2:] == [sorted(window) for window in windows[2:]]
    oracle = plain_loop(Samples(40), windows)
    assert worst_error(records[0]["gradients"], oracle[2:]) <= 1e-12


def test_ranks_probe_together_and_agree(tmp_path: Path) -> None:
    """Every rank ends with the same limit, and with the gradients of the whole batch."""
    accumulate = {"effective_batch_size": 64, "memory_budget": 6000}
    records = run_ranks(tmp_path, ranks=2, size=128, batch_size=8, accumulate=accumulate, trainer={"max_epochs": 1})
    assert records[0]["limit"] == records[1]["limit"] < 32
    windows = cut(permutation(128, 7, 0), 64)
    assert worst_error(records[0]["gradients"], plain_loop(Samples(128), windows)) <= 1e-12
