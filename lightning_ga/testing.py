"""A device that runs out of memory on any machine, for tests."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_ga.live import LiveMemory
from lightning_ga.memory import parse_budget


@contextmanager
def limit_memory(
    budget: int | str,
    *,
    device: torch.device | str | None = None,
    resident: Iterable[Tensor | None] = (),
) -> Iterator[LiveMemory]:
    """A context in which PyTorch raises ``torch.OutOfMemoryError`` once the live tensor bytes pass the budget.

    The same to the byte on every machine and every run: a budget equal to the peak passes, one
    byte less raises. What counts is every tensor that an operation creates inside, from creation
    until it dies, and parameters with their gradients from the first operation that takes them.
    Other older tensors (data, buffers) count only if they are ``resident``. Scratch memory that no
    tensor holds is not seen. Values are bitwise unchanged; each operation takes a few µs more.

    Args:
        budget: Bytes, or text such as ``"512MiB"`` or ``"1 GB"``.
        device: Count tensors on this device only; ``None`` counts those on every device.
        resident: Older tensors that count from the start, each storage once.

    Yields:
        The meter: ``live_bytes`` now, and ``peak_bytes``, the most that were alive at once.

    Raises:
        UserError: If the budget cannot be read.
        torch.OutOfMemoryError: Inside, after the operation that passed the budget.

    Examples:
        >>> with limit_memory("1 MiB") as memory:
        ...     total = torch.ones(1024).add(1).sum()
        >>> memory.peak_bytes
        8192
        >>> with limit_memory("1 MiB"):
        ...     torch.ones(1024, 1024)
        Traceback (most recent call last):
        torch.OutOfMemoryError: Live tensors out of memory. Tried to allocate 4,194,304 bytes: ...
    """
    meter = LiveMemory(budget=parse_budget(budget), device=device)
    meter.add(resident)
    LiveMemory.active.append(meter)
    try:
        with meter:
            yield meter
    finally:
        LiveMemory.active.remove(meter)
