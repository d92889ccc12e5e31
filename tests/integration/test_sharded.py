"""A sharded model (FSDP 2 on gloo ranks): exact, its limit found without an error, and an error ends in a sentence."""

from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from forks import forked
from rank_records import joined, run_ranks
from reference import Samples, cut, permutation, plain_loop, worst_error

pytestmark = pytest.mark.distributed


def run(folder: Path, size: int = 53, **accumulate: Any) -> list[dict[str, Any]]:
    return run_ranks(folder, program=sharded, ranks=2, size=size, batch_size=8, accumulate=accumulate)


@pytest.mark.parametrize(
    ("size", "effective", "arguments"),
    [(53, 16, {"micro_batch_size": 3}), (50, 17, {"micro_batch_size": 8, "micro_batching": "step"})],
)
def test_gradients_are_those_of_one_device_with_the_whole_batch(
    size: int, effective: int, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """Batches that are cut in the step are cut alike on all ranks."""
    records = run(tmp_path, size, effective_batch_size=effective, **arguments)
    windows = [w for epoch in range(2) for w in cut(permutation(size, 7, epoch), effective)]
    if "micro_batching" not in arguments:
        assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(size), windows)) <= 1e-12


def test_a_probe_predicts_agrees_and_leaves_no_trace(tmp_path: Path) -> None:
    """Not one trial fails: a rank that ran out of memory alone would leave the others waiting."""
    probed = run(tmp_path / "probed", effective_batch_size=24, memory_budget=3000, verify=False)
    assert len({record["limit"] for record in probed}) == 1
    assert 1 <= probed[0]["limit"] < 12
    assert all(record["trials"] and all(record["trials"]) for record in probed)
    assert all(record["method"] in ("prediction", "below") for record in probed)
    given = run(tmp_path / "given", effective_batch_size=24, micro_batch_size=probed[0]["limit"], verify=False)
    for ours, theirs in zip(probed, given):
        assert all(torch.equal(a, b) for a, b in zip(ours["weights"], theirs["weights"], strict=True))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_memory_running_out_ends_in_one_sentence(rank: str, tmp_path: Path) -> None:
    """No retry, as the other rank waits in a collective of the step that failed: it ends, too."""
    accumulate = {"effective_batch_size": 16, "micro_batch_size": 4, "verify": False}
    settings = {"size": 53, "batch_size": 8, "accumulate": accumulate, "fails": {rank: 2}}
    done = forked(sharded.main, settings, tmp_path, folder=tmp_path)
    assert done.code == 1
    assert "RankError: Memory ran out in training" in done.output
    assert "ModelParallelStrategy shards the model over ranks" in done.output
    assert "max_micro_batch_size" in done.output
    assert "CUDA out of memory" in done.output  # the cause is told too
    assert not list(tmp_path.glob("rank*.pt"))
