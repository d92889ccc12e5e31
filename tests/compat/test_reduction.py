"""Buckets are sent in order, each as soon as it is complete, and all of them once; ranks are in ``integration/``."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ga.compat.buckets import Bucket, make_buckets
from lightning_ga.compat.reduction import IN_FLIGHT, GradientReducer, WindowReduction
from lightning_ga.errors import UserError


class Ranks:
    """Another rank whose gradients are those of this one, times three; notes what is sent and received."""

    def __init__(self) -> None:
        self.sent: list[Bucket] = []
        self.received = 0
        self.fails = 0

    def send(self, bucket: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
        if self.fails:
            self.fails -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
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
        self.at_the_end = len(self.ranks.sent)
        self.window.finish()

    def averages(self) -> list[torch.Tensor]:
        """What gradients should be."""
        return [2 * g for g in torch.autograd.grad(self(torch.ones(3)).sum(), list(self.weights))]


def gradients(module: Chain) -> list[torch.Tensor | None]:
    return [weight.grad for weight in module.weights]


def equal(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_each_is_sent_when_it_is_complete() -> None:
    """The last layer first, two at a time on their way; nothing is left for the end."""
    chain = Chain()
    assert not chain.window.is_over
    chain.backward(chain(torch.ones(3)).sum())
    assert chain.window.is_over
    assert chain.ranks.sent == chain.buckets
    assert [bucket.last for bucket in chain.buckets] == list(reversed(chain.weights))
    assert chain.at_the_end == 5
    assert equal(gradients(chain), chain.averages())


def test_one_without_a_gradient_holds_back_those_after_it() -> None:
    """Ranks whose passes use other parameters send the same."""
    chain = Chain()
    inputs = torch.sin(torch.sin(torch.ones(3) * chain.weights[0]) * chain.weights[1])
    chain.backward(torch.sin(torch.sin(inputs * chain.weights[3]) * chain.weights[4]).sum())
    assert chain.at_the_end == 2
    assert chain.ranks.sent == chain.buckets
    assert chain.weights[2].grad is None


def test_what_a_pass_sent_that_fails_is_kept_while_it_runs_again() -> None:
    """It is not sent again, and nothing is sent in that pass."""
    chain = Chain()
    wanted = chain.averages()
    loss = chain(torch.ones(3)).sum()
    hook = chain.weights[1].register_hook(lambda _: setattr(chain.ranks, "fails", 1))
    with pytest.raises(torch.OutOfMemoryError):
        chain.backward(loss)
    assert len(chain.ranks.sent) == 3
    chain.window.set_aside()
    hook.remove()
    assert gradients(chain)[2:] == [None] * 3
    chain.weights[1].grad = None  # as zeroed
    chain.backward(chain(torch.ones(3)).sum())
    assert chain.at_the_end == 3
    assert chain.ranks.sent == chain.buckets
    assert chain.window.is_over
    assert equal(gradients(chain), wanted)


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


def sent_in_passes(chain: Chain, *may_overlap: bool, also: str = "") -> list[int]:
    """How many messages a training sends in each backward pass, each of which ends a window.

    Besides, a checkpointed part adds to a gradient (``"twice"``), or a kernel writes one (``"written"``).
    """
    other = nn.Parameter(torch.ones(3))
    sent, reducer = [0], GradientReducer(Parallel(nn.ParameterList([*chain.weights, other])))

    def backward(loss: torch.Tensor) -> None:
        before = len(chain.ranks.sent)
        loss.backward()
        sent.append(len(chain.ranks.sent) - before)

    trainer: Any = SimpleNamespace(precision_plugin=SimpleNamespace(backward=backward))
    for overlaps in may_overlap:
        window = WindowReduction(chain.buckets, chain.ranks.send)
        inputs = torch.ones(3, requires_grad=True)
        inputs.register_hook(lambda _: setattr(other, "grad", torch.ones(3)) if also == "written" else None)
        if also == "twice":
            inputs = checkpoint(lambda inputs: inputs * chain.weights[0], inputs, use_reentrant=True)
        with reducer.around_backward(trainer, window, may_overlap=overlaps):
            trainer.precision_plugin.backward(chain(inputs).sum())
        assert window.is_over
        chain.zero_grad()
    with reducer.around_backward(trainer, None, may_overlap=True):
        assert trainer.precision_plugin.backward is backward
    return sent[1:]


def test_a_first_pass_shows_in_which_order_gradients_come() -> None:
    """Later ones send them as they come, unless ranks wait for each other in passes, or one may come again."""
    assert sent_in_passes(Chain(), True, True, False, True) == [0, 5, 0, 5]
    assert sent_in_passes(Chain(), True, True, also="twice") == [0, 0]
    assert sent_in_passes(Chain(), True, True, also="written") == [0, 0]


def test_a_message_waits_for_the_gradient_that_came_last() -> None:
    chain = Chain()
    reducer = GradientReducer(Parallel(chain))
    trainer: Any = SimpleNamespace(precision_plugin=SimpleNamespace(backward=torch.Tensor.backward))
    with reducer.around_backward(trainer, None, may_overlap=True):
        trainer.precision_plugin.backward(chain(torch.ones(3)).sum())
    (bucket,) = reducer.window(summed=True)._waiting
    assert bucket.last is chain.weights[0]


def test_parameters_that_come_to_be_trained_within_a_window_are_refused() -> None:
    """No rank would send their gradients, and weights would drift apart."""
    weights = nn.ParameterList([torch.ones(3), nn.Parameter(torch.ones(2), requires_grad=False)])
    reducer = GradientReducer(Parallel(weights))
    weights[1].requires_grad_()
    reducer.check()
    sum(weight.sum() for weight in weights).backward()
    with pytest.raises(UserError, match=r"requires_grad=True on 1 parameters \(the first is of shape \(2,\)"):
        reducer.check()
