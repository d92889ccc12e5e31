"""The allocator's own events, read as the stream of a step; its statistics are in ``test_memory``."""

from typing import Any

import pytest
import torch

from lightning_ga.memory.allocator import AllocatorMeter, RepeatedRetries, events_as_trace
from lightning_ga.memory.trace import Segment


def alloc(address: int, size: int) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size, "stream": 0}


def free(address: int, size: int) -> list[dict[str, Any]]:
    """The allocator notes when a release is asked for and when it is done."""
    event = {"addr": address, "size": size, "stream": 0}
    return [{"action": "free_requested", **event}, {"action": "free_completed", **event}]


def step(samples: int) -> list[dict[str, Any]]:
    """A gradient from before is released, activations and a workspace come and go, a new gradient stays."""
    return [
        {"action": "segment_alloc", "addr": 0, "size": 2 << 20},
        alloc(10, 1000 * samples),
        alloc(20, 8_519_680),
        *free(20, 8_519_680),
        *free(5, 700),
        alloc(20, 4000 * samples),
        *free(20, 4000 * samples),
        *free(10, 1000 * samples),
        alloc(30, 700),
    ]


def test_blocks_of_the_allocator_are_the_storages_of_a_step() -> None:
    trace = events_as_trace(step(4), samples=4, alive=10_240)
    assert trace.sizes == (10_240 - 1024, 4000, 8_519_680, 700, 16_000, 700)
    assert trace.events == (0, 3, 1, 2, ~3, ~2, 4, ~4, ~1, 5)
    assert trace.peak(512) == 10_240 + 4096 + 8_519_680


def test_segments_before_a_step_are_kept_with_it() -> None:
    """A hole, what stays, and a block that the step releases, by its address."""
    blocks = [("active_allocated", 2048), ("inactive", 512), ("active_allocated", 1024)]
    segment = {
        "address": 4096,
        "segment_type": "small",
        "blocks": [{"state": state, "size": size} for state, size in blocks],
    }
    step = [*free(4096 + 2560, 1000), alloc(1, 512)]
    trace = events_as_trace(step, samples=2, alive=3072, segments=[segment])
    assert trace.layout == (Segment(True, ((2048, 0), (512, -1), (1024, 1))),)
    assert trace.sizes == (2048, 1000, 512)
    assert trace.events == (0, 1, ~1, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_history_has_the_peak_of_the_statistics() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    meter = AllocatorMeter(device)
    layer = torch.nn.Linear(512, 512, device=device)
    for samples in (64, 128):
        meter.start(record=True)
        layer(torch.randn(samples, 512, device=device)).square().sum().backward()
        peak, undisturbed = meter.finish()
        trace = meter.trace(samples)
        assert undisturbed
        assert trace is not None
        assert trace.peak(512) == peak
        layer.zero_grad()


def test_retries_in_two_windows_running_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([1, 1, 2, 2, 3, 5, 5])  # at the start, then after each window
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {"num_alloc_retries": next(counts)})
    retries = RepeatedRetries(torch.device("cuda"))
    assert [retries.after_window() for _ in range(6)] == [False, False, False, False, True, False]


def test_retries_before_an_error_are_those_of_no_other_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that runs again twice is no two windows."""
    counts = iter([0, 1, 2, 3, 4, 5, 6])
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {"num_alloc_retries": next(counts)})
    retries = RepeatedRetries(torch.device("cuda"))
    for _ in range(2):
        assert not retries.after_window()
        retries.count_anew()
    assert [retries.after_window(), retries.after_window()] == [False, True]
