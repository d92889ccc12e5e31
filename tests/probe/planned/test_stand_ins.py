from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_ga import UserError
from lightning_ga.probe.planned.fakes import Answers
from lightning_ga.probe.planned.stand_ins import grown, hidden_workspaces, without_values


def test_a_module_and_its_optimizer_come_back():
    """Same objects, same values, same settings, also after an error."""
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    net[0].bias = nn.Parameter(net[0].bias.detach())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    before = [*net.parameters(), *net.buffers()], [p.grad for p in net.parameters()], deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="in between"), without_values(net, [optimizer], foreach=True) as (mode, _):
        assert all(isinstance(tensor, FakeTensor) for tensor in (*net.parameters(), *net.buffers()))
        assert optimizer.param_groups[0]["params"][0] is net[0].weight
        assert optimizer.param_groups[0]["foreach"] is True
        assert all(isinstance(s["exp_avg"], FakeTensor) for s in optimizer.state.values())
        with mode, Answers(pytest.fail):
            net(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        raise ValueError("in between")
    tensors, gradients, state = before
    assert all(a is b for a, b in zip([*net.parameters(), *net.buffers()], tensors))
    assert all(p.grad is gradient for p, gradient in zip(net.parameters(), gradients))
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert all(torch.equal(after["state"][0][name], state["state"][0][name]) for name in state["state"][0])


def test_shared_parameters_stay_shared():
    """And those that an attribute refers to are found under their original's id."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    original = net[0].weight
    with without_values(net, [], foreach=False) as (_, fakes):
        assert net[0].weight is net[1].weight is fakes[id(original)]
        assert len(list(net.parameters())) == 3


def test_a_choice_of_foreach_is_kept():
    """Only what is left open is decided."""
    parameters = [nn.Parameter(torch.ones(2))]
    net = nn.ParameterList(parameters)
    chosen = torch.optim.Adam(parameters, foreach=False), torch.optim.Adam(parameters, fused=True)
    with without_values(net, list(chosen), foreach=True):
        assert [optimizer.param_groups[0]["foreach"] for optimizer in chosen] == [False, None]


def test_lazy_modules_are_refused():
    """They have no shapes yet."""
    with pytest.raises(UserError, match="lazy module"), without_values(nn.LazyLinear(3), [], foreach=True):
        pass


class Pair(NamedTuple):
    first: Any
    second: Any


class Record:
    def __init__(self, x: torch.Tensor, count: int) -> None:
        self.x, self.count, self.name = x, count, "name"


def batch(samples: int) -> Any:
    """Of every structure that loaders make."""
    return {
        "images": torch.zeros(samples, 3, 4, 5).to(memory_format=torch.channels_last),
        "pairs": torch.zeros(samples, samples),
        "offsets": torch.zeros(samples + 1, dtype=torch.int64),
        "list": [torch.zeros(k % 2 + 1) for k in range(samples)],
        "names": [str(k % 2) for k in range(samples)],
        "pair": Pair(torch.zeros(2 * samples), [torch.zeros(7)]),
        "record": Record(torch.zeros(samples, 2), samples),
        "flag": True,
        "none": None,
        "scale": 0.5,
    }


def described(value: Any) -> Any:
    """A structure with shapes in place of tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.stride()
    if isinstance(value, Record):
        return described(vars(value))
    if isinstance(value, dict):
        return {key: described(inner) for key, inner in value.items()}
    return type(value)(*map(described, value)) if isinstance(value, Pair) else (
        [described(inner) for inner in value] if isinstance(value, list) else value
    )  # fmt: skip


@pytest.mark.parametrize("periods", [0, 1, 7])
def test_a_batch_grows_as_its_loader_would_make_it(periods: int):
    """Tensors in every direction that grows, lists, counts and objects."""
    assert described(grown(batch(4), batch(6), periods)) == described(batch(4 + 2 * periods))


def test_modules_with_hidden_workspaces_are_named():
    """By their path and kind."""
    net = nn.ModuleDict({"rnn": nn.LSTM(2, 2), "cell": nn.GRUCell(2, 2), "linear": nn.Linear(2, 2)})
    reasons = list(hidden_workspaces(net))
    assert [reason.split(":")[0] for reason in reasons] == ["rnn (LSTM)", "cell (GRUCell)"]
