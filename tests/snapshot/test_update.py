"""What a failed update has changed is seen, and what it had begun to make is removed."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from faults import Faults
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ga.snapshot.update import UpdateSnapshot, without_hooks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW by lists": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "AdamW fused": lambda weights: torch.optim.AdamW(weights, fused=True),
    "LBFGS": torch.optim.LBFGS,
}


class Counting(torch.optim.Optimizer):
    """Keeps numbers, lists and tensors in its states, and numbers of its own, and replaces tensors."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1, "seen": 0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["seen"] += 1
            for weight in group["params"]:
                state = self.state[weight]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("kept", []).append(weight.grad.clone())
                nested = state.setdefault("nested", ({"count": 0, "scales": []},))
                nested[0]["count"] += 1
                nested[0]["scales"].append(float(state["count"]))
                state["mean"] = state.get("mean", 0.0) + weight.grad
                if state["count"] > 1:
                    state["late"] = weight.grad.clone()
                weight -= group["lr"] * weight.grad


def trained(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model after some steps, with gradients for the next."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = make(net.parameters())
    for number in range(steps + 1):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).square().mean().backward()
        if number < steps:
            optimizer.step(None if not isinstance(optimizer, torch.optim.LBFGS) else lambda: torch.tensor(1.0))
    return net, optimizer


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "Counting"])
def test_each_single_change_is_seen(name: str, steps: int) -> None:
    """A weight, a gradient, or a tensor of the state that was written to, whatever has happened before."""
    net, optimizer = trained(OPTIMIZERS.get(name, Counting), steps)
    snapshot = UpdateSnapshot(optimizer)
    weights = [*net.parameters()]
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    assert len(gradients) == len(weights)
    for tensor in [*weights, *gradients, *states]:
        snapshot.take()
        assert not snapshot.have_changed()
        with torch.no_grad():
            tensor.add_(0)
        assert snapshot.have_changed()


def test_what_a_step_had_begun_is_removed_and_numbers_are_set_back() -> None:
    """In every state of an optimizer's life: before its first step, and where a step adds names to its states."""
    for steps in (0, 1, 3):
        net, optimizer = trained(Counting, steps)
        before = copy.deepcopy({id(key): {**state, "mean": None} for key, state in optimizer.state.items()})
        snapshot = UpdateSnapshot(optimizer)
        snapshot.take()
        snapshot.take()  # its second look knows where all lies
        optimizer.step()
        snapshot.restore()
        assert [group["seen"] for group in optimizer.param_groups] == [steps]
        after = {id(key): state for key, state in optimizer.state.items()}
        assert vars(optimizer)["steps"] == steps
        assert {key: [*state] for key, state in after.items()} == {key: [*state] for key, state in before.items()}
        for key, state in before.items():
            assert after[key]["count"] == state["count"] == len(after[key]["kept"])
            assert after[key]["nested"] == state["nested"]


@pytest.mark.parametrize("name", ["AdamW", "AdamW by lists", "AdamW fused", "Counting"])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_whole_step_is_seen_on_all_weights(name: str, steps: int) -> None:
    """Fused kernels raise no version of weights, but of the steps that are counted before they run."""
    _, optimizer = trained(OPTIMIZERS.get(name, Counting), steps)
    snapshot = UpdateSnapshot(optimizer)
    snapshot.take()
    assert snapshot.all_have_changed() is False
    optimizer.step()
    assert snapshot.all_have_changed() is True
    assert snapshot.counts_fused_steps()


def test_nothing_is_kept_alive_after_an_update() -> None:
    """Gradients and states are the optimizer's."""
    net, optimizer = trained(torch.optim.AdamW, 1)
    snapshot = UpdateSnapshot(optimizer)
    snapshot.take()
    snapshot.forget()
    held = [value for value in vars(snapshot).values() if isinstance(value, list)]
    assert not any(isinstance(thing, torch.Tensor) for value in held for thing in value)


OWN = {
    "SGD": lambda groups, **how: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1, **how),
    "SGD without momentum": lambda groups, **how: torch.optim.SGD(groups, lr=0.1, **how),
    "Adam": lambda groups, **how: torch.optim.Adam(groups, amsgrad=True, weight_decay=0.1, **how),
    "Rprop": lambda groups, **how: torch.optim.Rprop(groups, maximize=True, **how),
    **{
        name: getattr(torch.optim, name)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop")
    },
}


