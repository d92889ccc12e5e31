"""The gradient noise scale, against the exact one of per-sample gradients."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import Regression, Samples, fit, loss
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.callbacks import NoiseScale
from lightning_ga.plan.noise import noise_scale, window_moments
from lightning_ga.schedule import by_step

SIZE = 600


class Normed(Regression):
    """A layer norm whose gradients are read; its rate is zero, so that the exact value stays."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__(lr=lr)
        self.net.insert(1, torch.nn.LayerNorm(7, dtype=torch.float64))


def exact(module: Normed, data: Samples) -> tuple[float, float]:
    """Variance and squared norm of the mean of the per-sample gradients of the norm's parameters."""
    norm = list(module.net[1].parameters())
    grads = torch.stack([
        torch.cat([grad.flatten() for grad in torch.autograd.grad(loss(module.net, x[None], y[None]), norm)])
        for x, y in zip(data.inputs, data.targets)
    ])  # fmt: skip
    mean = grads.mean(0)
    return float((grads - mean).square().sum(1).mean()), float(mean.square().sum())


def test_moments_are_unbiased_for_micro_batches_of_any_sizes() -> None:
    """Over many draws they are the true variance and squared mean."""
    torch.manual_seed(0)
    mean, found = torch.tensor([1.0, 2.0]), []
    for _ in range(4000):
        draws = mean + 3 * torch.randn(11, 2)
        parts = draws.split([5, 3, 2, 1])
        norms = [(len(part), float(part.mean(0).square().sum())) for part in parts]
        found.append(window_moments(norms, float(draws.mean(0).square().sum())))
    spread, square = torch.tensor(found).mean(0)
    assert spread == pytest.approx(18, rel=0.03)
    assert square == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("micro_batch", [3, 4])
def test_the_estimate_is_that_of_per_sample_gradients(mode: Any, micro_batch: int) -> None:
    """Within three of its standard errors, whatever micro-batches weigh in their window."""
    module, data, noise = Normed(), Samples(SIZE), NoiseScale(windows=200)
    callback = AutoAccumulate(60, micro_batch_size=micro_batch, micro_batching=mode)
    fit(DataLoader(data, 10, shuffle=True), callback, noise, module=module, max_epochs=20)
    spread, square = exact(module, data)
    assert noise.estimate is not None
    assert noise.estimate.value == pytest.approx(spread / square, abs=3 * noise.estimate.error)
    assert noise.estimate.error < 0.25 * noise.estimate.value


def test_what_is_lost_in_the_noise_is_unknown() -> None:
    """And not a number that was cut off at zero."""
    assert noise_scale([(5.0, 0.5)]) is None
    assert noise_scale([(5.0, 0.5), (5.0, -0.6), (5.0, 0.2)]) is None
    assert noise_scale([(4.0, 2.0)] * 3 + [(4.2, 2.1)] * 3) is not None


class Logged(pl.loggers.CSVLogger):
    """Keeps what it is given."""

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        vars(self).setdefault("kept", []).append((step, dict(metrics)))


def test_it_is_logged_by_step_and_leaves_no_trace(tmp_path: Any) -> None:
    """Training is what it is without; its hooks are gone."""
    plain, watched, logger = Normed(lr=0.1), Normed(lr=0.1), Logged(tmp_path)
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
        (Normed, [NoiseScale()], "AutoAccumulate is not among the callbacks"),
        (Regression, [AutoAccumulate(micro_batch_size=2), NoiseScale()], "no LayerNorm, GroupNorm or RMSNorm"),
        (
            WithBatchNorm,
            [AutoAccumulate(micro_batch_size=2, verify=False), NoiseScale()],
            "BatchNorm makes the samples",
        ),
        (Normed, [AutoAccumulate(micro_batch_size=10), NoiseScale()], "a window is one micro-batch: set micro_batch"),
    ],
)
def test_what_cannot_be_measured_is_refused(module: Any, callbacks: list[Any], message: str) -> None:
    """Before the first step, with the reason."""
    with pytest.raises(UserError, match=f"NoiseScale cannot measure here: .*{message}"):
        fit(DataLoader(Samples(40), 10), *callbacks, module=module())
