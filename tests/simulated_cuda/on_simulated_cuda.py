"""A pytest plugin: Trainers that name no device train on the simulated one, with values.

``sh tests/simulated_cuda/run.sh PYTHON -m pytest -p on_simulated_cuda TESTS``
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import counters
import lightning.pytorch
import pytest
import pytorch_lightning
import torch

# Tests that say something about the simulation, or about a CPU, where they say nothing about a GPU.
EXPLAINED: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Make the device that of all Trainers."""
    if not counters.is_loaded():
        raise pytest.UsageError("on_simulated_cuda needs the simulated device: see tests/simulated_cuda/run.sh")
    torch.backends.cudnn.enabled = False  # neither cuDNN nor fused attention is simulated
    for switch in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{switch}_sdp")(False)
    _install()
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
    import simulated_values

    simulated_values.uninstall()
    yield
    _install()


def _install() -> None:
    torch.cuda.init()
    import simulated_values

    simulated_values.install()


def _on_device(init: Callable[..., None]) -> Callable[..., None]:
    """A Trainer's ``__init__`` that chooses the device where nothing else is asked for."""

    @functools.wraps(init)
    def choosing(self: Any, *arguments: Any, **named: Any) -> None:
        choices = {"accelerator": ("auto", "cpu"), "devices": ("auto", 1), "strategy": ("auto",)}
        if all(named.get(name, either[0]) in either for name, either in choices.items()):
            named |= {"accelerator": "gpu", "devices": 1}
        init(self, *arguments, **named)

    return choosing
