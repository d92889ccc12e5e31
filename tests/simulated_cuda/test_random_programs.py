"""Trainings that chance writes: what is left of them after errors is what stock Lightning leaves without.

``make test-cuda ARGS="--programs 400"`` tries more.
"""

from typing import Any

import device_counters
import pytest
import torch
from torch.utils._pytree import tree_flatten

from lightning_ga import AutoAccumulate

pytestmark = [
    pytest.mark.skipif(not device_counters.is_loaded(), reason="needs the simulated CUDA device: make test-cuda"),
    pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning"),
    # Lightning's and PyTorch's, of what chance has chosen
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]
if device_counters.is_loaded():
    from random_programs import Failing, Program, draw, train

AT_ONCE, RUNS = 4, 2  # programs of a test, and runs of each with errors at other operators


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """As many programs as were asked for."""
    if "first" in metafunc.fixturenames:
        metafunc.parametrize("first", range(0, metafunc.config.getoption("--programs", 12), AT_ONCE))


def test_errors_leave_nothing_behind(first: int) -> None:
    """In weights, optimizer, scaler, state of the step's own, logged values and samples of steps."""
    assert sum(map(survived, map(draw, range(first, first + AT_ONCE)))) > 0, "memory never ran out"


def survived(program: "Program") -> int:
    """How many errors were, with the result of stock Lightning."""
    stock, events = train(program), 0
    for run in (None, *range(RUNS)):
        callback = AutoAccumulate(
            micro_batch_size=program.micro_batch, micro_batching=program.mode, verify=False, cache=False
        )
        ours = train(program, callback, Failing(None if run is None else program.seed * RUNS + run))
        assert_same(ours, stock, program)
        assert run is not None or callback.oom_events == 0
        events += callback.oom_events
    return events


def assert_same(ours: Any, stock: Any, program: "Program") -> None:
    """Up to rounding in 64 bits, which optimizers that divide by small numbers enlarge."""
    (values, structure), (expected, other) = tree_flatten(ours), tree_flatten(stock)
    assert structure == other, program
    for value, right in zip(values, expected):
        if isinstance(right, (torch.Tensor, float)):
            torch.testing.assert_close(
                value, right, rtol=1e-6, atol=1e-9, equal_nan=True, msg=lambda told: f"{program}: {told}"
            )
        else:
            assert value == right, program
