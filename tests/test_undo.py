"""What an attempt changes is put back, at next to no cost."""

import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ga.undo import SMALL, Accumulations, AttemptState, BufferStash, GradientMarks, left_alone


def test_statistics_of_batch_norm_are_put_back() -> None:
    """Their versions do not rise, so nothing but a copy tells."""
    layer = nn.BatchNorm2d(4)
    stash = BufferStash(layer)
    for _ in range(3):
        stash.keep()
        before = [buffer.clone() for buffer in layer.buffers()]
        layer(torch.randn(8, 4, 3, 3))
        assert not torch.equal(before[0], layer.running_mean)
        stash.put_back()
        assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers()))
        layer(torch.randn(8, 4, 3, 3))


class Large(nn.Module):
    """A mask that never changes and a memory that does, both too large to be copied every time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(SMALL // 4 + 1))
        self.register_buffer("memory", torch.zeros(SMALL // 4 + 1))


def test_large_buffers_are_copied_when_they_change() -> None:
    module = Large()
    stash = BufferStash(module)
    first = list(stash.tensors())
    stash.keep()
    assert all(a is b for a, b in zip(first, stash.tensors()))
    module.memory.add_(1)
    stash.put_back()
    assert float(module.memory.sum()) == 0
    module.memory.add_(1)
    stash.keep()
    after = list(stash.tensors())
    assert after[0] is first[0]
    assert after[1] is not first[1]
    module.memory.mul_(5)
    stash.put_back()
    assert float(module.memory.max()) == 1


def test_random_numbers_and_metrics_are_put_back() -> None:
    module = nn.Module()
    module.mean, module.cat = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
    state = AttemptState(module)
    module.mean(1.0)
    module.cat(torch.ones(2))
    state.keep()
    drawn = [torch.rand(3), random.random(), np.random.rand()]
    module.mean(9.0)
    module.cat(torch.zeros(3))
    for _ in range(2):  # as often as attempts fail
        state.put_back()
        assert module.mean.compute() == 1.0
        assert module.mean._update_count == 1
        assert module.cat.compute().tolist() == [1.0, 1.0]
        assert torch.equal(torch.rand(3), drawn[0])
        assert [random.random(), np.random.rand()] == drawn[1:]
        module.mean(7.0)


@pytest.mark.parametrize("fails_after", [0, 1, 2])
def test_gradients_that_a_failed_pass_touched_are_complete(fails_after: int) -> None:
    """Autograd goes from the last layer to the first; the retry adds to those that it did not reach."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    inputs = torch.randn(6, 3, dtype=torch.float64)
    layers(inputs[:2]).mean().backward()  # an earlier micro-batch
    before = [parameter.grad.clone() for parameter in layers.parameters()]
    marks = GradientMarks(layers.parameters())
    stopper = list(layers.parameters())[::-2][fails_after]

    def stop(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = stopper.register_hook(stop)
    with pytest.raises(torch.OutOfMemoryError):
        layers(inputs).mean().backward()
    hook.remove()
    touched = marks.put_back()
    assert (fails_after > 0) == bool(touched)
    for part in (inputs[:3], inputs[3:]):
        with left_alone(touched):
            (layers(part).mean() / 2).backward()
    whole = torch.autograd.grad(layers(inputs).mean(), list(layers.parameters()))
    for parameter, old, new in zip(layers.parameters(), before, whole):
        torch.testing.assert_close(parameter.grad, old + new, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_gradients_that_are_added_to_more_than_once_come_back(fails_at: int) -> None:
    """Reentrant checkpoints add what a shared layer gets one by one: a failed pass leaves it half done."""
    torch.manual_seed(0)
    shared = nn.Linear(3, 3).double()
    inputs = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    calls = 0

    def count(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient

    def run(part: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            part = checkpoint(lambda x: torch.tanh(shared(x)), part, use_reentrant=True)
        return part.mean()

    accumulations = Accumulations(shared.parameters())
    with accumulations.counted():
        run(inputs).backward()
    assert accumulations.repeated() == list(shared.parameters())
    before = [parameter.grad.clone() for parameter in shared.parameters()]
    marks = GradientMarks(shared.parameters(), accumulations.repeated())
    hook = shared.bias.register_hook(count)
    with pytest.raises(torch.OutOfMemoryError):
        run(inputs).backward()
    hook.remove()
    assert marks.put_back() == []
    assert all(torch.equal(p.grad, old) for p, old in zip(shared.parameters(), before))


def test_buffers_that_are_exchanged_come_back() -> None:
    """``self.mean = 0.9 * self.mean + …`` is as usual as a change in place."""
    layer = nn.BatchNorm1d(2)
    layer.register_buffer("large", torch.zeros(SMALL // 4 + 1))
    stash = BufferStash(layer)
    large = layer.large
    for step in (1.0, 2.0):
        layer.running_mean = torch.full((2,), step)  # a step that went through
        stash.keep()
        layer.running_mean = layer.running_mean + 10  # and one that fails
        layer.large = layer.large + 1
        layer.register_buffer(f"new{step:.0f}", torch.zeros(1))
        stash.put_back()
        assert layer.running_mean.tolist() == [step, step]
        assert layer.large is large
        assert not hasattr(layer, f"new{step:.0f}")
