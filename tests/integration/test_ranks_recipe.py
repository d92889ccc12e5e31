"""Ranks that drop samples, or hold one model together: gradients of the recipe, replicas to the bit."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import ddp, on_ranks
from reference import Regression, Samples, cut, fit, permutation, plain_loop, worst_error
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_ga import AutoAccumulate

pytestmark = pytest.mark.distributed
SIZE = 40
EFFECTIVE = 16
BROKEN = {
    "some on one rank": {0, 1, 2, 17},
    "all of a rank's micro-batch": {0, 1, 2, 3},
    "all of a rank's share": set(range(8)),
    "the last of an epoch": {38, 39},
    "none": set[int](),
}


class Holed(Dataset[Any]):
    """Samples, of which some are broken."""

    def __init__(self, broken: set[int]) -> None:
        self.samples = Samples(SIZE)
        self.broken = broken

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return None if index in self.broken else self.samples[index]


def without_broken(samples: Sequence[Any]) -> Any:
    """Leave out what is broken; a batch of which nothing is left has no rows."""
    found = [sample for sample in samples if sample is not None]
    if found:
        return default_collate(found)
    return [each[:0] for each in default_collate([Samples(SIZE)[0]])]


class OfSomeRows(Regression):
    """Its loss is a mean over the rows that there are: NaN if there is none."""


def trained_on_holes(broken: set[int], accumulate: dict[str, Any]) -> dict[str, Any]:
    module = OfSomeRows()
    data = DataLoader(Holed(broken), 8, collate_fn=without_broken)
    fit(data, AutoAccumulate(EFFECTIVE, verify=False, **accumulate), module=module, **ddp(), max_epochs=2)
    return {"gradients": module.gradients, "weights": [each.detach() for each in module.parameters()]}


def in_orders(epochs: int = 2) -> list[list[int]]:
    return [window for epoch in range(epochs) for window in cut(permutation(SIZE, 7, epoch), EFFECTIVE)]


@pytest.mark.parametrize("name", BROKEN)
def test_dropped_samples_leave_the_mean_over_those_of_all_ranks(name: str, tmp_path: Path) -> None:
    """Whatever rank they were on; replicas stay equal to the bit."""
    records = on_ranks(trained_on_holes, tmp_path, BROKEN[name], {"micro_batch_size": 3, "micro_batching": "loader"})
    windows = [[index for index in window if index not in BROKEN[name]] for window in in_orders()]
    for record in records:
        assert worst_error(record["gradients"], plain_loop(Samples(SIZE), windows)) <= 1e-12
    first, second = records
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))


class OfFirstRows(Regression):
    """Uses the rows of a batch whose other parts need not be as many."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = len(batch[0])
        return super().training_step([batch[0], batch[1][:rows], batch[2][:rows]], batch_idx)


def trained_on_odd_batches(odd_rank: int, asked: dict[str, Any]) -> dict[str, Any]:
    """The ready-made batches of one rank have parts of different lengths, so that they cannot be cut."""
    samples = Samples(SIZE)
    batches = []
    for start in range(0, SIZE, 8):
        inputs, targets, indices = default_collate([samples[index] for index in range(start, start + 8)])
        if int(os.environ["RANK"]) == odd_rank:
            targets = torch.cat([targets, targets[:1]])
        batches.append([inputs, targets, indices])
    module = OfFirstRows()
    fit(
        DataLoader(batches, batch_size=None),
        AutoAccumulate(verify=False, **asked),
        module=module,
        **ddp(),
        max_epochs=1,
        use_distributed_sampler=False,  # each rank has its own
    )
    return {"gradients": module.gradients, "weights": [each.detach() for each in module.parameters()]}


@pytest.mark.parametrize("odd_rank", [0, 1])
def test_a_rank_that_cannot_cut_its_batches_leaves_no_other_waiting(odd_rank: int, tmp_path: Path) -> None:
    """None of them probes, and batches run as they are."""
    first, second = on_ranks(trained_on_odd_batches, tmp_path, odd_rank, {})
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    windows = [[*range(start, start + 8)] for start in range(0, SIZE, 8)]  # of both ranks, the same
    assert worst_error(first["gradients"], plain_loop(Samples(SIZE), windows)) <= 1e-12


class Together(Regression):
    """The reference model, held by two ranks together."""

    def configure_model(self) -> None:
        if self.device_mesh:
            plan = {"0": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        found = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in self.net.parameters())
        self.gradients.append(torch.cat([gradient.flatten() for gradient in found]))


def trained_together(accumulate: dict[str, Any], batch: int) -> dict[str, Any]:
    module = Together()
    callback = AutoAccumulate(verify=False, **accumulate)
    strategy = ModelParallelStrategy(
        data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo", save_distributed_checkpoint=False
    )
    data = DataLoader(Samples(SIZE), batch, shuffle=True)
    fit(data, callback, module=module, strategy=strategy, devices=2, accumulate_grad_batches=2, max_epochs=2)
    return {"gradients": module.gradients, "windows": module.windows, "plan": str(callback.plan)}


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_ranks_that_hold_one_model_read_the_same_samples(mode: str, tmp_path: Path) -> None:
    """The effective batch counts them as one; the gradient is that of one process."""
    accumulate = {"micro_batch_size": 3, "micro_batching": mode}
    first, second = on_ranks(trained_together, tmp_path, accumulate, 6)
    assert first["windows"] == second["windows"]
    assert "effective batch 12 " in first["plan"]
    for record in (first, second):
        expected = plain_loop(Samples(SIZE), record["windows"])
        assert worst_error(record["gradients"], expected) <= 1e-12
        assert [len(window) for window in record["windows"]] == [12, 12, 12, 4] * 2
