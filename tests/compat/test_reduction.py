"""Buckets are sent in order, each as soon as it is complete, and all of them once; ranks are in ``integration/``."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ga.compat.reduction import IN_FLIGHT, Bucket, GradientReducer, WindowReduction, make_buckets
from lightning_ga.errors import UserError


class Ranks:
    """Another rank whose gradients are those of this one, times three; notes what is sent and received."""

    def __init__(self) -> None:
        self.sent: list[Bucket] = []
        self.received = 0

    def send(self, bucket: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
        self.sent.append(bucket)
        bucket.place(torch.empty(bucket.size, dtype=torch.uint8))
        bucket.join(gradients, 2.0)
        return self

    def wait(self) -> None:
        self.received += 1
        assert len(self.sent) - self.received < IN_FLIGHT


class Chain(nn.Module):
    """Layers of one weight each, all of them buckets of their own."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(3) for _ in range(layers))
        self.buckets = make_buckets(list(self.weights), (), most=1, arrival={})
        self.ranks = Ranks()
        self.window = WindowReduction(self.buckets, self.ranks.send)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            inputs = torch.sin(inputs * weight)
        return inputs

    def backward(self, loss: torch.Tensor) -> None:
        """One pass, which sends what is complete."""
        with self.window.overlapping():
            loss.backward()
        self.window.finish()


@pytest.mark.parametrize("layers", [2, 5])
def test_a_gradient_that_is_added_to_after_it_was_sent_is_an_error(layers: int) -> None:
    """Whether its average has come back or not."""
    chain = Chain(layers)

    def shared(inputs: torch.Tensor) -> torch.Tensor:
        return inputs * chain.weights[-1]

    inputs = torch.ones(3, requires_grad=True)
    loss = chain(checkpoint(shared, inputs, use_reentrant=True)).sum()
    with pytest.raises(UserError, match="use_reentrant=False"):
        chain.backward(loss)


class Parallel(nn.Module):
    """What is read of a ``DistributedDataParallel``."""

    parameters_to_ignore = ()
    process_group = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_parameters_that_come_to_be_trained_within_a_window_are_refused() -> None:
    """No rank would send their gradients, and weights would drift apart."""
    weights = nn.ParameterList([torch.ones(3), nn.Parameter(torch.ones(2), requires_grad=False)])
    reducer = GradientReducer(Parallel(weights))
    weights[1].requires_grad_()
    reducer.check()
    sum(weight.sum() for weight in weights).backward()
    with pytest.raises(UserError, match=r"requires_grad=True on 1 parameters \(the first is of shape \(2,\)"):
        reducer.check()


def test_room_for_messages_that_memory_was_not_enough_for_is_made_when_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Larger buckets, of weights that come to be trained, need more of it."""
    weights = nn.ParameterList([torch.ones(3), nn.Parameter(torch.ones(200), requires_grad=False)])
    reducer = GradientReducer(Parallel(weights))
    weights[1].requires_grad_()

    def fails(*_: Any, **settings: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr("lightning_ga.compat.reduction.torch.empty", fails)
        reducer.window(summed=True)
    reducer.window(summed=True)
    assert all(room.numel() >= 4 * 203 for room in reducer.memory())
