"""A pytest plugin: Trainers that name no device train on the simulated one, with values.

``sh tests/simulated_cuda/run.sh PYTHON -m pytest -p on_simulated_cuda TESTS``
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import device_counters as counters
import device_values
import lightning.pytorch
import pytest
import pytorch_lightning

# Tests that say something about the simulation, or about a CPU, where they say nothing about a GPU.
BYTES = "its budget is counted in bytes of tensors, as on a CPU; this device hands out blocks of 512 bytes"
ONLY_CPU = "on a CPU nothing may come near the memory that there is; a GPU may run out"
EXPLAINED: dict[str, str] = {
    "integration/test_probe.py::test_training_at_the_limit_fits_and_one_more_does_not": BYTES,
    "integration/test_recovery.py::test_a_sample_that_is_too_large_is_stopped_at_the_first_operation": ONLY_CPU,
    "integration/test_recovery.py::test_no_trial_comes_near_the_memory_that_there_is": ONLY_CPU,
    "integration/test_traceless.py::test_a_probe_leaves_no_trace[fp16]": BYTES,
    "integration/test_whole.py::test_the_probe_finds_the_chunk": BYTES,
}


def pytest_configure(config: pytest.Config) -> None:
    """Make the device that of all Trainers."""
    if not counters.is_loaded():
        raise pytest.UsageError("on_simulated_cuda needs the simulated device: see tests/simulated_cuda/run.sh")
    device_values.of_all_operators()
    for library in (lightning.pytorch, pytorch_lightning):
        library.Trainer.__init__ = _on_device(library.Trainer.__init__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is explained."""
    for item in items:
        name = item.nodeid.removeprefix("tests/").split("[")[0]
        reason = EXPLAINED.get(item.nodeid.removeprefix("tests/"), EXPLAINED.get(name))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def no_values() -> Iterator[None]:
    """PyTorch's own kernels are launched, and counted, and compute nothing."""
    device_values.only_what_is_read()
    yield
    device_values.of_all_operators()


def _on_device(init: Callable[..., None]) -> Callable[..., None]:
    """A Trainer's ``__init__`` that chooses the device where nothing else is asked for."""

    @functools.wraps(init)
    def choosing(self: Any, *arguments: Any, **named: Any) -> None:
        choices = {"accelerator": ("auto", "cpu"), "devices": ("auto", 1), "strategy": ("auto",)}
        if all(named.get(name, either[0]) in either for name, either in choices.items()):
            named |= {"accelerator": "gpu", "devices": 1}
        init(self, *arguments, **named)

    return choosing
