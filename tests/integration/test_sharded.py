"""A sharded model (FSDP 2 on gloo ranks): exact, its limit found without an error, and an error ends in a sentence."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import joined, on_ranks, start
from reference import Regression, Samples, cut, fit, permutation, plain_loop, worst_error
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate
from lightning_ga.elastic import CheckpointEvery, newest_checkpoint

pytestmark = pytest.mark.distributed


class Sharded(Regression):
    """The reference model, its layers sharded over the ranks; memory may run out in a batch of this rank."""

    fails_at: int | None = None

    def configure_model(self) -> None:
        if self.device_mesh:
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in self.net.parameters()]))


def trained(accumulate: dict[str, Any], size: int = 53, fails: dict[str, int] | None = None) -> dict[str, Any]:
    """What this rank records of a fit."""
    module, callback = Sharded(), AutoAccumulate(**accumulate)
    module.fails_at = (fails or {}).get(os.environ["RANK"])
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", save_distributed_checkpoint=False
    )
    fit(DataLoader(Samples(size), 8, shuffle=True), callback, module=module, strategy=strategy, devices=2)
    return {
        "windows": module.windows,
        "gradients": module.gradients,
        "probe": callback.probe,
        "weights": [parameter.full_tensor() for parameter in module.net.parameters()],
    }


@pytest.mark.parametrize(("size", "effective", "mode"), [(53, 16, "loader"), (50, 32, "step")])
def test_gradients_are_those_of_one_device_with_the_whole_batch(
    size: int, effective: int, mode: str, tmp_path: Path
) -> None:
    """Batches that are cut in the step are cut alike on all ranks."""
    accumulate = {"effective_batch_size": effective, "micro_batch_size": 3, "micro_batching": mode}
    records = on_ranks(trained, tmp_path, accumulate, size)
    windows = [w for epoch in range(2) for w in cut(permutation(size, 7, epoch), effective)]
    if mode == "loader":
        assert joined(records) == [sorted(window) for window in windows]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(size), windows)) <= 1e-12


def test_a_probe_predicts_agrees_and_leaves_no_trace(tmp_path: Path) -> None:
    """Not one trial fails: a rank that ran out of memory alone would leave the others waiting."""
    common = {"effective_batch_size": 24, "verify": False}
    probed = on_ranks(trained, tmp_path / "probed", {**common, "memory_budget": 3000})
    (limit,) = {record["probe"].limit for record in probed}
    assert 1 <= limit < 12
    assert all(record["probe"].trials and all(t.fits for t in record["probe"].trials) for record in probed)
    assert all(record["probe"].method in ("prediction", "below") for record in probed)
    given = on_ranks(trained, tmp_path / "given", {**common, "micro_batch_size": limit})
    for ours, theirs in zip(probed, given):
        assert all(torch.equal(a, b) for a, b in zip(ours["weights"], theirs["weights"], strict=True))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_memory_running_out_ends_in_one_sentence(rank: str, tmp_path: Path) -> None:
    """No retry, as the other rank waits in a collective of the step that failed: it ends, too."""
    accumulate = {"effective_batch_size": 16, "micro_batch_size": 4, "verify": False}
    done = start(trained, tmp_path, accumulate, 53, {rank: 2})
    assert done.code == 1
    assert "RankError: Memory ran out in training" in done.output
    assert "ModelParallelStrategy shards the model over ranks" in done.output
    assert "max_micro_batch_size" in done.output
    assert "CUDA out of memory" in done.output  # the cause is told too
    assert not list(tmp_path.glob("rank*.pt"))


def continued(checkpoints: Path, max_steps: int) -> list[torch.Tensor]:
    """The gradients of the steps up to this one, from the newest checkpoint on; each step leaves one."""
    module = Sharded()
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo")
    callbacks = (AutoAccumulate(effective_batch_size=16, micro_batch_size=3), CheckpointEvery(checkpoints, 1))
    settings = {"strategy": strategy, "devices": ranks, "max_steps": max_steps}
    loader = DataLoader(Samples(53), 8, shuffle=True)
    fit(loader, *callbacks, module=module, ckpt_path=newest_checkpoint(checkpoints), **settings)
    return module.gradients


def test_sharded_checkpoints_continue_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """In mid-epoch, on two ranks, then three; the last two are kept, whole."""
    windows = [w for epoch in range(2) for w in cut(permutation(53, 7, epoch), 16)]
    gradients = on_ranks(continued, tmp_path / "two", tmp_path / "checkpoints", 3)[0]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2.ckpt", "step-3.ckpt"]
    gradients += on_ranks(continued, tmp_path / "three", tmp_path / "checkpoints", 8, ranks=3)[0]
    assert worst_error(gradients, plain_loop(Samples(53), windows)) <= 1e-12
