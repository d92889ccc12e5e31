"""How much memory a device has, and how much of it training may use.

All amounts are bytes. On a CPU, the machine's free memory and the limits of the control group
(containers, SLURM) both apply: a process that exceeds the smaller is killed. Inside
``lightning_ga.testing.limit_memory`` its budget is the size of the device.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path

import psutil
import torch

from lightning_ga.errors import UserError
from lightning_ga.memory.live_tensors import LiveTensorMeter
from lightning_ga.memory.vendors import vendor_of
from lightning_ga.plan.units import format_bytes

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
    limits = _emulated_limits(device)
    if device.type == "cpu":
        free = psutil.virtual_memory().available
        limits += control_group_limits()
    elif device.type == "cuda":
        require_statistics(device)
        free, total = _device_memory(device)
        allocated = torch.cuda.memory_allocated(device)
        mine = free + int(torch.cuda.memory_reserved(device))
        free = min(mine - allocated - int(_CUDA_MARGIN * mine), int(memory_fraction(device) * total) - allocated)
    else:
        free, total = _device_memory(device)
        free -= int(_MARGIN * total)
    for limit, used in limits:
        free = min(free, limit - used)
    return max(0, free)


def total_memory(device: torch.device | str) -> int:
    """Return the bytes of memory of a device, to which shares of it refer."""
    device = torch.device(device)
    limits = _emulated_limits(device)
    if device.type == "cpu":
        total = psutil.virtual_memory().total
        limits += control_group_limits()
    else:
        total = _device_memory(device)[1]
    for limit, _used in limits:
        total = min(total, limit)
    return total


def is_emulated(device: torch.device | str) -> bool:
    """Return whether ``limit_memory`` emulates this device, so that running out of memory is safe."""
    return bool(_emulated_limits(torch.device(device)))


def _emulated_limits(device: torch.device) -> list[tuple[int, int]]:
    """Return the budgets of ``limit_memory`` for a device, and the bytes that are used of each."""
    found = []
    for meter in LiveTensorMeter.active:
        is_of_device = meter.device is None or meter.device.type == device.type
        if is_of_device and meter.budget is not None:
            found.append((meter.budget, meter.live_bytes))
    return found


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
