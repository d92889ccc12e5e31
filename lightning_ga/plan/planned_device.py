"""A device that is not here: how much memory it has, and what of it a training may take.

In the context of ``planned_device`` a probe estimates its limit on tensors without values
(``estimate``) instead of measuring it, as ``limit_memory`` lets it measure on a smaller device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import ceil

from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.units import LEAST_BYTES, parse_budget, require_bytes

CONTEXT = 512 * 2**20  # bytes of the CUDA context and of kernels' code, which no tensor can use
WORKSPACE = 32 * 2**20  # bytes that cuBLAS takes at the first product: the most of all generations
MARGIN = 0.05  # share of the device for fragmentation: a probe on a device counts holes, an estimate cannot
ALLOCATION = 512  # bytes that CUDA's allocator rounds up to


@dataclass(slots=True)
class PlannedDevice:
    """A device that is not here, and what was seen while planning for it."""

    total_bytes: int
    like_cuda: bool = True  # otherwise it behaves as this CPU, to compare with measurements
    reserved_bytes: int = 0  # what no tensor can use: context, workspaces, fragmentation, buckets of data parallelism
    unreliable: list[str] = field(default_factory=list)  # what makes the estimate less certain, with reasons

    @property
    def rounding(self) -> int:
        """Bytes that its allocator rounds up to."""
        return ALLOCATION if self.like_cuda else 1

    def budget(self, memory_budget: int | float | str | None, *, buckets: int = 0) -> int:
        """Return the bytes that a training step may take; data parallelism keeps ``buckets`` besides the gradients."""
        self.reserved_bytes = buckets
        if self.like_cuda:
            self.reserved_bytes += CONTEXT + WORKSPACE + int(MARGIN * self.total_bytes)
        left = self.total_bytes - self.reserved_bytes
        if left < 1:
            raise UserError(
                f"A device of {self.total_bytes:,} bytes leaves nothing to a training: the CUDA context, workspaces, "
                f"fragmentation and data parallelism take {self.reserved_bytes:,} bytes. Plan for a larger one."
            )
        asked = parse_budget(memory_budget, self.total_bytes)
        return left if asked is None else min(asked, left)

    def total_for(self, needed: int) -> int:
        """Return the bytes of a device that leaves so many to a training step, once ``budget`` was asked for."""
        if not self.like_cuda:
            return needed + self.reserved_bytes
        fixed = self.reserved_bytes - int(MARGIN * self.total_bytes)
        return ceil((needed + fixed) / (1 - MARGIN))

    def doubt(self, reason: str) -> None:
        """Note something that makes the estimate less certain, once."""
        if reason not in self.unreliable:
            self.unreliable.append(reason)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A training on a device that is not here, as estimated.

    Attributes:
        plan: How a full window would be cut.
        probe: The estimated limit and peak; its source is ``"estimate"``.
        device_bytes: Memory of the device.
        reserved_bytes: What of it no tensor can use: context, workspaces, fragmentation, buckets of data parallelism.
        unreliable: Operators, modules and data whose memory on the device an estimate cannot tell, each with the
            reason; empty where none was met.
    """

    plan: AccumulationPlan
    probe: ProbeResult
    device_bytes: int
    reserved_bytes: int
    unreliable: tuple[str, ...]


_planned: ContextVar[PlannedDevice | None] = ContextVar("planned", default=None)


def current_device() -> PlannedDevice | None:
    """Return the device that is planned for; ``None`` outside ``planned_device``."""
    return _planned.get()


@contextmanager
def planned_device(memory: int | str, *, like_cuda: bool = True) -> Iterator[PlannedDevice]:
    """Let probes estimate for a device that is not here, as a context, and run no step on this one.

    Examples:
        >>> with planned_device("16GiB") as device:
        ...     device.total_bytes
        17179869184
    """
    device = PlannedDevice(require_bytes("device_memory", memory, least=LEAST_BYTES), like_cuda)
    token = _planned.set(device)
    try:
        yield device
    finally:
        _planned.reset(token)
