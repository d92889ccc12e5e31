"""What holds the memory, told by a real fit: planted culprits are named, to the byte where it is state."""

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import quiet_trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.plan.records import Attribution
from lightning_ga.probe.meters import StepMeter
from lightning_ga.probe.probed_loop import numbered
from lightning_ga.probe.training import ProbedTraining
from lightning_ga.testing import limit_memory

SAMPLES, TOKENS, WIDTH = 64, 32, 16


class Plain(pl.LightningModule):
    """A body and a head over sequences; what is ``planted`` takes the module and the output of its body."""

    def __init__(self, planted: Callable[["Plain", Tensor], Tensor] | None = None, classes: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, classes)
        self.planted, self.seen = planted, list[Tensor]()
        self.unused = nn.Linear(1000, 1000) if planted is weighed else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.body(x)
        hidden = hidden if self.planted is None else self.planted(self, hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def attending(_: Plain, hidden: Tensor) -> Tensor:
    """Naive attention, twice: a T×T matrix of scores for each sample."""
    hidden = hidden.repeat(1, 8, 1)
    for _ in range(2):
        hidden = torch.softmax(hidden @ hidden.transpose(1, 2), dim=-1) @ hidden
    return hidden.unflatten(1, (8, TOKENS)).mean(1)


def keeping(module: Plain, hidden: Tensor) -> Tensor:
    """Keeps what was computed, on the device."""
    module.seen.append(hidden.detach().repeat(1, 64, 1))
    return hidden


def weighed(module: Plain, hidden: Tensor) -> Tensor:
    """Weights and their Adam moments are all that there is."""
    return hidden + 0 * sum(parameter.sum() for parameter in module.unused.parameters())


def bursting(module: Plain, hidden: Tensor) -> Tensor:
    """The second step takes more than any device has."""
    if module.trainer.global_step:
        torch.zeros(1 << 40)
    return hidden


def trained(module: Plain, effective: int = 32, **settings: Any) -> AutoAccumulate:
    callback = AutoAccumulate(effective, cache=False, verify=False, **settings)
    data = TensorDataset(torch.randn(SAMPLES, TOKENS, WIDTH), torch.zeros(SAMPLES, TOKENS, dtype=torch.long))
    quiet_trainer(callback, max_epochs=1).fit(module, DataLoader(data, batch_size=effective))
    return callback


def held(callback: AutoAccumulate) -> Attribution:
    holders = callback.probe.holders
    assert holders.samples == callback.probe.limit
    assert sum(size for _, size in holders.parts) == holders.peak_bytes == callback.probe.peak_bytes
    return holders


CULPRITS: dict[str, tuple[dict[str, Any], str, str]] = {
    "huge logits": ({"classes": 2000}, "logits and their loss", "chunked or fused cross-entropy"),
    "naive attention": ({"planted": attending}, "activations", "activation checkpointing"),
    "a growing list": ({"planted": keeping}, "kept after the step", "appends tensors"),
    "Adam": ({"planted": weighed}, "optimizer state", "less state"),
}


@pytest.mark.parametrize("culprit", CULPRITS)
@pytest.mark.parametrize("budget", ["1GiB", 1.0], ids=["tried", "predicted"])
def test_the_culprit_is_the_largest_part(culprit: str, budget: str | float) -> None:
    """State is told to the byte."""
    planted, name, remedy = CULPRITS[culprit]
    module = Plain(**planted)
    holders = held(trained(module, memory_budget=budget))
    assert holders.parts[0][0] == name
    assert remedy in holders.remedy
    if budget == "1GiB" and culprit == "Adam":
        rounding = StepMeter(numbered(None), ProbedTraining()).rounding
        weights = sum(-(-parameter.nbytes // rounding) * rounding for parameter in module.parameters())
        parts = dict(holders.parts)
        assert parts["parameters"] == parts["gradients"] == weights
        assert 2 * weights <= parts["optimizer state"] <= 2 * weights + 100 * max(8, rounding)


def test_following_the_advice_of_the_budget_error_succeeds() -> None:
    """And the error says what holds the memory."""
    with pytest.raises(UserError) as caught:
        trained(Plain(attending), memory_budget="20KiB")
    message = str(caught.value)
    assert re.search(r"in the (?:for|back)ward pass, in \w+, the memory is held by: activations [\d.]+ \S+, ", message)
    proposed = message.partition("memory_budget=")[2].partition("memory_budget=")[2].partition(" is enough")[0]
    assert proposed
    assert trained(Plain(attending), memory_budget=eval(proposed)).plan is not None


@pytest.mark.filterwarnings("ignore:Memory ran out in")
@pytest.mark.parametrize("on_oom", ["split", "raise"])
def test_errors_that_end_a_run_say_what_holds_the_memory(on_oom: Any) -> None:
    """As a note, which Python prints below the error, and the command line after its sentence."""
    with limit_memory("64MiB"), pytest.raises(UserError if on_oom == "split" else RuntimeError) as caught:
        trained(Plain(bursting), 8, on_oom=on_oom, memory_budget="64MiB")
    (note,) = caught.value.__notes__
    assert note.startswith("As the probe recorded it: at the peak of ")
    assert "held by: temporaries " in note
