"""Gradients are watched without a trace; what a pass has been through with shows in their versions."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_ga.snapshot.gradients import Gradients, ZeroedAdditions, counted_additions


def counted(loss: torch.Tensor, *weights: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """What a backward pass adds to these."""
    with counted_additions(weights) as counts:
        loss.backward()  # type: ignore[no-untyped-call]
    return [*counts.items()]


def test_additions_are_counted_in_the_order_in_which_they_come() -> None:
    """However often a parameter is used; not those that are frozen or unused."""
    first, second, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    loss = (torch.sin(first * first) * second * frozen).sum()
    assert counted(loss, first, second, unused, frozen) == [(second, 1), (first, 1)]


def test_a_reentrant_pass_adds_its_own() -> None:
    """To a weight that the pass around it adds to as well."""
    weight = nn.Parameter(torch.ones(2))
    inputs = torch.ones(2, requires_grad=True)
    again = checkpoint(lambda inputs: inputs * weight, inputs, use_reentrant=True)
    assert counted((again * weight).sum(), weight) == [(weight, 2)]


def test_hooks_leave_nothing_that_later_passes_look_at() -> None:
    """Where something keeps the nodes that add, too; hooks of the user's own stay."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    nodes = [get_gradient_edge(weight).node for weight in weights]  # as ``DistributedDataParallel`` does
    calls: list[torch.Tensor] = []
    weights[1].register_hook(calls.append)  # type: ignore[no-untyped-call]
    weights[2].register_hook(calls.append).remove()  # type: ignore[no-untyped-call]
    counted(sum(weight.sum() for weight in weights), *weights)
    assert [weight._backward_hooks is None for weight in weights] == [True, False, True]
    assert len(calls) == 1
    weights[1].sum().backward()
    assert len(calls) == 2
    assert all(nodes)


@pytest.mark.parametrize("before", [None, 0.0])
def test_a_gradient_has_changed_once_it_was_written_to(before: float | None) -> None:
    """Or another has taken its place, as often written to; one that is gone has not come."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    if before is not None:
        for weight in weights:
            weight.grad = torch.full((2,), before)
    snapshot = Gradients.of(weights)

    def changed() -> list[bool]:
        now = Gradients.of(weights)
        found = [*now.changed_since(snapshot)]
        assert now.unchanged_since(snapshot) == (not any(found) and weights[0].grad is snapshot.tensors[0])
        return found

    assert changed() == [False] * 3
    (weights[1] * 2).sum().backward()
    assert changed() == [False, True, False]
    weights[2].grad, weights[0].grad = torch.ones(2), None
    assert changed() == [False, True, True]


def test_zeros_are_added_in_place_of_gradients() -> None:
    """After all hooks of the user's own: ``g / g.norm()`` would make NaN of zeros. ``autograd.grad`` returns none."""
    weight = nn.Parameter(torch.ones(3))
    hooks = ZeroedAdditions([weight])
    weight.register_hook(lambda gradient: gradient / gradient.norm())  # type: ignore[no-untyped-call]
    (slope,) = torch.autograd.grad((2 * weight).sum(), weight)
    assert slope.count_nonzero() == 3
    (2 * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0] * 3
    hooks.remove()
    weight.sum().backward()
    assert weight.grad.count_nonzero() == 3
