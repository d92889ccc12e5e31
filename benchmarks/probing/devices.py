"""The three devices: memory emulated on a CPU, tensors without values, and a CUDA device with less memory."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ga.testing import limit_memory

GIB = 2**30
EMULATED, FAKE, CUDA = "emulated", "fake", "cuda"
TRAINER = "trainer"  # emulated too, and the whole of ``AutoAccumulate`` in it


class Ones(TorchDispatchMode):
    """Reads 1 out of tensors without values: Adam's step count."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        return func(*args, **(kwargs or {}))


@contextmanager
def memory(kind: str, budget: int) -> Iterator[None]:
    """A device with ``budget`` bytes of memory, nothing of it taken."""
    gc.collect()
    with ExitStack() as stack:
        if kind == FAKE:  # tensors have shapes only; as they take none of the host's memory, it bounds nothing
            endless = SimpleNamespace(available=2**60, total=2**60)
            stack.enter_context(FakeTensorMode())
            stack.enter_context(Ones())
            stack.enter_context(patch("psutil.virtual_memory", lambda: endless))
            stack.enter_context(patch("lightning_ga.memory.device.control_group_limits", list))
        stack.enter_context(capped_cuda(budget) if kind == CUDA else limit_memory(budget))
        yield


@contextmanager
def capped_cuda(budget: int) -> Iterator[None]:
    """The caching allocator of the current CUDA device holds at most ``budget`` bytes."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (budget + 0.5) / torch.cuda.mem_get_info()[1]))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()


def finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def place(kind: str) -> str:
    return "cuda" if kind == CUDA else "cpu"
