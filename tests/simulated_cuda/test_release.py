"""What an out-of-memory error keeps alive in the thread of a device is freed too."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_ga.memory.oom import release

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the simulated CUDA device: make test-cuda")


class Fails(torch.autograd.Function):
    """Runs out of memory in its backward pass, with a tensor at hand."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        held = torch.empty(2**22, device="cuda")
        raise torch.OutOfMemoryError(f"CUDA out of memory with {held.numel()} numbers")


@pytest.fixture
def one_thread_at_a_time() -> Iterator[None]:
    """Let the main thread keep the interpreter until it waits for something."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("one_thread_at_a_time")
def test_the_thread_of_a_backward_pass_lets_go() -> None:
    """It holds its error, and so the frame of what failed, until it takes up other work."""
    before = torch.cuda.memory_allocated()
    failure = None
    try:
        Fails.apply(torch.ones((), device="cuda", requires_grad=True)).backward()
    except torch.OutOfMemoryError as error:
        failure = error
    assert failure is not None
    release(failure)
    assert torch.cuda.memory_allocated() <= before
