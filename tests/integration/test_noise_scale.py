"""The gradient noise scale, against the exact one of per-sample gradients."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from rank_records import run_ranks
from reference import Regression, Samples, fit, loss
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.callbacks import NoiseScale
from lightning_ga.plan.critical_batch import noise_scale, window_moments
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


@pytest.mark.parametrize(("mode", "micro_batch"), [("loader", 3), ("step", 4)])
def test_the_estimate_is_that_of_per_sample_gradients(mode: Any, micro_batch: int) -> None:
    """Within three of its standard errors, whatever micro-batches weigh in their window."""
    module, data, noise = Normed(), Samples(SIZE), NoiseScale(windows=200)
    callback = AutoAccumulate(60, micro_batch_size=micro_batch, micro_batching=mode)
    fit(DataLoader(data, 10, shuffle=True), callback, noise, module=module, max_epochs=8)
    spread, square = exact(module, data)
    assert noise.estimate is not None
    assert noise.estimate.value == pytest.approx(spread / square, abs=3 * noise.estimate.error)
    assert noise.estimate.error < 0.25 * noise.estimate.value


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


def in_halves(mode: Any, module: Half, scale: float | None = None, **settings: Any) -> Any:
    """The estimate; with fp16 and a GradScaler, as Lightning would turn 16-mixed into bf16 on the CPU."""
    if scale is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        settings = {"plugins": pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)}
    noise, callback = NoiseScale(200), AutoAccumulate(60, micro_batch_size=4, micro_batching=mode, verify=False)
    data = DataLoader(Samples(SIZE, torch.float32), 10)
    fit(data, callback, noise, module=module, max_epochs=4, **settings)
    return noise.estimate


@cache
def in_single(mode: Any) -> Any:
    return in_halves(mode, Half())


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize("settings", [{"precision": "bf16-mixed"}, {"scale": 2.0**8}, {"scale": 2.0**24}])
def test_the_estimate_is_that_of_single_precision(mode: Any, settings: dict[str, Any]) -> None:
    """Under autocast and a GradScaler; windows that overflow leave no NaN behind."""
    assert in_halves(mode, Half(), **settings).value == pytest.approx(in_single(mode).value, rel=0.05)


def test_gradients_that_are_still_scaled_are_refused() -> None:
    """A fused optimizer unscales them within its own step."""
    with pytest.raises(UserError, match="a fused optimizer gets gradients that the GradScaler has scaled"):
        in_halves("loader", Half(fused=True), scale=256.0)


class Written(NoiseScale):
    """Writes its windows, and the samples of their micro-batches."""

    def __init__(self, folder: Path) -> None:
        super().__init__(windows=200)
        self.folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        record = {"moments": list(self._moments), "batches": pl_module.micro_batches}
        torch.save(record, self.folder / f"rank{trainer.global_rank}.pt")


def on_two_ranks(settings: dict[str, Any], folder: Path) -> None:
    """A fit whose callback is read."""
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    callback = AutoAccumulate(60, micro_batch_size=4, micro_batching=settings["mode"], verify=False)
    loader = DataLoader(Samples(SIZE), 10, shuffle=True)
    fit(loader, callback, Written(folder), module=Normed(), strategy=strategy, devices=settings["ranks"])


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_ranks_measure_the_micro_batches_of_all(mode: str, tmp_path: Path) -> None:
    """Every rank has the moments of the gradients, taken one by one."""
    records = run_ranks(tmp_path, program=SimpleNamespace(main=on_two_ranks), ranks=2, mode=mode)
    module, data = Normed(), Samples(SIZE)
    norm = list(module.net[1].parameters())
    for window in range(10):
        parts = [part for record in records for step, part in record["batches"] if step == window and part]
        grads = [
            torch.cat([*torch.autograd.grad(loss(module.net, data.inputs[part], data.targets[part]), norm)])
            for part in parts
        ]
        whole = sum(len(part) * grad for part, grad in zip(parts, grads)) / sum(map(len, parts))
        passes = [(len(part), float(grad.square().sum())) for part, grad in zip(parts, grads)]
        wanted = window_moments(passes, float(whole.square().sum()))
        for record in records:
            assert record["moments"][window] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


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
