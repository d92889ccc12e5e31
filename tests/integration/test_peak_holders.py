"""What holds the memory, told by a real fit: planted culprits are named, and looking changes nothing."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import quiet_trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.app.errors import explain
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.plan.records import Attribution
from lightning_ga.probe.finder import numbered
from lightning_ga.probe.meters import meter_of
from lightning_ga.probe.training import ProbedTraining
from lightning_ga.testing import limit_memory

SAMPLES, TOKENS, WIDTH = 64, 32, 16


class Plain(pl.LightningModule):
    """A body and a head over sequences; those below plant a culprit."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, classes)

    def mixed(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(self.head(self.mixed(x)).flatten(0, 1), y.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Scores(nn.Module):
    """Naive attention: a T×T matrix of scores for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(1, 2), dim=-1) @ x


class Attention(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scores(), Scores()])

    def mixed(self, x: Tensor) -> Tensor:
        x = self.body(x.repeat(1, 8, 1))
        for block in self.blocks:
            x = block(x)
        return x.unflatten(1, (8, TOKENS)).mean(1)


class Keeping(Plain):
    """Keeps what it computed, on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def mixed(self, x: Tensor) -> Tensor:
        out = self.body(x)
        self.seen.append(out.detach().repeat(1, 64, 1))
        return out


class Wide(Plain):
    """Weights and their Adam moments are all that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(1000, 1000)

    def mixed(self, x: Tensor) -> Tensor:
        return self.body(x) + 0 * sum(parameter.sum() for parameter in self.unused.parameters())


class Blind(LiveTensorMeter):  # type: ignore[no-untyped-call]
    """Meters as before, and looks at no origin."""

    def __init__(self, owner: Any, allocator: Any, **arguments: Any) -> None:
        super().__init__(**arguments)

    def note_batch(self, tensors: Any) -> None:
        pass

    def origins(self, *, complete: bool) -> None:
        pass


def data() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, TOKENS, WIDTH), torch.zeros(SAMPLES, TOKENS, dtype=torch.long))


def trained(module: Plain, budget: Any = "1GiB", **settings: Any) -> AutoAccumulate:
    callback = AutoAccumulate(32, memory_budget=budget, cache=settings.pop("cache", False), verify=False)
    trainer = quiet_trainer(callback, max_epochs=1, **settings)
    trainer.fit(module, DataLoader(data(), batch_size=32))
    return callback


def held(callback: AutoAccumulate) -> Attribution:
    assert callback.probe is not None
    holders = callback.probe.holders
    assert holders is not None
    assert holders.samples == callback.probe.limit
    assert sum(size for _, size in holders.parts) == holders.peak_bytes == callback.probe.peak_bytes
    return holders


@pytest.mark.parametrize(
    ("make", "name", "remedy"),
    [
        (lambda: Plain(classes=2000), "logits and their loss", "chunked or fused cross-entropy"),
        (Attention, "activations of blocks.", "activation checkpointing"),
        (Keeping, "kept after the step, made in ", "appends tensors"),
        (Wide, "optimizer state", "less state"),
    ],
    ids=["huge-logits", "naive-attention", "growing-list", "adam"],
)
@pytest.mark.parametrize("budget", ["1GiB", None], ids=["tried", "predicted"])
def test_the_culprit_is_the_largest_part(make: Callable[[], Plain], name: str, remedy: str, budget: str | None) -> None:
    holders = held(trained(make(), budget))
    assert holders.by_kind()[0][0] in name
    assert any(part.startswith(name) for part, _ in holders.parts[:2])
    assert remedy in holders.remedy


def test_state_is_told_to_the_byte() -> None:
    module = Wide()
    rounding = meter_of(numbered(None), ProbedTraining()).rounding
    weights = sum(-(-parameter.nbytes // rounding) * rounding for parameter in module.parameters())
    parts = dict(held(trained(module)).parts)
    assert parts["parameters"] == parts["gradients"] == weights
    assert 2 * weights <= parts["optimizer state"] <= 2 * weights + 100 * max(8, rounding)


@pytest.mark.parametrize("make", [Plain, Attention, Keeping])
def test_looking_changes_nothing(make: Callable[[], Plain], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what the probe finds nor how many steps it takes; nor the training."""

    def run() -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        module = make()
        found = trained(module, "1GiB" if make is Keeping else "1500KiB").probe  # what is kept grows in training
        assert found is not None
        trials = tuple(replace(trial, seconds=0.0) for trial in found.trials)
        return replace(found, seconds=0.0, trials=trials, holders=None), [p.detach() for p in module.parameters()]

    found, weights = run()
    monkeypatch.setattr("lightning_ga.probe.meters.OriginMeter", Blind)
    blind, same = run()
    assert found == blind
    assert all(map(torch.equal, weights, same))


@pytest.mark.parametrize("budget", ["20KiB", "0.1MB", 30_000])
def test_following_the_advice_of_the_budget_error_succeeds(budget: str | int) -> None:
    """And the error says what holds the memory."""
    with pytest.raises(UserError) as caught:
        trained(Attention(), budget)
    message = str(caught.value)
    assert re.search(r"held by: activations [\d.]+ \S+ \(blocks.0 ", message)
    proposed = message.partition("memory_budget=")[2].partition("memory_budget=")[2].partition(" is enough")[0]
    assert proposed
    assert trained(Attention(), eval(proposed)).plan is not None


class Bursting(Plain):
    """Its second step takes more than any device has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step:
            torch.zeros(1 << 40)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Memory ran out in")
@pytest.mark.parametrize("on_oom", ["split", "raise"])
def test_errors_that_end_a_run_say_what_holds_the_memory(on_oom: Any) -> None:
    """As a note, which Python prints below the error, and the command line after its sentence."""
    callback = AutoAccumulate(8, on_oom=on_oom, cache=False, verify=False)
    trainer = quiet_trainer(callback, max_epochs=1)
    with limit_memory("64MiB"), pytest.raises((UserError, RuntimeError)) as caught:
        trainer.fit(Bursting(), DataLoader(data(), batch_size=8))
    (note,) = caught.value.__notes__
    assert note.startswith("As the probe recorded it: at the peak of ")
    assert "held by: temporaries " in note
    told = explain(caught.value)
    assert told.startswith("Memory ran out")
    assert told.endswith(note)
    assert "\n" not in told
