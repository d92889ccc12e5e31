"""For tests: memory that runs out on any machine, at a budget or a chosen operation; and accumulation that is right."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.plan.units import parse_budget


@contextmanager
def limit_memory(
    budget: int | str, *, device: torch.device | str | None = None, resident: Iterable[Tensor | None] = ()
) -> Iterator[LiveTensorMeter]:
    """Let PyTorch raise ``torch.OutOfMemoryError`` once the live tensor bytes pass the budget.

    The same to the byte on every machine and every run: a budget equal to the peak passes, one
    byte less raises. Counted is every tensor that an operation creates inside, from creation
    until it dies, and parameters with their gradients from the first operation that uses them.
    Other older tensors (data, buffers) are counted only if they are ``resident``. Scratch memory
    that belongs to no tensor is not seen. Values are bitwise unchanged; each operation takes a few µs more.

    Args:
        budget: Bytes, or text such as ``"512MiB"`` or ``"1 GB"``.
        device: Count tensors on this device only; ``None`` counts those on every device.
        resident: Older tensors that are counted from the start, each storage once.

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
    meter = LiveTensorMeter(budget=parse_budget(budget, name="budget"), device=device)
    meter.add(resident)
    LiveTensorMeter.active.append(meter)
    try:
        with meter:
            yield meter
    finally:
        LiveTensorMeter.active.remove(meter)


def out_of_memory_at(operation: int) -> "OperationCounter":
    """Return a context in which the ``operation``-th operation of PyTorch raises ``torch.OutOfMemoryError``, once.

    Operations count from 1, in the order in which they run. Entered, it gives a counter: ``operations`` so far.

    Examples:
        >>> with out_of_memory_at(2):
        ...     torch.ones(3) + 1
        Traceback (most recent call last):
        torch.OutOfMemoryError: Injected: out of memory at operation 2, aten.add.Tensor.
        >>> with out_of_memory_at(0) as counter:  # never: only count
        ...     total = torch.ones(3) + 1
        >>> counter.operations
        2
    """
    return OperationCounter(operation)


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and raises at one of them."""

    supports_higher_order_operators = True

    def __init__(self, fails_at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fails_at = fails_at
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operation, and run it unless it is the one that fails."""
        self.operations += 1
        if self.operations == self.fails_at:
            raise torch.OutOfMemoryError(f"Injected: out of memory at operation {self.operations}, {func}.")
        return func(*args, **(kwargs or {}))


def assert_accumulates(
    train: Callable[[], object],
    *,
    model: Module,
    micro_batches: Iterable[Any],
    loss: Callable[[Any, Any], Tensor],
    factor: int | None = None,
    sizes: Callable[[Any], float] | None = None,
) -> None:
    """Assert that every micro-batch of a training loop reaches the optimizer with its weight in a mean over samples.

    The arguments, and errors for what cannot be decided, are those of ``lightning_ga.audit.audit``.

    Raises:
        AssertionError: If a weight is wrong; its text is the table of the audit.

    Examples:
        In a test::

            def test_accumulation():
                assert_accumulates(train, model=model, micro_batches=loader, loss=loss)
    """
    from lightning_ga.audit import audit  # the other contexts do without Lightning

    found = audit(train, model=model, micro_batches=micro_batches, loss=loss, factor=factor, sizes=sizes)
    if not found.is_right:
        raise AssertionError(f"{found.verdict}\n{found}")
