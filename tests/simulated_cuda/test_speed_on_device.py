"""Speeds of ranks by events of the device, which are read when they are asked for."""

import math

import device_counters
import pytest
import torch

from lightning_ga.probe.speed import WINDOWS, Speed

pytestmark = pytest.mark.skipif(
    not device_counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"
)


def test_events_measure_windows_also_from_the_thread_of_a_backward_pass() -> None:
    measured = Speed(torch.device("cuda", 0))
    weight = torch.ones(1000, device="cuda", requires_grad=True)
    weight.register_hook(lambda gradient: measured.note_sending())
    for _ in range(WINDOWS):
        measured.begin_window()
        with measured.waiting():
            pass
        weight.square().sum().backward()
        measured.end_window(4)
    assert 0 < measured.take() < math.inf
