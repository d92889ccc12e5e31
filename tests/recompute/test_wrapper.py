"""Submodules that are computed again: the oracle is the same training without."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from recompute_programs import COUNTS, EXACT, OUTSIDE, REFUSED, WIDTH, Net
from torch import Tensor, nn

from lightning_ga import UserError, recomputed

SAMPLES, STEPS = 12, 6


def train(net: Net, context: Callable[[Net], Any], steps: int = STEPS) -> list[Tensor]:
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


@pytest.mark.parametrize("kind", EXACT)
def test_the_gradient_is_the_same_to_the_bit(kind: str) -> None:
    """And so are buffers after it, and the random numbers that are drawn next."""
    plain, ours = train(made(EXACT[kind]), plainly), train(made(EXACT[kind]), again)
    assert len(plain) == len(ours)
    assert [number for number, pair in enumerate(zip(plain, ours)) if not torch.equal(*pair)] == []
