"""The kinds of accelerators, in one table; how much memory a device has, and how much of it training may use.

All amounts are bytes. On a CPU, the machine's free memory and the limits of the control group
(containers, SLURM) both apply: a process that exceeds the smaller is killed. Inside
``lightning_ga.testing.limit_memory`` its budget is the size of the device.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_ga.errors import UserError
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.plan.units import format_bytes


@dataclass(frozen=True, slots=True)
class Vendor:
    """A kind of accelerator whose module in torch has the functions of ``torch.cuda``."""

    kind: str  # type of its devices and name of its module
    out_of_memory: tuple[str, ...]  # texts of errors that mean that memory ran out
    ambiguous: tuple[str, ...] = ()  # texts of errors that may mean it
    keeps_statistics: bool = True  # whether its allocator counts peaks and retries

    @property
    def backend(self) -> Any:
        """The vendor's module in torch."""
        return getattr(torch, self.kind)

    def is_in_use(self) -> bool:
        """Return whether this process has started a device of this kind."""
        return bool(self.backend.is_initialized())

    def generators(self) -> Iterator[torch.Generator]:
        """Yield the default generator of each device, if the kind is in use."""
        yield from self.backend.default_generators

    def devices(self) -> Iterator[torch.device]:
        """Yield the devices on which tensors lie, if the kind is in use."""
        for place in range(self.backend.device_count()):
            if self.backend.memory_allocated(place):
                yield torch.device(self.kind, place)

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Return free and total bytes of a device."""
        free, total = self.backend.mem_get_info(device)
        return int(free), int(total)


class _Metal(Vendor):
    """Apple's: one device, which does not tell whether it has been started."""

    def is_in_use(self) -> bool:
        return torch.backends.mps.is_available()

    def generators(self) -> Iterator[torch.Generator]:
        yield torch.mps._get_default_mps_generator()  # torch/mps/__init__.py, torch 2.6 to 2.15

    def devices(self) -> Iterator[torch.device]:
        if torch.mps.current_allocated_memory():
            yield torch.device(self.kind)

    def memory(self, device: torch.device) -> tuple[int, int]:
        total = int(torch.mps.recommended_max_memory())
        return total - int(torch.mps.driver_allocated_memory()), total


