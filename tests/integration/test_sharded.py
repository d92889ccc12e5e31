"""A sharded model (FSDP 2 on gloo ranks): exact, and its limit is found without ever running out of memory."""

from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from rank_records import joined, run_ranks
from reference import Samples, cut, permutation, plain_loop, worst_error

pytestmark = pytest.mark.distributed


def run(folder: Path, **accumulate: Any) -> list[dict[str, Any]]:
    return run_ranks(folder, program=sharded, ranks=2, size=53, batch_size=8, accumulate=accumulate)


def test_gradients_are_those_of_one_device_with_the_whole_batch(tmp_path: Path) -> None:
    records = run(tmp_path, micro_batch_size=3)
    windows = [w for epoch in range(2) for w in cut(permutation(53, 7, epoch), 16)]
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(53), windows)) <= 1e-12


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
