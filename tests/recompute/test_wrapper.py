"""Submodules that are computed again: the oracle is the same training without."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from recompute_programs import COUNTS, EXACT, OUTSIDE, REFUSED, WIDTH, Net
from torch import Tensor, nn

from lightning_ga import UserError, recomputed
from lightning_ga.memory.live_tensors import LiveTensorMeter

SAMPLES, STEPS = 12, 6


def train_net(net: Net, context: Callable[[Net], Any], steps: int = STEPS) -> list[Tensor]:
    """Return gradients and buffers of some steps within a context, and the random numbers that are drawn next."""
    torch.manual_seed(7), np.random.seed(7), random.seed(7), OUTSIDE.manual_seed(7), COUNTS.clear()
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    with context(net):
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(SAMPLES, WIDTH)).backward()
            optimizer.step()
            seen += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            seen += [buffer.clone() for buffer in net.buffers()]
    return [*seen, torch.rand(2), torch.tensor([np.random.rand(), random.random()])]


def plainly(net: Net) -> Any:
    return nullcontext()


def again(net: Net) -> Any:
    return recomputed(net, ["part"])


def made(make: Any) -> Net:
    torch.manual_seed(0)
    return make()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.*weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", EXACT)
def test_the_gradient_is_the_same_to_the_bit(kind: str) -> None:
    """And so are buffers after it, and the random numbers that are drawn next."""
    plain, ours = train_net(made(EXACT[kind]), plainly), train_net(made(EXACT[kind]), again)
    assert len(plain) == len(ours)
    assert [number for number, pair in enumerate(zip(plain, ours)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize("kind", ["dropout", "BatchNorm", "attribute", "DenseNet's list", "codebook"])
def test_a_backward_pass_may_come_after_the_context_and_twice(kind: str) -> None:
    """The state is that of after the forward pass, however often it runs again."""
    seen = []
    for context in (plainly, again):
        net = made(EXACT[kind])
        torch.manual_seed(3)
        with context(net):
            loss = net(torch.randn(SAMPLES, WIDTH))
        loss.backward(retain_graph=True)
        loss.backward()
        seen.append([*(p.grad for p in net.parameters() if p.grad is not None), *net.buffers(), torch.rand(2)])
    assert all(map(torch.equal, *seen))


def test_gradients_of_gradients_are_the_same() -> None:
    """A penalty on the gradient differentiates through the second pass."""
    seen = []
    for context in (plainly, again):
        net = made(EXACT["BatchNorm"])
        inputs = torch.linspace(-1, 1, SAMPLES * WIDTH).view(SAMPLES, WIDTH).requires_grad_()
        with context(net):
            (gradient,) = torch.autograd.grad(net(inputs), inputs, create_graph=True)
            gradient.square().sum().backward()
        seen.append([p.grad for p in net.parameters() if p.grad is not None])
    assert all(map(torch.equal, *seen))


def test_autocast_and_evaluation_are_as_they_were() -> None:
    seen = []
    for context in (plainly, again):
        net = made(EXACT["dropout"])
        torch.manual_seed(3)
        with context(net):
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(torch.randn(SAMPLES, WIDTH))
            loss.backward()
            with torch.no_grad():
                evaluated = net(torch.ones(SAMPLES, WIDTH))
        seen.append([*(p.grad for p in net.parameters()), evaluated])
    assert all(map(torch.equal, *seen))


def test_a_context_inside_another_computes_its_part_in_both_passes() -> None:
    plain, ours = train_net(made(EXACT["BatchNorm"]), plainly), made(EXACT["BatchNorm"])

    @contextmanager
    def nested(net: Net) -> Iterator[None]:
        with recomputed(net.part, ["1"]), recomputed(net, ["part"]):
            yield

    assert all(map(torch.equal, plain, train_net(ours, nested)))
    assert "forward" not in vars(ours.part), "it is as before"


@pytest.mark.parametrize("kind", ["list", "dictionary", "queue", "object", "NumPy's generator", "hidden state"])
def test_what_is_put_in_the_place_of_an_attribute_is_seen(kind: str) -> None:
    """As trial steps do, which work on copies: between two calls in which nothing is looked at."""

    def copied(net: Net, context: Any) -> list[Tensor]:
        torch.manual_seed(3)
        seen = []
        with context(net):
            for number in range(8):
                if number in (5, 6):
                    for name in ("seen", "state", "queue", "running", "own", "hidden"):
                        if name in vars(net.part):
                            setattr(net.part, name, deepcopy(vars(net.part)[name]))
                net.zero_grad()
                net(torch.randn(SAMPLES, WIDTH)).backward()
                seen += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        return seen

    plain, ours = (copied(made(EXACT[kind]), context) for context in (plainly, again))
    assert all(map(torch.equal, plain, ours))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    one = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.BatchNorm1d(32)) for _ in range(8)]
    return nn.Sequential(*one)


def test_a_block_keeps_its_argument_and_copies_of_its_buffers() -> None:
    """It keeps no input of GELU, of the second layer and of BatchNorm, nor mean and deviation of the batch."""
    kept = []
    for names in ([], [str(number) for number in range(8)]):
        net = blocks()
        with recomputed(net, names), LiveTensorMeter() as meter:
            loss = net(torch.randn(64, 32)).square().mean()
            kept.append(meter.live_bytes)
        del loss
    buffers = 2 * 32 * 4 + 8
    assert kept[0] - kept[1] == 8 * (64 * (128 + 128 + 32) * 4 + 2 * 32 * 4 - buffers)


class Counting:
    """An object of a user's own, maybe inside others."""

    def __init__(self, inner: Any = None) -> None:
        self.inner, self.count = inner, 0

    def next(self) -> int:
        if self.inner is not None:
            return self.inner[0].next()
        self.count += 1
        return self.count


