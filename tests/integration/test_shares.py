"""``shares="memory"``: ranks of different memory share a window in proportion; the gradient is that of the window."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ddp, joined, on_ranks
from reference import Regression, Samples, StreamOf, cut, fit, permutation, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.testing import limit_memory

EFFECTIVE = 36
SIZE = 100  # the last window has 28 samples


class Wide(Regression):
    """Memory runs out above some samples on this rank, once."""

    fails_above = 1000

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) > self.fails_above and self.trainer.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)


def of_rank(limits: tuple[int, ...], fails: bool) -> dict[str, Any]:
    """What this rank records of a fit with a limit of its own."""
    rank = int(os.environ["RANK"])
    module = Wide()
    if fails and rank == 0:
        module.fails_above = 5
    ours = AutoAccumulate(effective_batch_size=EFFECTIVE, micro_batch_size=limits[rank], shares="memory", verify=False)
    fit(DataLoader(Samples(SIZE), 8, shuffle=True), ours, module=module, **ddp())
    sizes = [len(indices) for step, indices in module.micro_batches if step == 0]
    plan = str(ours.plan)
    return {
        "windows": module.windows,
        "gradients": module.gradients,
        "sizes": sizes,
        "plan": plan,
        "n": ours.oom_events,
    }


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")
@pytest.mark.parametrize(
    ("limits", "fails", "sizes"),
    [
        ((24, 12), False, [[24], [12]]),
        ((8, 4), True, [[8, 8, 8], [4, 4, 4]]),
        ((10, 3), False, [[9, 9, 9], [3, 3, 3]]),
        ((12, 4, 2), False, [[12, 12], [4, 4], [2, 2]]),
    ],
)
def test_ranks_share_a_window_in_proportion(
    limits: tuple[int, ...], fails: bool, sizes: list[list[int]], tmp_path: Path
) -> None:
    """The windows are those of seed and epoch; also if a rank runs a window again alone, and after it."""
    records = on_ranks(of_rank, tmp_path, limits, fails, ranks=len(limits))
    assert [each["sizes"] for each in records] == sizes
    windows = [w for epoch in range(2) for w in cut(permutation(SIZE, 7, epoch), EFFECTIVE)]
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(SIZE), windows)) <= 1e-12
    assert [each["n"] for each in records] == [int(fails), *[0] * (len(limits) - 1)]
    assert fails or "in shares of" in records[0]["plan"]


def with_own_memory(budgets: tuple[str, ...]) -> dict[str, Any]:
    """What this rank records if its memory decides."""
    module = Regression()
    ours = AutoAccumulate(effective_batch_size=400, shares="memory", cache=False)
    data = Samples(800)
    with limit_memory(budgets[int(os.environ["RANK"])]):
        fit(DataLoader(data, 8, shuffle=True), ours, module=module, max_epochs=1, **ddp())
    probe = ours.probe
    assert probe is not None
    return {"windows": module.windows, "gradients": module.gradients, "limit": probe.limit, "n": ours.oom_events}


@pytest.mark.distributed
def test_each_rank_finds_its_own_limit(tmp_path: Path) -> None:
    one, other = records = on_ranks(with_own_memory, tmp_path, ("60KiB", "30KiB"))
    assert one["limit"] > 1.5 * other["limit"]
    assert one["n"] == other["n"] == 0
    assert len(one["windows"][0]) / len(other["windows"][0]) == pytest.approx(one["limit"] / other["limit"], rel=0.03)
    windows = cut(permutation(800, 7, 0), 400)
    assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(800), windows)) <= 1e-12


def test_shares_need_ranks_and_windows_of_the_loader() -> None:
    with pytest.raises(UserError, match=r"shares='memory' .* this training has one rank: leave it out"):
        fit(DataLoader(Samples(8), 4), AutoAccumulate(shares="memory"))
    with pytest.raises(UserError, match="do not go together"):
        AutoAccumulate(shares="memory", micro_batching="step")
    with pytest.raises(UserError, match="do not go together"):
        AutoAccumulate(shares="memory", accumulate=2)


def stream() -> str:
    """The sentence in which a stream on this rank ends."""
    with pytest.raises(UserError) as error:
        fit(DataLoader(StreamOf(Samples(8)), 4), AutoAccumulate(shares="memory"), **ddp())
    return str(error.value)


@pytest.mark.distributed
def test_a_stream_is_refused(tmp_path: Path) -> None:
    for said in on_ranks(stream, tmp_path):
        assert "needs windows that the loader cuts" in said