_CUDA = Vendor(  # and ROCm
    "cuda",
    out_of_memory=(
        "CUDA out of memory",
        "CUDA error: out of memory",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA ran out of memory outside PyTorch's allocator",
        "HIP out of memory",
        "HIP error: out of memory",
        "_STATUS_ALLOC_FAILED",  # of CUBLAS, HIPBLAS, CUDNN, CUSOLVER, CUSPARSE
        "FFT_ALLOC_FAILED",  # of CUFFT, HIPFFT
        "miopenStatusAllocFailed",
        "Not enough memory for workspace!",
        "NVML_SUCCESS == r INTERNAL ASSERT",
    ),
    # cuDNN reports a workspace that it could not get as an engine that does not exist or as a failure of its own, and
    # cuBLAS a handle that it could not make as one that was never asked for.
    ambiguous=(
        "Unable to find a valid cuDNN algorithm",
        "FIND was unable to find an engine",
        "GET was unable to find an engine",
        "CUDNN_STATUS_NOT_SUPPORTED",
        "CUDNN_STATUS_INTERNAL_ERROR",
        "CUDNN_STATUS_EXECUTION_FAILED",
        "CUBLAS_STATUS_NOT_INITIALIZED",
    ),
)
_XPU = Vendor(
    "xpu",
    out_of_memory=("XPU out of memory", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", "UR_RESULT_ERROR_OUT_OF_HOST_MEMORY"),
    ambiguous=("UR_RESULT_ERROR_OUT_OF_RESOURCES",),
)
_MPS = _Metal(
    "mps",
    # A buffer may be too large for any device of this kind.
    out_of_memory=("MPS backend out of memory", "Invalid buffer size: "),
    keeps_statistics=False,
)
VENDORS = (_CUDA, _XPU, _MPS)
WITH_STATISTICS = tuple(vendor.kind for vendor in VENDORS if vendor.keeps_statistics)


def vendors_in_use() -> Iterator[Vendor]:
    """Yield the vendors of the devices that this process uses; on a Mac that has one, Apple's in any case."""
    return (vendor for vendor in VENDORS if vendor.is_in_use())


def vendor_of(device: torch.device) -> Vendor | None:
    """Return the vendor of a device; ``None`` for the host and for kinds that are not known."""
    return {vendor.kind: vendor for vendor in VENDORS}.get(device.type)


# Share of the available memory that is left free. A probe counts the holes of CUDA's allocator, but does not see
# modules that are loaded later, nor other processes.
_CUDA_MARGIN = 0.01
_MARGIN = 0.05  # of another device: an allocator reserves 3–8 % more than it has allocated
# A control group without a limit reads "max", or a number near 2**63.
_NO_LIMIT = 1 << 60
_unenforced: ContextVar[float | None] = ContextVar("unenforced", default=None)  # fraction before any enforced budget


def available_memory(device: torch.device | str) -> int:
    """Return the bytes that this process can still use on a device, including unused cached blocks of CUDA."""
    device = torch.device(device)
    limits = [limit.budget - limit.live_bytes for limit in _active_limits(device) if limit.budget is not None]
    if device.type == "cpu":
        free = min([psutil.virtual_memory().available, *(limit - used for limit, used in control_group_limits())])
    elif device.type == "cuda":
        require_statistics(device)
        free, total = _device_memory(device)
        allocated = torch.cuda.memory_allocated(device)
        mine = free + int(torch.cuda.memory_reserved(device))
        free = min(mine - allocated - int(_CUDA_MARGIN * mine), int(memory_fraction(device) * total) - allocated)
    else:
        free, total = _device_memory(device)
        free -= int(_MARGIN * total)
    return max(0, min([free, *limits]))


def total_memory(device: torch.device | str) -> int:
    """Return the bytes of memory of a device, to which shares of it refer."""
    device = torch.device(device)
    limits = [limit.budget for limit in _active_limits(device) if limit.budget is not None]
    if device.type == "cpu":
        return min([psutil.virtual_memory().total, *(limit for limit, _ in control_group_limits()), *limits])
    return min([_device_memory(device)[1], *limits])


def is_emulated(device: torch.device | str) -> bool:
    """Return whether ``limit_memory`` emulates this device, so that running out of memory is safe."""
    return bool(_active_limits(torch.device(device)))


def _active_limits(device: torch.device) -> list[LiveTensorMeter]:
    return [limit for limit in LiveTensorMeter.active if limit.device is None or limit.device.type == device.type]


def require_statistics(device: torch.device) -> None:
    """Refuse a CUDA allocator that a user has plugged in: PyTorch can neither read nor bound what it hands out."""
    if device.type == "cuda" and torch.cuda.memory.get_allocator_backend() == "pluggable":
        raise UserError(
            f"The allocator that was plugged in for {str(device)!r} keeps no statistics, so no limit can be found and "
            "no memory_budget be kept: give a fixed micro_batch_size and no memory_budget."
        )


def _device_memory(device: torch.device) -> tuple[int, int]:
    """Return free and total bytes of an accelerator."""
    vendor = vendor_of(device)
    if vendor is None:
        raise UserError(
            f"The memory of device {str(device)!r} cannot be read: give memory_budget in bytes or as '10GiB', or a "
            "fixed micro_batch_size."
        )
    return vendor.memory(device)


def control_group_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return limit and use in bytes of every control group of this process, versions 1 and 2, that has a limit.

    Page cache that the kernel can drop does not count as used. ``proc`` and ``sys`` are looked for in ``root``.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        parts = Path(path.strip("/"))
        for folder in (parts, *parts.parents):  # in a container the path may be the host's: the mount is the group
            limit = _read_group(mount / folder, *names)
            if limit is not None:
                found.append(limit)
    return found


def _read_group(folder: Path, limit_name: str, used_name: str, cache_name: str) -> tuple[int, int] | None:
    try:
        limit = int((folder / limit_name).read_text())  # "max" is no number: no limit
        used = int((folder / used_name).read_text())
        stat = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    cache = dict(zip(stat[::2], stat[1::2])).get(cache_name, "0")
    if limit >= _NO_LIMIT:
        return None
    return limit, max(0, used - int(cache))


def describe_memory(device: torch.device) -> str:
    """Return the memory that is taken and free as text, for messages."""
    try:
        free = f"{format_bytes(available_memory(device))} free on {device}"
    except UserError:
        return str(device)
    if device.type != "cuda":
        return free
    return f"{format_bytes(torch.cuda.memory_allocated(device))} taken by tensors, {free}"


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work; do nothing on a CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


@contextmanager
def enforced_budget(device: torch.device, budget: int | None) -> Iterator[None]:
    """Return a context in which CUDA's allocator reserves no more than ``budget`` bytes; other devices have no limit.

    A smaller fraction that the user has set stays. The allocator truncates the product of fraction and memory,
    so half a byte more keeps the whole budget.
    """
    if budget is None or device.type != "cuda":
        yield
        return
    require_statistics(device)
    before = memory_fraction(device)
    token = _unenforced.set(_unenforced.get() or before)
    try:
        with _bounded(device, min(before, (budget + 0.5) / _device_memory(device)[1])):
            yield
    finally:
        _unenforced.reset(token)


def lifted_budget(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which no ``enforced_budget`` around it is in force; a fraction that the user has set is."""
    fraction = _unenforced.get()
    if fraction is None or device.type != "cuda":
        return nullcontext()
    return _bounded(device, fraction)


def may_reserve(device: torch.device, size: int) -> bool:
    """Return whether CUDA's allocator is not kept from reserving so many bytes: the device may have fewer."""
    return device.type == "cuda" and memory_fraction(device) * _device_memory(device)[1] > size


@contextmanager
def _bounded(device: torch.device, fraction: float) -> Iterator[None]:
    before = memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def memory_fraction(device: torch.device) -> float:
    """Return the share of a CUDA device that this process may reserve: 1.0 if PyTorch cannot read it (2.6)."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    # For cudaMallocAsync PyTorch 2.15 answers with bytes divided by its own limit.
    return 1.0 if read is None else min(1.0, float(read(device)))
