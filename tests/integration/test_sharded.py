"""A sharded model (FSDP 2 on gloo ranks): exact, its limit found without an error, and an error ends in a sentence."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import joined, on_ranks, start
from reference import Regression, Samples, cut, fit, permutation, plain_loop, worst_error
from torch.distributed import init_device_mesh
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
    """In mid-epoch, on two ranks, then three; the last two are kept, whole. They replace what another training left."""
    windows = [w for epoch in range(2) for w in cut(permutation(53, 7, epoch), 16)]
    gradients = on_ranks(continued, tmp_path / "two", tmp_path / "checkpoints", 3)[0]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2.ckpt", "step-3.ckpt"]
    (tmp_path / "checkpoints" / "step-4.ckpt" / "left").mkdir(parents=True)
    gradients += on_ranks(continued, tmp_path / "three", tmp_path / "checkpoints", 8, ranks=3)[0]
    assert worst_error(gradients, plain_loop(Samples(53), windows)) <= 1e-12


class Replicated(Sharded):
    """Two replicas, each sharded over two ranks; counts all-reduces between replicas and scattered gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def configure_model(self) -> None:
        if not any(hasattr(part, "set_requires_all_reduce") for part in self.modules()):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super(Sharded, self).training_step(batch, batch_idx)


def replicated(accumulate: dict[str, Any] | None, mode: str) -> dict[str, Any]:
    """What this rank records of a fit on four ranks, with the callback or of stock Lightning."""
    module = Replicated()
    strategy = ModelParallelStrategy(
        data_parallel_size=4, tensor_parallel_size=1, process_group_backend="gloo", save_distributed_checkpoint=False
    )
    callbacks = [] if accumulate is None else [AutoAccumulate(**accumulate, micro_batching=mode, verify=False)]
    batch, factor = (4, 4) if accumulate is None else (16, 1)
    calls = Counter[str]()
    stock = dist.all_reduce

    def counted(tensor: Any, *arguments: Any, **settings: Any) -> Any:
        calls["all_reduce"] += tensor.numel() > 1  # a gradient, and no number that ranks agree on
        return stock(tensor, *arguments, **settings)

    dist.all_reduce = counted
    try:
        settings = {"strategy": strategy, "devices": 4, "accumulate_grad_batches": factor, "max_epochs": 1}
        fit(DataLoader(Samples(128), batch), *callbacks, module=module, **settings)
    finally:
        dist.all_reduce = stock
    return {"gradients": module.gradients, "calls": dict(calls), "windows": module.windows}


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_replicas_exchange_gradients_once_a_window(mode: str, tmp_path: Path) -> None:
    """As often as for one batch; the gradient is that of the windows in one pass."""
    cut_up = on_ranks(replicated, tmp_path / "cut", {"micro_batch_size": 4}, mode, ranks=4)
    whole = on_ranks(replicated, tmp_path / "whole", {"micro_batch_size": 16}, mode, ranks=4)
    stock = on_ranks(replicated, tmp_path / "stock", None, mode, ranks=4)
    assert cut_up[0]["calls"]["all_reduce"] > 0
    assert [each["calls"] for each in cut_up] == [each["calls"] for each in whole]
    assert 4 * cut_up[0]["calls"]["all_reduce"] == stock[0]["calls"]["all_reduce"]
    for ours, other in zip(cut_up, whole):
        assert worst_error(ours["gradients"], other["gradients"]) <= 1e-12
