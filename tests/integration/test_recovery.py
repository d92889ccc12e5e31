"""A trial that runs out of memory, in whatever way, leaves none of its bytes behind; and none brings in the killer."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from reference import FEATURES, Regression, Samples, fit, loss
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.memory import device as memory
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.probe.probed_trainer import ProbedTrainer
from lightning_ga.testing import limit_memory

MOST = 21
Trials = list[tuple[int, int, int]]


class Small(Regression):
    """Keeps no tensors of its own, as memory is counted; its loss is a function."""

    def __init__(self, compute: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.compute(self.net, batch[0], batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Callable[[LiveTensorMeter], Trials]:
    """Of every trial its size, the bytes alive when it starts, and the most that it takes beside them."""
    run = ProbedTrainer.step

    def noted_by(meter: LiveTensorMeter) -> Trials:
        seen: Trials = []

        def noted(training: ProbedTrainer, size: int, recorder: Any) -> None:
            meter.start()
            before = meter.live_bytes
            try:
                run(training, size, recorder)
            finally:
                seen.append((size, before, meter.peak_bytes - before))

        monkeypatch.setattr(ProbedTrainer, "step", noted)
        return seen

    return noted_by


def wrapped() -> None:
    """An error of a library, raised from one of PyTorch: both tracebacks hold activations."""
    kept = torch.ones(1000)
    try:
        raise torch.OutOfMemoryError(f"CUDA out of memory, {len(kept)}")
    except RuntimeError as error:
        more = torch.ones(1000)
        raise RuntimeError(f"the engine failed, {len(more)}") from error


FAILURES = {
    "an error of another library's": (wrapped, True),
    "NumPy": (lambda: np.empty(1 << 60, dtype=np.uint8), False),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failed_trial_leaves_not_a_byte(kind: str, trials: Any) -> None:
    """In the forward or in the backward pass: the next one, and training, start with the bytes that it started with."""
    (failure, backward), alive = FAILURES[kind], []

    def failing(net: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        """Fail above a size, in the forward or in the backward pass, with activations alive."""
        hidden = net[1](net[0](inputs))
        if len(inputs) > MOST:
            if not backward:
                failure()
            hidden.register_hook(lambda _: failure())
        return (net[2](hidden) - targets).square().mean()

    def watch(trainer: Any, module: Any) -> None:
        meter.add(module.parameters())
        alive.append(meter.live_bytes)

    watcher = pl.callbacks.LambdaCallback(on_fit_start=watch, on_train_start=watch)
    callback = AutoAccumulate(64, verify=False, cache=False)
    with limit_memory(10**8) as meter:
        seen = trials(meter)
        fit(DataLoader(Samples(64), batch_size=64), callback, watcher, module=Small(failing), max_epochs=1)
    assert callback.probe.limit == MOST
    assert sum(size > MOST for size, *_ in seen) >= 2
    assert len({live for place, (_, live, _) in enumerate(seen) if place != 1}) == 1  # before the second, no state
    assert alive[0] == alive[1]


ROOM = 60_000  # bytes that the control group leaves


def alone(net: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """One sample at a time: no two sizes have the same stream, so nothing can be predicted."""
    return torch.stack([loss(net, one[None], two[None]) for one, two in zip(inputs, targets)]).mean()


def enormous(net: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Two samples take more than there is."""
    return loss(net, inputs.repeat(1, 60_000)[:, :FEATURES], targets)


@pytest.fixture
def _container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in a control group that leaves little, on a machine that has more."""
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    for name, text in {"max": 10**9, "current": 10**9 - ROOM, "stat": "inactive_file 0"}.items():
        (group / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(memory, "control_group_limits", partial(memory.control_group_limits, tmp_path))


@pytest.mark.usefixtures("_container")
@pytest.mark.parametrize(("compute", "method", "budget"), [(loss, "prediction", "1GiB"), (alone, "below", None)])
def test_no_trial_comes_near_the_memory_that_there_is(compute: Any, method: str, budget: Any, trials: Any) -> None:
    """A fifth stays free: the limit is predicted, or approached from below with steps that fit for sure."""
    callback = AutoAccumulate(4_000, memory_budget=budget, verify=False, cache=False)
    stop = pl.callbacks.LambdaCallback(on_train_start=Mock(side_effect=EOFError))
    with LiveTensorMeter() as meter, pytest.raises(EOFError):
        seen = trials(meter)
        fit(DataLoader(Samples(4_000), batch_size=64), callback, stop, module=Small(compute))
    assert callback.probe.method == method
    assert 8 <= callback.probe.limit < 4_000
    assert all(trial.fits for trial in callback.probe.trials)
    assert max(peak for *_, peak in seen) < 0.85 * ROOM
    assert callback.probe.peak_bytes <= callback.probe.budget_bytes


@pytest.mark.usefixtures("_container")
def test_a_sample_that_is_too_large_is_stopped_at_the_first_operation(trials: Any) -> None:
    with pytest.raises(UserError, match="micro_batch_size=1, the smallest"), LiveTensorMeter() as meter:
        seen = trials(meter)
        fit(DataLoader(Samples(512), batch_size=64), AutoAccumulate(256, cache=False), module=Small(enormous))
    assert [size for size, *_ in seen] == [2, 2, 1]  # with the optimizer's state made before, and without
