"""Sharded models (FSDP 2 on gloo ranks): an out-of-memory error ends in one sentence, and nobody waits for ever."""

from pathlib import Path
from typing import Any

import pytest
import sharded
import sharded_survivors
from rank_records import run_ranks, start
from reference import Samples, cut, permutation, plain_loop, worst_error

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_running_out_ends_in_one_sentence(rank: int, tmp_path: Path) -> None:
    """No retry: the other rank waits in a collective of the step that failed."""
    accumulate = {"effective_batch_size": 16, "micro_batch_size": 4, "verify": False}
    scenario = {"size": 53, "batch_size": 8, "accumulate": accumulate, "fails": {str(rank): 2}}
    done = start(tmp_path, {"sharded": scenario}, 2, program=sharded_survivors)
    assert done.code == 1
    message = (tmp_path / f"error-{rank}.txt").read_text()
    assert "RankError: Memory ran out in training" in message
    assert "ModelParallelStrategy shards the model over ranks" in message
    assert "max_micro_batch_size" in message
    assert "CUDA out of memory" in done.output  # the cause is told too
    assert (tmp_path / f"error-{1 - rank}.txt").exists()


def test_batches_cut_in_the_step_are_cut_alike_on_all_ranks(tmp_path: Path) -> None:
    accumulate: dict[str, Any] = {"effective_batch_size": 17, "micro_batch_size": 8, "micro_batching": "step"}
    records = run_ranks(tmp_path, program=sharded, ranks=2, size=50, batch_size=8, accumulate=accumulate)
    windows = [w for epoch in range(2) for w in cut(permutation(50, 7, epoch), 17)]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(50), windows)) <= 1e-12
