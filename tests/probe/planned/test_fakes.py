from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_ga import UserError
from lightning_ga.probe.planned.fakes import Answers, PlainCopies, grown, hidden_workspaces, without_values


@contextmanager
def answering() -> Iterator[list[str]]:
    """Tensors have no values; the list holds what was doubted."""
    doubts: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True), Answers(doubts.append), PlainCopies():
        yield doubts


def test_scalars_are_one():
    """Of every kind; nothing is doubted for it."""
    with answering() as doubts:
        x = torch.randn(3)
        assert x.sum().item() == 1.0
        assert int(x.argmax()) == 1
        assert complex(torch.complex(x, x)[0]) == 1
        assert x.tolist() == [1.0, 1.0, 1.0]
        assert torch.tensor(7).item() == 7, "what a step makes itself is no secret"
        counts = torch.ones(7, dtype=torch.int64).bincount(minlength=10)
        assert counts.shape == (10,), "counts of known classes have a known size"
    assert doubts == []


@pytest.mark.parametrize(
    ("condition", "answer"),
    [
        (lambda x: x.isnan().any(), False),
        (lambda x: x.isinf().any(), False),
        (lambda x: torch.isfinite(x).all(), True),
        (lambda x: torch.isfinite(x.sum()), True),
        (lambda x: ~torch.isfinite(x).all(), False),
        (lambda x: torch.logical_not(torch.isnan(x).any()), True),
        (lambda x: x.sum() > 100, False),
        (lambda x: x.sum() != x.sum(), False),
        (lambda x: (x.sum() > 1) | torch.isfinite(x).all().view(()), True),
        (lambda x: torch.equal(x, x), True),
        (lambda x: torch.allclose(x, x), True),
    ],
)
def test_conditions_are_those_of_a_healthy_step(condition: Any, answer: bool):
    with answering():
        assert bool(condition(torch.randn(3))) is answer


@pytest.mark.parametrize(
    ("select", "shape"),
    [
        (lambda x, m: x[m], (6,)),
        (lambda x, m: x[:, m[0]], (2, 3)),
        (lambda x, m: x.masked_select(m), (6,)),
        (lambda x, m: m.nonzero(), (6, 2)),
        (lambda x, m: torch.where(m)[0], (6,)),
        (lambda x, m: x.unique(), (6,)),
    ],
)
def test_sizes_that_depend_on_values_are_the_largest(select: Any, shape: tuple[int, ...]):
    with answering() as doubts:
        x = torch.randn(2, 3)
        assert tuple(select(x, x > 0).shape) == shape
    assert len(doubts) == 1
    assert "its size depends on values" in doubts[0]


def test_masks_have_gradients_and_can_be_written_to():
    """The backward pass of a selection, and an assignment."""
    with answering():
        x = torch.randn(4, 3, requires_grad=True)
        x[x > 0].sum().backward()
        assert x.grad.shape == (4, 3)
        y = torch.zeros(4, 3)
        y[y > 0] = 1.0
        y[y > 0] = torch.ones(12)


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


def test_shared_parameters_stay_shared_and_a_choice_of_foreach_is_kept():
    """Those that an attribute refers to are found under their original's id; what is left open is decided."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = original = net[0].weight
    chosen = torch.optim.Adam(net.parameters(), foreach=False), torch.optim.Adam(net.parameters(), fused=True)
    with without_values(net, list(chosen), foreach=True) as (_, fakes):
        assert net[0].weight is net[1].weight is fakes[id(original)]
        assert len(list(net.parameters())) == 3
        assert [optimizer.param_groups[0]["foreach"] for optimizer in chosen] == [False, None]


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
    assert described(grown(batch(4), batch(6), periods)) == described(batch(4 + 2 * periods))


def test_modules_with_hidden_workspaces_are_named():
    net = nn.ModuleDict({"rnn": nn.LSTM(2, 2), "cell": nn.GRUCell(2, 2), "linear": nn.Linear(2, 2)})
    reasons = list(hidden_workspaces(net))
    assert [reason.split(":")[0] for reason in reasons] == ["rnn (LSTM)", "cell (GRUCell)"]


def test_a_size_that_nothing_bounds_stays_an_error():
    """Rather than a guess."""
    with answering(), pytest.raises(Exception, match="repeat_interleave"):
        torch.repeat_interleave(torch.ones(3), torch.tensor([1, 2, 3]).float().sqrt().long())


def test_operators_of_other_libraries_are_doubted():
    """Only their results are seen."""
    with torch.library._scoped_library("test_fakes", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        with answering() as doubts:
            torch.ops.test_fakes.twice(torch.ones(3))
    assert doubts == ["test_fakes.twice: an operator whose scratch memory is not known"]


def test_lazy_modules_are_refused():
    """They have no shapes yet."""
    with pytest.raises(UserError, match="lazy module"), without_values(nn.LazyLinear(3), [], foreach=True):
        pass
