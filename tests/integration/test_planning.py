"""Plans for a device that is not here, in real Trainers: right where that can be measured, leaving nothing behind."""

import random
import re
import resource
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torchmetrics
from reference import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_ga import AutoAccumulate, UserError, plan_for_device
from lightning_ga.plan.planned_device import planned_device
from lightning_ga.testing import limit_memory

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")


class Pictures(pl.LightningModule):
    """BatchNorm, dropout, a metric that reads values, logging."""

    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 10)
        )
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.settings = settings

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return type(self).optimizer(self.parameters(), lr=1e-3, **self.settings)


def pictures(samples: int = 128) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    return TensorDataset(torch.randn(samples, 1, 8, 8, generator=generator), labels)


def loader(dataset: Any = None, batch_size: int = 64) -> Any:
    return DataLoader(pictures() if dataset is None else dataset, batch_size=batch_size, shuffle=True)


@pytest.mark.parametrize(
    ("settings", "foreach"),
    [({"gradient_clip_val": 0.1}, True), ({"precision": "bf16-mixed"}, False), ({"accumulate_grad_batches": 2}, False)],
    ids=["clipped", "bf16", "recipe of two"],
)
def test_the_estimate_for_a_cpu_is_what_a_probe_measures_there(settings: dict[str, Any], foreach: bool) -> None:
    """Budget, limit, plan and every peak, within what metrics and logging keep."""
    measured, estimated = (AutoAccumulate(memory_budget="120KB", verify=False, cache=False) for _ in range(2))
    for callback, limit in ((measured, limit_memory("1GB")), (estimated, planned_device("1GB", like_cuda=False))):
        trainer = quiet_trainer(callback, max_epochs=1, **settings)
        with limit:
            trainer.fit(Pictures(foreach=foreach), loader())
    assert 8 < measured.probe.limit < 64
    assert (estimated.probe.limit, estimated.plan) == (measured.probe.limit, measured.plan)
    assert estimated.probe.source == "estimate"
    peaks = [{t.micro_batch_size: t.peak_bytes for t in c.probe.trials if t.fits} for c in (measured, estimated)]
    assert peaks[0].keys() == peaks[1].keys()
    assert all(abs(peaks[0][size] - peaks[1][size]) < 200 for size in peaks[0])


def test_the_limit_fits_and_one_more_does_not() -> None:
    """Both were worked out; the device's own part comes off."""
    planned = plan_for_device(Pictures(), loader(pictures(4096), 4096), "640MB")
    assert planned.device_bytes == 640_000_000
    assert planned.probe.budget_bytes == planned.device_bytes - planned.reserved_bytes
    assert planned.probe.peak_bytes <= planned.probe.budget_bytes
    fitting = {trial.micro_batch_size: trial.fits for trial in planned.probe.trials}
    assert fitting[planned.probe.limit]
    assert planned.unreliable == ()


class Large(Dataset[Any]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1, 64, 64), 1


class Wide(Pictures):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
        )


def test_a_large_device_takes_no_memory_here() -> None:
    """80 GiB of activations are worked out in some megabytes."""
    plan_for_device(Wide(), loader(Large(), 8), "16GiB")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    planned = plan_for_device(Wide(), loader(Large(), 500_000), "80GiB")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert planned.probe.peak_bytes > 70 * 2**30
    assert planned.probe.limit > 20_000
    assert grown < 200_000  # KiB


def everything(module: pl.LightningModule) -> list[Any]:
    """Module, metric states and random numbers, as bytes."""
    values = [*module.state_dict().values(), module.accuracy.tp, module.training, module.net[1].training]
    values += [parameter.grad for parameter in module.parameters()]
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    return [v.numpy().tobytes() if isinstance(v, torch.Tensor) else repr(v) for v in (*values, *streams)]


@pytest.mark.filterwarnings("ignore:Found 1 module")  # one is in evaluation, to see that it stays there
@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-true", marks=pytest.mark.slow), "16-mixed"])
def test_nothing_is_left_behind(precision: Any) -> None:
    """Values, dtypes, gradients, modes, random numbers, the Trainer that was attached; the same tensors as before."""
    module = Pictures()
    module.net[1].eval()
    module.net(torch.randn(4, 1, 8, 8)).sum().backward()
    before, tensors = everything(module), [*module.parameters(), *module.buffers()]
    gradients = [parameter.grad for parameter in module.parameters()]
    plan_for_device(module, loader(), "16GiB", precision=precision, devices=2)
    assert everything(module) == before
    assert all(a is b for a, b in zip([*module.parameters(), *module.buffers()], tensors))
    assert all(p.grad is g for p, g in zip(module.parameters(), gradients))
    assert module._trainer is None


