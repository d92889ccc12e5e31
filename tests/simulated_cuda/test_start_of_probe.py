"""What a probe does before its first step, on a device with a real allocator."""

import gc
from collections.abc import Iterator
from typing import Any

import device_counters
import pytest
import torch

from lightning_ga import find_micro_batch

pytestmark = pytest.mark.skipif(
    not device_counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"
)
MIB = 2**20


@pytest.fixture
def full_collections() -> Iterator[list[int]]:
    """Full collections that were asked for: one before each step, of what is new, and one more of all objects."""
    found: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(1)

    gc.collect()
    gc.disable()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.enable()


def limit_beside(weights: torch.Tensor) -> int:
    """The limit of a step that takes 100 MiB a sample, in what is free."""

    def step(samples: int) -> None:
        torch.empty(100 * MIB * samples, dtype=torch.uint8, device="cuda")

    return find_micro_batch(step, high=10**6, budget="8GiB", device="cuda", resident=lambda: [weights]).limit


def test_all_objects_are_looked_through_only_where_memory_may_wait_for_it(full_collections: list[int]) -> None:
    """A full collection takes seconds in a large process: none where all that is alive is known."""
    weights = torch.empty(MIB, device="cuda")
    limit = limit_beside(weights)
    before_steps = len(full_collections)
    cycle: list[Any] = [torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")]
    cycle.append(cycle)
    del cycle
    assert limit_beside(weights) == limit
    assert len(full_collections) == 2 * before_steps + 1