def two_types(make: Any, **how: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Weights of two types in two groups, the first of which gets no gradient, after two steps."""
    torch.manual_seed(0)
    types = [torch.float32, torch.float32, torch.float64, torch.float32, torch.float64, torch.float64, torch.float32]
    weights = [nn.Parameter(torch.randn(2, 3, dtype=dtype)) for dtype in types]
    optimizer = make([{"params": weights[:5]}, {"params": weights[5:]}], **how)
    give_gradients(weights)
    optimizer.step()
    give_gradients(weights)
    optimizer.step()
    give_gradients(weights)
    weights[0].grad = None
    return weights, optimizer


def give_gradients(weights: list[nn.Parameter]) -> None:
    """New gradients for these alone."""
    for weight in weights:
        weight.grad = torch.randn_like(weight)


def values(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of all that an update may change."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*weights, *(weight.grad for weight in weights), *states]
    return [tensor.detach().clone() for tensor in held if isinstance(tensor, torch.Tensor)]


class StoppedError(Exception):
    """An update that was stopped."""


@contextmanager
def stopped_at(place: int, *, foreach: bool) -> Iterator[list[int]]:
    """Stop at an operation; on lists, at one that is called for them, as a mode would hide their versions."""
    if not foreach:
        faults = Faults(place)
        faults.armed = True
        with faults, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "OutOfMemoryError", StoppedError)
            yield [0]
        return
    calls = [0]

    def counted(operation: Any) -> Any:
        def run(*arguments: Any, **settings: Any) -> Any:
            calls[0] += 1
            if calls[0] == place:
                raise StoppedError
            return operation(*arguments, **settings)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in dir(torch):
            if name.startswith("_foreach_"):
                patch.setattr(torch, name, counted(getattr(torch, name)))
        yield calls


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "lists"])
@pytest.mark.parametrize("name", OWN)
def test_a_short_look_sees_every_update_that_has_begun(name: str, foreach: bool) -> None:
    """PyTorch's own optimizers write to their weights in order, wherever they are stopped."""
    seen = []
    for place in range(1, 500):
        weights, optimizer = two_types(OWN[name], foreach=foreach)
        snapshot = UpdateSnapshot(optimizer)
        snapshot.take()
        snapshot.take(short=True)
        assert len(snapshot._versions) == 4  # the first of each type in each group
        before = values(weights, optimizer)
        try:
            with stopped_at(place, foreach=foreach):
                optimizer.step()
        except StoppedError:
            changed = any(not torch.equal(*pair) for pair in zip(before, values(weights, optimizer), strict=True))
            assert snapshot.have_changed() or not changed
            seen.append(changed)
        else:
            break
    assert place > 2
    assert snapshot.have_changed()
    assert True in seen, "no update was stopped halfway"


def test_a_short_look_is_taken_only_where_states_are_made() -> None:
    """While an update makes states, and where their number has changed, everything is looked at."""
    weights, optimizer = two_types(OWN["SGD"])
    snapshot = UpdateSnapshot(optimizer)
    momentum = optimizer.state[weights[1]]["momentum_buffer"]
    for buffer in (None, momentum):
        optimizer.state[weights[1]]["momentum_buffer"] = buffer
        snapshot.take()
        snapshot.take(short=True)
        assert snapshot.have_changed() == (buffer is None)
    extra = {"params": [nn.Parameter(torch.ones(2))]}
    for change in (lambda: optimizer.state.pop(weights[3]), lambda: optimizer.add_param_group(extra)):
        change()
        snapshot.take(short=True)
        assert len(snapshot._versions) == 6


def test_hooks_before_a_step_are_looked_at_and_left_out_of_a_second_one() -> None:
    """They write where they like, in no order; where the update alone is run again, they have run."""
    _, optimizer = two_types(OWN["SGD"])
    snapshot, calls = UpdateSnapshot(optimizer), list[str]()
    optimizer.register_step_pre_hook(lambda *_: calls.append("first"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("everywhere"))
    try:
        snapshot.take()
        snapshot.take(short=True)
        assert len(snapshot._versions) == 6
        with without_hooks(optimizer):
            optimizer.step()
        assert calls == []
        optimizer.step()
        assert sorted(calls) == ["everywhere", "first"]
    finally:
        everywhere.remove()
