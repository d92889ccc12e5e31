"""Measure a step in the caching allocator of an accelerator: its statistics, and its own history of events.

The allocator also counts memory that belongs to no tensor (workspaces of cuBLAS and cuDNN), so its numbers decide. Its
private history is read in torch 2.11 and 2.15 (``torch/cuda/memory.py``); without it, only live tensors are recorded.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_ga.memory.allocator_segments import ROUNDING
from lightning_ga.memory.device import require_statistics
from lightning_ga.memory.trace import MemoryTrace, Segment, Stream, rounded_up

_MOST_EVENTS = 2_000_000
# Settings by which blocks are rounded, cut or returned in other ways (``CUDAAllocatorConfig.h``, torch 2.15), beside
# ``expandable_segments``.
_OTHER_SETTINGS = ("large_segment", "max_non_split", "max_split_size", "roundup_power2", "garbage_collection")


class RepeatedRetries:
    """Sees whether CUDA's allocator frees its cache in window after window: memory is fragmented, and soon runs out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.count_anew()

    def count_anew(self) -> None:
        """Forget the retries so far: an error follows on some, and its window runs again in smaller passes."""
        self._count = self._retries()
        self._in_row = 0  # windows with retries

    def after_window(self) -> bool:
        """Return whether this window and the one before had retries."""
        count = self._retries()
        self._in_row = self._in_row + 1 if count > self._count else 0
        self._count = count
        return self._in_row > 1

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self._device).get("num_alloc_retries", 0))


class AllocatorMeter:
    """Measures the peak of one step in a caching allocator, and whether the step ran without retries.

    A step fits only if the allocator neither ran out nor had to free its cache: it would free it in every step, which
    is slow, or fail when the order of allocations changes. An allocator that keeps no statistics is refused.
    """

    def __init__(self, device: torch.device) -> None:
        require_statistics(device)
        self.device = device  # with its number
        self._backend: Any = getattr(torch, device.type)
        self._before = (0, 0)
        # Whether the allocator keeps a record of its own of blocks allocated and released.
        is_known = hasattr(torch.cuda.memory, "_record_memory_history_impl") and hasattr(
            torch._C, "_cuda_isHistoryEnabled"
        )
        self._has_history = device.type == "cuda" and is_known and _is_native(device)
        self._as_trace: Callable[..., MemoryTrace] | None = None  # of events that are recorded; ``None`` if none are

    @property
    def cuts_segments(self) -> bool:
        """Whether the allocator cuts blocks out of segments by its own rules, as it is set now.

        Its settings are those of the environment, for CUDA with what was set since.
        """
        if not _is_native(self.device):
            return False
        if self.device.type == "cuda":
            settings: dict[str, Any] = torch.cuda.memory._snapshot(self.device)["allocator_settings"]
        else:
            of_all = os.environ.get("PYTORCH_ALLOC_CONF", "")
            settings = {"PYTORCH_CUDA_ALLOC_CONF": f"{of_all},{os.environ.get('PYTORCH_XPU_ALLOC_CONF', '')}"}
        text = settings.get("PYTORCH_CUDA_ALLOC_CONF", "").lower().replace(" ", "")
        is_expandable = settings.get("expandable_segments", "expandable_segments:true" in text)
        return not is_expandable and not any(name in text for name in _OTHER_SETTINGS)

    def allocated(self) -> int:
        """Return the bytes that tensors take now."""
        return int(self._backend.memory_allocated(self.device))

    def handed_out(self) -> int:
        """Return how many blocks were ever handed out, if a history tells which."""
        if not self._has_history:
            return 0
        return int(torch.cuda.memory_stats(self.device).get("allocation.all.allocated", 0))

    def start(self, *, record: bool = False) -> None:
        """Empty the cache and begin a step; with ``record``, keep the allocator's events, unless other code does."""
        self._backend.synchronize(self.device)
        self._backend.empty_cache()
        self._backend.reset_peak_memory_stats(self.device)
        self._before = self.troubles()
        if record and self._has_history and not torch._C._cuda_isHistoryEnabled():
            every = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            segments = [segment for segment in every if segment["device"] == self.device.index]
            self._as_trace = partial(events_as_trace, alive=self.allocated(), segments=segments)
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MOST_EVENTS, clear_history=True)

    def finish(self) -> tuple[int, bool]:
        """Return the peak of allocated bytes since ``start``, and whether the step ran without retries."""
        self._backend.synchronize(self.device)
        return int(self._backend.max_memory_allocated(self.device)), self.troubles() == self._before

    def reserved_peak(self) -> int:
        """Return the peak of reserved bytes since ``start``, which a budget must leave for the step."""
        return int(self._backend.max_memory_reserved(self.device))

    def trace(self, samples: int) -> MemoryTrace | None:
        """Return the recorded step from the allocator's own events, and stop recording; ``None`` without them."""
        as_trace = self._as_trace
        if as_trace is None:
            return None
        events = torch.cuda.memory._snapshot(self.device)["device_traces"][self.device.index]
        self.stop()
        return None if len(events) >= _MOST_EVENTS else as_trace(events, samples)

    def stop(self) -> None:
        """Stop a recording that ``start`` began, if there is one."""
        if self._as_trace is not None:
            self._as_trace = None
            torch.cuda.memory._record_memory_history(None)

    def troubles(self) -> tuple[int, int]:
        """Return how often the allocator has run out of memory, and how often it has freed its cache."""
        stats: dict[str, Any] = self._backend.memory_stats(self.device)
        return stats.get("num_ooms", 0), stats.get("num_alloc_retries", 0)


def _is_native(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.memory.get_allocator_backend() == "native"


def events_as_trace(
    events: Iterable[Mapping[str, Any]],
    samples: int,
    alive: int,  # bytes at the first event
    segments: Iterable[Mapping[str, Any]] = (),  # of ``torch.cuda.memory_snapshot``, before the first event
) -> MemoryTrace:
    """Convert an allocator's events into the stream of one step.

    A block is released when its release is requested: that is when the allocator's count of bytes
    falls. A block that is released without an allocation was alive before the step.
    """
    stream = Stream(alive)
    older: dict[int, int] = {}  # by address
    held: dict[int, int] = {}
    for event in events:
        if event["action"] not in ("alloc", "free_requested"):
            continue  # segments, and failures, which have no address
        address = event["addr"]
        size = event["size"]
        if event["action"] == "alloc":
            held[address] = stream.allocate(size, address)
        elif address in held:
            stream.events.append(~held.pop(address))
        else:
            older[address] = stream.release_older(size, rounded_up(size, ROUNDING))
    layout = tuple(_layout(segment, older) for segment in segments)
    return replace(stream.trace(samples), layout=layout)


def _layout(segment: Mapping[str, Any], numbers: Mapping[int, int]) -> Segment:
    """Return a segment in the form of ``MemoryTrace.layout``, with the numbers of blocks by address."""
    blocks = []
    address = segment["address"]
    shared = tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)  # pools of graphs keep their holes to themselves
    for block in segment["blocks"]:
        is_hole = shared and block["state"] == "inactive"
        blocks.append((block["size"], -1 if is_hole else numbers.get(address, 0)))
        address += block["size"]
    return Segment(segment["segment_type"] == "small", tuple(blocks))
