"""What a program asked of the simulated CUDA device: launches, waits, copies, allocations."""

import ctypes
from collections import Counter
from typing import NamedTuple


class Counts(NamedTuple):
    """Calls since the start of the process, or the last ``reset``."""

    launches: int
    products: int
    stream_waits: int
    device_waits: int
    event_waits: int
    event_records: int
    event_queries: int
    copies_to_host: int
    copies_from_host: int
    copies_on_device: int
    fills: int
    mallocs: int
    frees: int
    memory_queries: int

    @property
    def waits(self) -> int:
        """Calls in which the host waits for the device."""
        return self.stream_waits + self.device_waits + self.event_waits


def is_loaded() -> bool:
    """Whether this process has a simulated device."""
    return hasattr(ctypes.CDLL(None), "simulated_cuda_count")


def read() -> Counts:
    """Calls since the start of the process, or the last ``reset``."""
    count = _function("simulated_cuda_count", ctypes.c_long, ctypes.c_int)
    return Counts(*map(count, range(len(Counts._fields))))


def reset() -> None:
    """Begin at zero."""
    _function("simulated_cuda_reset", None)()


def launches() -> Counter[str]:
    """Launches of each kernel, by its mangled name, since the start of the process or the last ``reset``."""
    write = _function("simulated_cuda_launches", ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    text = ctypes.create_string_buffer(write(None, 0) + 4096)
    write(text, len(text))
    pairs = (line.split(" ", 1) for line in text.value.decode().splitlines())
    return Counter({name: int(number) for number, name in pairs})


def take(size: int, device: int = 0) -> None:
    """Let other processes hold so many bytes of a device."""
    _function("simulated_cuda_take", None, ctypes.c_int, ctypes.c_size_t)(device, size)


def _function(name: str, result: object, *arguments: object) -> "ctypes._CFuncPtr":
    found = getattr(ctypes.CDLL(None), name)
    found.restype, found.argtypes = result, arguments
    return found