class Late(nn.Module):
    """Draws or counts from its fifth call on, which is none of those in which parameters are looked at."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.change, self.calls = nn.Linear(WIDTH, WIDTH), change, 0
        self.own = torch.Generator().manual_seed(3)
        self.queue, self.array, self.nested = [1.0], np.zeros(2), Counting([Counting([Counting()])])

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor = self.change(self) if self.calls >= 5 else 1.0
        return torch.tanh(self.layer(x) * factor)


def add_one(part: Any) -> float:
    part.array[0] += 1
    return float(part.array[0])


LATE: dict[str, Callable[[Any], Any]] = {
    "Python": lambda _: random.random(),
    "NumPy": lambda _: np.random.rand(),
    "torch": lambda _: torch.rand(()),
    "a generator of its own": lambda part: torch.rand((), generator=part.own),
    "a list": lambda part: part.queue.append(2.0) or sum(part.queue),
    "an array": add_one,
    "an object in an object in an object": lambda part: part.nested.next(),
}


@pytest.mark.parametrize("kind", LATE)
def test_what_changes_first_in_a_later_call_is_put_back(kind: str) -> None:
    """Whatever the calls before have shown."""

    def gradients(context: Any) -> list[Tensor]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        net = nn.Sequential(Late(LATE[kind]))
        found = []
        with context(net):
            for _ in range(9):
                net.zero_grad()
                net(torch.ones(2, WIDTH)).square().sum().backward()
                found.append(net[0].layer.weight.grad.clone())
        return found

    assert all(map(torch.equal, gradients(plainly), gradients(lambda net: recomputed(net, ["0"]))))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["0.7"], "names '0.7', and Sequential has no such submodule: it has '0.3', '0.2', '0.1'"),
        ([""], "names '', and Sequential has no such submodule: it has '0', '1', '2'"),
        (["0", "1.2", "1"], "names '1' and '1.2', which lies inside it: name one of the two"),
    ],
)
def test_wrong_names_are_refused(names: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence), recomputed(blocks(), names):
        pass


@pytest.mark.parametrize(
    "kind",
    [
        *("parameter", "large buffer", "large tensor in a list", "large array"),
        *("ReLU in place on its argument", "data class in place", "object in place"),
    ],
)
def test_a_forward_pass_that_cannot_run_again_is_refused_at_once(kind: str) -> None:
    make, _ = REFUSED[kind]
    with pytest.raises(UserError, match="part cannot be computed again, because its forward pass"):
        train_net(made(make), again)


@pytest.mark.parametrize("kind", ["caller writes", "caller writes to a data class"])
def test_an_argument_that_the_caller_writes_to_later_is_seen(kind: str) -> None:
    """By autograd, as if the submodule had saved it."""
    make, _ = REFUSED[kind]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_net(made(make), again)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_code_keeps_its_activations(whole: bool) -> None:
    """Dynamo cannot trace what stands in for a forward pass, and saves what it chooses."""

    def run(context: Callable[[Net], Any]) -> list[Tensor]:
        torch._dynamo.reset()
        net = made(EXACT["BatchNorm"])
        (net if whole else net.part).compile(backend="aot_eager")
        return train_net(net, context)

    for one, other in zip(run(plainly), run(again), strict=True):
        torch.testing.assert_close(one, other)