def test_several_devices_share_the_effective_batch() -> None:
    """Each holds its share, and buckets beside its gradients."""
    one, four = (
        plan_for_device(Pictures(), loader(pictures(1024), 1000), "16GiB", effective_batch_size=1000, devices=devices)
        for devices in (1, 4)
    )
    assert four.plan.world_size == 4
    assert [sum(rank) for rank in four.plan.chunks] == [250] * 4
    assert (one.probe.limit, four.probe.limit) == (1000, 250)
    assert four.reserved_bytes - one.reserved_bytes == 4 * sum(p.numel() for p in Pictures().parameters())


def test_mixed_precision_takes_what_it_takes_on_cuda() -> None:
    """Dropout's mask of bytes, losses in 32 bits, a scaler whose step is taken: Adam's moments are there."""

    def peak(module: Pictures, precision: str) -> int:
        return plan_for_device(module, loader(batch_size=128), "16GiB", precision=precision).probe.peak_bytes

    sgd = type("Plain", (Pictures,), {"optimizer": torch.optim.SGD})()
    half, single, scaled = (peak(Pictures(), precision) for precision in ("bf16-mixed", "32-true", "16-mixed"))
    assert half < single
    assert abs(scaled - half) < 10_000
    assert scaled - peak(sgd, "16-mixed") >= 2 * 4 * sum(parameter.numel() for parameter in sgd.parameters())


class Arrays(Pictures):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mean() * float(batch[0].numpy().mean())


def test_a_step_that_needs_its_data_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="cannot be planned for another device.*the probe measures") as caught:
        plan_for_device(Arrays(), loader(), "16GiB")
    assert len(str(caught.value).splitlines()) == 1


class Total(torchmetrics.SumMetric):
    """Needs values."""

    def update(self, x: torch.Tensor) -> None:
        super().update(float(x.detach().numpy().sum()))


class Measuring(Pictures):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.kept = Total(), torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.total(loss.detach())
        self.kept(loss.detach())
        self.log("total", self.total)
        return loss


def test_metrics_that_need_values_are_left_out_and_named() -> None:
    module = Measuring()
    planned = plan_for_device(module, loader(), "16GiB")
    assert [r for r in planned.unreliable if "left out" in r] == ["Total: a metric that needs values, left out"]
    module.total.update(torch.ones(3))
    assert float(module.total.compute()) == 3


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"takes [\d,]+ bytes, and a device of 572.7 MiB leaves") as caught:
        plan_for_device(Pictures(), loader(), "600.5MB", effective_batch_size=8)
    proposed = re.search(r"a device of (\S+) is enough", str(caught.value))[1]
    assert plan_for_device(Pictures(), loader(), proposed, effective_batch_size=8).plan.micro_batch_size >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_memory": "much"}, "device_memory='much' must be"),
        ({"device_memory": 0.5}, "device_memory=0.5 must be"),
        ({"devices": 0}, "devices=0 must be at least 1"),
        ({"module": nn.Linear(1, 1)}, "must be a LightningModule, not Linear"),
        ({"effective_batch_size": 0}, "effective_batch_size=0 must be at least 1"),
        ({"effective_batch_size": 8, "callbacks": AutoAccumulate(16)}, "give one of them"),
        ({"strategy": "fsdp"}, "only data parallelism"),
        ({"data": TensorDataset(torch.zeros(8, 3))}, "must be a DataLoader or a datamodule, not a TensorDataset"),
        ({"limit_train_batches": 0}, "Nothing would be trained, so nothing can be planned"),
        ({"max_epochs": 0}, "Nothing would be trained, so nothing can be planned"),
        ({"data": [next(iter(loader()))]}, "data=list gives batches that are ready-made and cannot be cut"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"module": Pictures(), "data": loader(), "device_memory": "16GiB", **arguments}
    with pytest.raises(UserError, match=message):
        plan_for_device(**given)


class Recurrent(Pictures):
    """A flat list of weights is found all the same, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(8, 8, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0].flatten(1, 2))[0].square().mean()


class Sparse(Pictures):
    """Which rows of a table are the same, nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Embedding(10, 8, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[1]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.parameters())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("module", "doubt"),
    [(Recurrent, "net (LSTM): the workspace of recurrent kernels is not seen"), (Sparse, "sparse gradients")],
)
def test_what_is_taken_at_its_largest_or_not_seen_is_named(module: Any, doubt: str) -> None:
    planned = module()
    flat = list(getattr(planned.net, "_flat_weights", ()))
    assert plan_for_device(planned, loader(), "16GiB").unreliable[0].startswith(doubt)
    assert all(a is b for a, b in zip(getattr(planned.net, "_flat_weights", ()), flat, strict=True))
