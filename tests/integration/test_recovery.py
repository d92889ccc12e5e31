"""A trial that runs out of memory, in whatever way, leaves none of its bytes behind; and none brings in the killer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from reference import FEATURES, Regression, Samples, fit, loss
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.memory import device as memory
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.probe.trials import ProbedTrainer
from lightning_ga.testing import limit_memory

MOST = 21


class Small(Regression):
    """Keeps no tensors of its own, as memory is counted."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.compute(batch[0], batch[1])

    def compute(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(self.net, inputs, targets)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def wrapped() -> None:
    """An error of a library, raised from one of PyTorch: both tracebacks hold activations."""
    kept = torch.ones(1000)
    try:
        raise torch.OutOfMemoryError(f"CUDA out of memory, {len(kept)}")
    except RuntimeError as error:
        more = torch.ones(1000)
        raise RuntimeError(f"the engine failed, {len(more)}") from error


def ambiguous() -> None:
    raise RuntimeError("FIND was unable to find an engine to execute this computation")


FAILURES = {
    "an error of another library's": wrapped,
    "the CPU's allocator": lambda: torch.empty(1 << 60, dtype=torch.uint8),
    "NumPy": lambda: np.empty(1 << 60, dtype=np.uint8),
    "an ambiguous one": ambiguous,
}


class Failing(Small):
    """Fails above a size, in the forward or in the backward pass, with activations alive."""

    def __init__(self, failure: Any, *, backward: bool, most: int = MOST) -> None:
        super().__init__()
        self.failure, self.in_backward, self.most = failure, backward, most

    def compute(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.net[1](self.net[0](inputs))
        if len(inputs) > self.most:
            if not self.in_backward:
                self.failure()
            hidden.register_hook(lambda _: self.failure())
        return (self.net[2](hidden) - targets).square().mean()


def trials(monkeypatch: pytest.MonkeyPatch, meter: LiveTensorMeter) -> list[tuple[int, int]]:
    """Size of every trial, and the bytes alive when it starts."""
    seen: list[tuple[int, int]] = []
    run = ProbedTrainer.step

    def noted(training: ProbedTrainer, size: int, recorder: Any) -> None:
        seen.append((size, meter.live_bytes))
        run(training, size, recorder)

    monkeypatch.setattr(ProbedTrainer, "step", noted)
    return seen


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", FAILURES)
def test_a_failed_trial_leaves_not_a_byte(kind: str, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one starts with exactly the bytes that the failed one started with, and so does training."""
    callback = AutoAccumulate(64, verify=False, cache=False)
    alive = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            alive.append(meter.live_bytes)

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            meter.add(module.parameters())
            alive.append(meter.live_bytes)

    with limit_memory(10**8) as meter:
        seen = trials(monkeypatch, meter)
        fit(
            DataLoader(Samples(64), batch_size=64),
            callback,
            Watch(),
            module=Failing(FAILURES[kind], backward=backward),
            max_epochs=1,
        )
    assert callback.probe.limit == MOST
    assert sum(size > MOST for size, _ in seen) >= 2
    warm = seen[1:]  # from the second on there is state in the optimizer
    assert len({live for _, live in warm}) == 1
    assert alive[0] == alive[1]


ROOM = 60_000  # bytes that the control group leaves


class Alone(Small):
    """One sample at a time: no two sizes have the same stream, so nothing can be predicted."""

    def compute(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss(self.net, one[None], two[None]) for one, two in zip(inputs, targets)]).mean()


class Similar(Small):
    """Memory grows with the square of the samples."""

    def compute(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.net[0](inputs)
        return (hidden @ hidden.T).square().mean() + loss(self.net, inputs, targets)


class Enormous(Small):
    """Two samples take more than there is."""

    def compute(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wide = inputs.repeat(1, 60_000)
        return loss(self.net, wide[:, :FEATURES], targets)


class ProbedError(Exception):
    """The probe is over."""


class Stop(pl.Callback):
    """Ends the run before training."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        raise ProbedError


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in a control group that leaves little, on a machine that has more."""
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    for name, text in {"max": 10**9, "current": 10**9 - ROOM, "stat": "inactive_file 0"}.items():
        (group / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(memory, "control_group_limits", partial(memory.control_group_limits, tmp_path))


@contextmanager
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Size of every trial, and the most bytes that it took beside what was alive."""
    peaks: list[tuple[int, int]] = []
    run = ProbedTrainer.step
    with LiveTensorMeter() as meter:

        def noted(training: ProbedTrainer, size: int, recorder: Any) -> None:
            meter.start()
            before = meter.live_bytes
            try:
                run(training, size, recorder)
            finally:
                peaks.append((size, meter.peak_bytes - before))

        monkeypatch.setattr(ProbedTrainer, "step", noted)
        yield peaks


@pytest.mark.usefixtures("container")
@pytest.mark.filterwarnings("ignore:memory_budget='1GiB' is above the")
@pytest.mark.parametrize(("module", "method"), [(Small, "prediction"), (Alone, "below"), (Similar, "prediction")])
@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_no_trial_comes_near_the_memory_that_there_is(
    module: Any, method: str, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth stays free: the limit is predicted, or approached from below with steps that fit for sure."""
    callback = AutoAccumulate(4_000, memory_budget=budget, verify=False, cache=False)
    with measured(monkeypatch) as peaks, pytest.raises(ProbedError):
        fit(DataLoader(Samples(4_000), batch_size=64), callback, Stop(), module=module(), max_epochs=1)
    assert callback.probe.method == method
    assert 8 <= callback.probe.limit < 4_000
    assert all(trial.fits for trial in callback.probe.trials)
    assert max(peak for _, peak in peaks) < 0.85 * ROOM
    assert callback.probe.peak_bytes <= callback.probe.budget_bytes


@pytest.mark.usefixtures("container")
def test_a_sample_that_is_too_large_is_stopped_at_the_first_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="micro_batch_size=1, the smallest"), measured(monkeypatch) as peaks:
        fit(DataLoader(Samples(512), batch_size=64), AutoAccumulate(256, cache=False), module=Enormous())
    assert [size for size, _ in peaks] == [2, 1]
