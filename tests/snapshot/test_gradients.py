"""Gradients are watched and left alone without a trace; what a pass has been through with shows in their versions."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lightning_ga.snapshot.copies import versions
from lightning_ga.snapshot.gradients import Accumulations, GradientSnapshot, left_alone, set_apart


def penalized(weight: torch.Tensor) -> torch.Tensor:
    """A loss with a gradient penalty, for which autograd asks twice."""
    loss = (weight**3).sum()
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    return loss + slope.square().sum()


def test_what_autograd_grad_returns_is_neither_counted_nor_left_alone() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    wanted = 3 * weight**2 + 36 * weight**3
    accumulations = Accumulations([weight])
    with accumulations.counted():
        penalized(weight).backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, wanted)
    assert accumulations.repeated() == []
    assert accumulations.order() == [weight]
    with left_alone([weight]):
        loss = penalized(weight)
        assert loss.item() == penalized(weight).item()
        loss.backward()
    assert torch.equal(weight.grad, wanted)


def test_hooks_leave_nothing_that_later_passes_look_at() -> None:
    """Where something keeps the nodes that add, too; hooks of the user's own stay."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    nodes = [get_gradient_edge(weight).node for weight in weights]  # as ``DistributedDataParallel`` does
    calls: list[torch.Tensor] = []
    weights[1].register_hook(calls.append)  # type: ignore[no-untyped-call]
    weights[2].register_hook(calls.append).remove()  # type: ignore[no-untyped-call]
    accumulations = Accumulations([*weights, frozen])
    with accumulations.counted(), left_alone(weights[:1]):
        sum(weight.sum() for weight in weights).backward()
    assert set(accumulations.order()) == set(weights)
    assert [weight._backward_hooks is None for weight in (*weights, frozen)] == [True, False, True, True]
    assert len(calls) == 1
    weights[1].sum().backward()
    assert len(calls) == 2
    assert all(nodes)


@pytest.mark.parametrize("before", [None, 0.0])
def test_a_gradient_is_complete_once_it_was_written_to(before: float | None) -> None:
    """Or another has taken its place, as often written to; one that nobody knows is not."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    if before is not None:
        for weight in weights:
            weight.grad = torch.full((2,), before)
    snapshot = GradientSnapshot(weights)

    def complete(*those: torch.Tensor) -> bool:
        return snapshot.are_complete(those, versions([weight.grad for weight in those]))

    assert not any(map(complete, weights))
    (weights[1] * 2).sum().backward()
    assert [complete(weight) for weight in weights] == [False, True, False]
    weights[2].grad = torch.ones(2)
    assert complete(weights[2], weights[1])
    assert not complete(*weights)
    assert not complete(nn.Parameter(torch.ones(2)))


def test_hooks_of_the_users_own_see_what_the_pass_adds() -> None:
    """Registered later they would see zeros, of which ``g / g.norm()`` makes NaN."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.sum().backward()
    with left_alone([weight]):
        weight.register_hook(lambda gradient: gradient / gradient.norm())
        (2 * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]


def test_gradients_that_were_set_apart_come_back_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the copying of one of them, too."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    gradients, copied = [parameter.grad for parameter in parameters], []
    clone = torch.Tensor.clone

    def fails(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        if len(copied) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", fails)
    with pytest.raises(torch.OutOfMemoryError), set_apart(parameters):
        raise AssertionError("it was not reached")
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, gradients))
