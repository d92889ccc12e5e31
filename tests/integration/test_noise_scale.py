"""The gradient noise scale, against the exact one of per-sample gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from ranks import ddp, on_ranks
from reference import Regression, Samples, fit, fp16_on_the_cpu, loss
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.callbacks import NoiseScale
from lightning_ga.plan.critical_batch import noise_scale
from lightning_ga.schedule import by_step

SIZE = 600


class Normed(Regression):
    """A layer norm whose gradients are read; its rate is zero, so that the exact value stays."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__(lr=lr)
        self.net.insert(1, torch.nn.LayerNorm(7, dtype=torch.float64))


def assert_exact(estimate: Any, module: Normed, data: Samples) -> None:
    """It is, within three of its standard errors, variance / squared norm of the mean of the per-sample gradients."""
    norm = list(module.net[1].parameters())
    grads = torch.stack([
        torch.cat([grad.flatten() for grad in torch.autograd.grad(loss(module.net, x[None], y[None]), norm)])
        for x, y in zip(data.inputs, data.targets)
    ])  # fmt: skip
    mean = grads.mean(0)
    value = float((grads - mean).square().sum(1).mean() / mean.square().sum())
    assert estimate.value == pytest.approx(value, abs=3 * estimate.error)
    assert estimate.error < 0.25 * estimate.value


@pytest.mark.parametrize(("mode", "micro_batch"), [("loader", 3), ("step", 4)])
def test_the_estimate_is_that_of_per_sample_gradients(mode: Any, micro_batch: int) -> None:
    """Whatever micro-batches weigh in their window."""
    module, data, noise = Normed(), Samples(SIZE), NoiseScale(windows=200)
    callback = AutoAccumulate(60, micro_batch_size=micro_batch, micro_batching=mode)
    fit(DataLoader(data, 10, shuffle=True), callback, noise, module=module, max_epochs=8)
    assert_exact(noise.estimate, module, data)


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("normalize", [None, lambda batch: 10 * len(batch[0])], ids=["nothing", "items"])
def test_the_unit_is_a_sample_whatever_micro_batches_are_weighed_by(mode: Any, normalize: Any) -> None:
    """Ten items of a sample make no larger scale."""
    module, data, noise = Normed(), Samples(SIZE), NoiseScale(windows=200)
    callback = AutoAccumulate(60, micro_batch_size=4, micro_batching=mode, normalize=normalize, verify=False)
    fit(DataLoader(data, 20, shuffle=True), callback, noise, module=module, max_epochs=8)
    assert_exact(noise.estimate, module, data)


class Half(Normed):
    """The same in single precision, for autocast."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.float()
        self.fused = fused

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]).float() - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0, fused=self.fused)


def in_halves(mode: Any, module: Half, **settings: Any) -> Any:
    noise, callback = NoiseScale(200), AutoAccumulate(60, micro_batch_size=4, micro_batching=mode, verify=False)
    fit(DataLoader(Samples(SIZE, torch.float32), 10), callback, noise, module=module, max_epochs=4, **settings)
    return noise.estimate


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_the_estimate_is_that_of_single_precision(mode: Any) -> None:
    """Under autocast and a GradScaler; windows that overflow leave no NaN behind."""
    single = in_halves(mode, Half()).value
    for settings in ({"precision": "bf16-mixed"}, {"plugins": fp16_on_the_cpu(2.0**24, 1000)}):
        assert in_halves(mode, Half(), **settings).value == pytest.approx(single, rel=0.05)


def test_gradients_that_are_still_scaled_are_refused() -> None:
    """A fused optimizer unscales them within its own step."""
    with pytest.raises(UserError, match="a fused optimizer gets gradients that the GradScaler has scaled"):
        in_halves("loader", Half(fused=True), plugins=fp16_on_the_cpu())


def on_rank() -> Any:
    """The estimate of this rank."""
    noise, callback = NoiseScale(200), AutoAccumulate(60, micro_batch_size=5, verify=False)
    fit(DataLoader(Samples(SIZE), 10, shuffle=True), callback, noise, module=Normed(), max_epochs=8, **ddp())
    return noise.estimate


@pytest.mark.distributed
def test_ranks_measure_the_micro_batches_of_all(tmp_path: Path) -> None:
    """Both come to the same estimate, which is that of per-sample gradients."""
    estimates = on_ranks(on_rank, tmp_path)
    assert estimates[0] == estimates[1]
    assert_exact(estimates[0], Normed(), Samples(SIZE))


def test_what_is_lost_in_the_noise_is_unknown() -> None:
    """And not a number that was cut off at zero."""
    assert noise_scale([(5.0, 0.5)]) is None
    assert noise_scale([(5.0, 0.5), (5.0, -0.6), (5.0, 0.2)]) is None
    assert noise_scale([(4.0, 2.0)] * 3 + [(4.2, 2.1)] * 3) is not None


class Logged(DummyLogger):
    """Keeps what it is given."""

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        vars(self).setdefault("kept", []).append((step, dict(metrics)))


def test_it_is_logged_by_step_and_leaves_no_trace() -> None:
    """Training is what it is without; its hooks are gone."""
    plain, watched, logger = Normed(lr=0.1), Normed(lr=0.1), Logged()
    settings = {"effective_batch_size": by_step({0: 4, 3: 40}), "micro_batch_size": 4, "verify": False}
    loader = DataLoader(Samples(SIZE), 10)
    fit(loader, AutoAccumulate(**settings), module=plain, max_epochs=2)
    fit(loader, AutoAccumulate(**settings), NoiseScale(), module=watched, logger=logger, log_every_n_steps=1)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters()))
    steps = [step for step, metrics in logger.kept if "noise_scale" in metrics]
    assert steps
    assert steps == sorted(set(steps))
    assert not any(parameter._backward_hooks for parameter in watched.parameters())


class WithBatchNorm(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(7, dtype=torch.float64))


@pytest.mark.parametrize(
    ("module", "callbacks", "message"),
    [
        (Normed, [], "AutoAccumulate is not among the callbacks"),
        (Regression, [AutoAccumulate(micro_batch_size=2)], "no LayerNorm, GroupNorm or RMSNorm"),
        (WithBatchNorm, [AutoAccumulate(micro_batch_size=2, verify=False)], "BatchNorm makes the samples"),
        (Normed, [AutoAccumulate(micro_batch_size=10)], "a window is one micro-batch: set micro_batch"),
    ],
)
def test_what_cannot_be_measured_is_refused(module: Any, callbacks: list[Any], message: str) -> None:
    """Before the first step, with the reason."""
    with pytest.raises(UserError, match=f"NoiseScale cannot measure here: .*{message}"):
        fit(DataLoader(Samples(40), 10), *callbacks, NoiseScale(), module=module())
