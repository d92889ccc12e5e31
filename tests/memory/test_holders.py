"""What holds the memory: the parts sum to the peak, and planted culprits are named."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_ga.memory.holders import OriginMeter, attribute, state_of
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.plan.attribution import Attribution


class Attention(nn.Module):
    """Naive attention: a T×T matrix of scores."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(1, 2), dim=-1) @ x


class Model(nn.Module):
    def __init__(self, *, classes: int = 4, attention: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.attention = Attention() if attention else nn.Identity()
        self.head = nn.Linear(8, classes)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.body(x)))


def attributed(
    model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer, step: Callable[[], Tensor]
) -> Attribution:
    """One warm-up step, then one that is recorded; the peak is that of a plain meter over the same step."""

    def whole(mark: Callable[[], None]) -> None:
        step().backward()
        mark()
        optimizer.step()
        optimizer.zero_grad()

    whole(lambda: None)
    plain = LiveTensorMeter()
    plain.add([*model.parameters(), *(v for s in optimizer.state.values() for v in s.values()), inputs])
    plain.start()
    with plain:
        whole(lambda: None)
    meter = OriginMeter(SimpleNamespace(module=model, owned=lambda: state_of(model.parameters(), [optimizer])))
    meter.add([*model.parameters(), *(v for s in optimizer.state.values() for v in s.values()), inputs])
    meter.start(record=True)
    with meter:
        meter.note_batch([inputs])
        whole(meter.mark)
    origins = meter.origins()
    found = attribute(meter.trace(len(inputs)), origins)
    assert dict(found.parts)["batch"] == inputs.nbytes
    assert found.peak_bytes == plain.peak_bytes
    assert sum(size for _, size in found.parts) == found.peak_bytes
    return found


def trained(model: Model, inputs: Tensor, loss: Callable[[Tensor], Tensor] = Tensor.sum) -> Attribution:
    return attributed(model, inputs, torch.optim.SGD(model.parameters(), 0.1), lambda: loss(model(inputs)))


def test_huge_logits_are_named() -> None:
    """They, what the loss makes of them and their gradient are one part, however the loss is called."""
    targets = torch.zeros(64, dtype=torch.long)
    found = trained(Model(classes=5000), torch.randn(64, 8), lambda out: functional.cross_entropy(out, targets))
    name, size = found.parts[0]
    assert name == "logits and their loss"
    assert size >= 2 * 64 * 5000 * 4
    assert "cross-entropy" in found.remedy


def test_naive_attention_is_named() -> None:
    """Its matrix of scores is the largest part, with the usual remedy."""
    found = trained(Model(attention=True), torch.randn(2, 300, 8))
    name, size = found.parts[0]
    assert name in ("activations of attention", "temporaries of attention")
    assert size >= 2 * 300 * 300 * 4
    assert "activations of attention" in dict(found.parts)
    assert found.remedy


def test_a_list_that_keeps_tensors_is_named() -> None:
    """What a step leaves behind is told with the place where it was made."""
    model = Model()

    def step() -> Tensor:
        out = model(inputs)
        model.kept.append(torch.zeros(100_000))
        return out.sum()

    inputs = torch.randn(4, 8)
    found = attributed(model, inputs, torch.optim.SGD(model.parameters(), 0.1), step)
    assert dict(found.parts)["kept after the step, made in zeros"] == 400_000
    assert "append" in found.remedy


def test_optimizer_state_is_told_apart() -> None:
    """Adam keeps twice the parameters; the peak of a small batch is where the gradients are whole."""
    model = Model(classes=10_000)
    inputs = torch.randn(1, 8)
    found = attributed(model, inputs, torch.optim.Adam(model.parameters()), lambda: model(inputs).sum())
    parts = dict(found.parts)
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert parts["parameters"] == weights
    assert 2 * weights <= parts["optimizer state"] <= 2 * weights + 64


def test_it_is_told_in_three_lines() -> None:
    """Where, what, and what to do."""
    where, what, remedy = trained(Model(), torch.randn(64, 8)).lines()
    assert where.startswith("At the peak of ")
    assert "activations 2.0 KiB (body.1 2.0 KiB, " in what
    assert remedy.startswith("What usually makes the largest part smaller: ")


def test_no_hook_is_left_behind() -> None:
    """Nothing runs outside of a recording."""
    trained(Model(), torch.randn(4, 8))
    module = torch.nn.modules.module
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks
