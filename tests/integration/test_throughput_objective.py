"""``objective="throughput"`` in a Trainer: real passes are timed, and the smallest of the fast ones is taken."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import Samples, fit
from torch.utils.data import DataLoader
from wide import BUDGET, Wide

from lightning_ga import AutoAccumulate
from lightning_ga.probe.within_limit import SLOWER


class Clock:
    """The time that passes for a probe: steps of ``Slow`` alone take any."""

    now = 0.0


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ga.probe.trials.time", SimpleNamespace(perf_counter=lambda: Clock.now))


class Slow(Wide):
    """A pass takes 8 ms for up to eight samples, and in proportion beyond: nothing is gained by more than eight."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        Clock.now += 0.001 * max(8, len(batch[0]))
        return super().training_step(batch, batch_idx)


def run(**arguments: Any) -> AutoAccumulate:
    callback = AutoAccumulate(64, memory_budget=BUDGET, verify=False, objective="throughput", **arguments)
    fit(DataLoader(Samples(128), batch_size=64), callback, module=Slow(), max_epochs=1)
    return callback


def test_the_smallest_of_the_fast_sizes_is_taken_and_remembered() -> None:
    """With its timings."""
    callback = run()
    found = callback.probe
    assert found.limit > 16
    assert found.fastest == callback.plan.micro_batch_size == 8
    assert max(timing.seconds for timing in found.timings if timing.micro_batch_size >= 8) < 0.067
    best = min(timing.seconds for timing in found.timings)
    fast = [timing.micro_batch_size for timing in found.timings if timing.seconds <= SLOWER * best]
    assert found.fastest == min(fast)
    assert max(timing.micro_batch_size for timing in found.timings) <= found.limit
    again = run()
    assert (again.probe.source, again.probe.timings, again.plan) == ("cache", found.timings, callback.plan)


def test_training_is_that_of_the_micro_batch_it_took() -> None:
    """Timing leaves no trace either: bit for bit the run with the size given."""

    def weights(callback: AutoAccumulate) -> list[torch.Tensor]:
        torch.manual_seed(3)
        module = Slow()
        fit(DataLoader(Samples(128), batch_size=64, shuffle=True), callback, module=module, max_epochs=2)
        return list(module.parameters())

    timed = AutoAccumulate(64, memory_budget=BUDGET, objective="throughput")
    ours = weights(timed)
    given = weights(AutoAccumulate(64, micro_batch_size=timed.plan.micro_batch_size))
    assert all(torch.equal(a, b) for a, b in zip(ours, given))
