"""The kinds of accelerators, in one table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


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
    return next((vendor for vendor in VENDORS if vendor.kind == device.type), None)
