"""The emulated device."""

import pytest
import torch
from torch import nn

from lightning_ga.errors import UserError
from lightning_ga.memory.oom import is_out_of_memory, release
from lightning_ga.testing import limit_memory, out_of_memory_at


def train_on(samples: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 5))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(samples, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def peak_of(samples: int) -> int:
    with limit_memory("1GiB") as memory:
        train_on(samples)
    return memory.peak_bytes


@pytest.mark.parametrize("samples", [1, 1000])
def test_a_budget_equal_to_the_peak_passes_and_one_byte_less_raises(samples: int) -> None:
    peak = peak_of(samples)
    assert peak == peak_of(samples)
    with limit_memory(peak) as memory:
        train_on(samples)
    assert memory.peak_bytes == peak
    with limit_memory(peak - 1) as memory, pytest.raises(torch.OutOfMemoryError) as caught:
        train_on(samples)
    assert memory.peak_bytes < peak
    assert is_out_of_memory(caught.value)


def test_after_a_released_error_the_live_bytes_are_back_to_the_byte() -> None:
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(5)))
    with limit_memory("1GiB") as memory:
        model(torch.randn(1, 50))
        before = memory.live_bytes
        memory.budget = before + 50_000
        failure = None
        try:
            model(torch.randn(1000, 50)).sum().backward()
        except torch.OutOfMemoryError as error:
            failure = error
        assert failure is not None
        release(failure)
        assert memory.live_bytes == before


def test_out_of_memory_at_every_single_operation() -> None:
    """In forward, backward and optimizer: the operation before still ran, the error is an out-of-memory error."""
    with out_of_memory_at(0) as counter:
        train_on(3)
    assert counter.operations > 50
    for operation in range(1, counter.operations + 1, 10):
        with out_of_memory_at(operation) as failing, pytest.raises(torch.OutOfMemoryError):
            train_on(3)
        assert failing.operations >= operation


@pytest.mark.parametrize("budget", ["plenty", 0, "80%"])
def test_a_bad_budget_is_refused(budget: int | str) -> None:
    with pytest.raises(UserError, match="^budget="), limit_memory(budget):
        pass
