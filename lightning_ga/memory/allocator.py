"""Measure a step in the caching allocator of an accelerator: its statistics, and its own history of events.

The allocator also counts memory that no tensor holds (workspaces of cuBLAS and cuDNN), so its numbers decide. Its
private history is read in torch 2.11 and 2.15 (``torch/cuda/memory.py``); without it, only live tensors are recorded.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_ga.memory.device import is_bounded, keeps_statistics, require_statistics
from lightning_ga.memory.segments import ROUNDING, SMALL_SEGMENT, SegmentRules
from lightning_ga.memory.trace import MemoryTrace, Segment, canonical, rounded_up

_MOST_EVENTS = 2_000_000


class AllocatorMeter:
    """Measures the peak of one step in a caching allocator, and whether the step ran without retries.

    A step fits only if the allocator neither ran out (``num_ooms``) nor had to free its cache to go
    on (``num_alloc_retries``): it would do so again and again, which is slow, or fail at the next
    change of order. A user's own allocator that keeps no statistics is refused.
    """

    def __init__(self, device: torch.device) -> None:
        require_statistics(device)
        self.device = device
        self._backend: Any = getattr(torch, device.type)
        self._before = (0, 0)
        self._has_history = _has_history(device)
        self._alive: int | None = None  # bytes at the start of a recording; ``None`` without one
        self._segments: list[Mapping[str, Any]] = []
        self._residents: Mapping[int, int] = {}

    @property
    def rules(self) -> SegmentRules | None:
        """How the allocator cuts blocks out of segments, as it is now; ``None`` if that is not known."""
        rules = rules_of(_settings(self.device)) if _is_native(self.device) else None
        if rules is None or is_bounded(self.device):
            return rules
        # Some rules hold only where a fraction of the device was set (``set_fraction``, torch 2.15).
        return replace(rules, collection=0.0, grows_freely=rules.expandable)

    def allocated(self) -> int:
        """Return the bytes that tensors take now."""
        return int(self._backend.memory_allocated(self.device))

    def handed_out(self) -> int:
        """Return how many blocks were ever handed out, if a history tells which."""
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.device) if self._has_history else {}
        return int(stats["allocation"]["all"]["allocated"]) if stats else 0

    # ``residents`` here and below: places of the tensors that are alive before a step, by address.
    def layout(self, residents: Mapping[int, int]) -> tuple[Segment, ...]:
        """Return the segments that the next step finds in an empty cache; none if that is not known."""
        if not self._has_history:
            return ()
        self._empty_cache()
        return tuple(_layout(segment, residents) for segment in self._segments_now())

    def start(self, *, record: bool = False, residents: Mapping[int, int] | None = None) -> None:
        """Empty the cache and begin a step; with ``record``, keep the allocator's events, unless other code does."""
        self._empty_cache()
        self._backend.reset_peak_memory_stats(self.device)
        self._before = self.troubles()
        if record and self._has_history:
            self._alive = None if torch._C._cuda_isHistoryEnabled() else self.allocated()
        if record and self._alive is not None:
            self._segments, self._residents = self._segments_now(), residents or {}
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
        if self._alive is None:
            return None
        events, alive = torch.cuda.memory._snapshot(self.device)["device_traces"][self._index()], self._alive
        self.stop()
        if len(events) >= _MOST_EVENTS:
            return None
        return events_as_trace(events, samples, alive, self._segments, self._residents)

    def stop(self) -> None:
        """Stop a recording that ``start`` began, if there is one."""
        if self._alive is not None:
            self._alive = None
            torch.cuda.memory._record_memory_history(None)

    def troubles(self) -> tuple[int, int]:
        """Return how often the allocator has run out of memory, and how often it has freed its cache."""
        stats: dict[str, Any] = self._backend.memory_stats(self.device)
        return stats.get("num_ooms", 0), stats.get("num_alloc_retries", 0)

    def _empty_cache(self) -> None:
        self._backend.synchronize(self.device)
        self._backend.empty_cache()

    def _segments_now(self) -> list[Mapping[str, Any]]:
        every = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return [segment for segment in every if segment["device"] == self._index()]

    def _index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index


class RetryWatch:
    """Reports once that the allocator has begun to free its cache in order to go on: a step is too close to the limit.

    On devices whose allocators count no retries, it reports nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._meter = AllocatorMeter(device) if keeps_statistics(device) else None
        self._before: tuple[int, int] | None = None

    def struggles(self) -> bool:
        """Return true once, when retries have risen since the first call.

        The first call must come after the first window, which fills the cache.
        """
        if self._meter is None:
            return False
        now = self._meter.troubles()
        rose = self._before is not None and now > self._before
        self._before = self._before or now
        if rose:
            self._meter = None
        return rose

    def begin_again(self) -> None:
        """Forget the retries so far, which had another cause."""
        self._before = None


def _has_history(device: torch.device) -> bool:
    """Return whether the allocator keeps a record of its own of blocks allocated and released."""
    # ``clear_history`` came with torch 2.6: without it, earlier events would be read as this step's.
    known = hasattr(torch.cuda.memory, "_record_memory_history_impl") and hasattr(torch._C, "_cuda_isHistoryEnabled")
    recent = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
    return device.type == "cuda" and known and recent and _is_native(device)


def _is_native(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.memory.get_allocator_backend() == "native"


def _settings(device: torch.device) -> dict[str, Any]:
    """Return an allocator's settings, from the environment or set since; of XPU's, from the environment only."""
    if device.type == "cuda":
        settings: dict[str, Any] = torch.cuda.memory._snapshot(device)["allocator_settings"]
        return settings
    text = ",".join(os.environ.get(f"PYTORCH_{prefix}ALLOC_CONF", "") for prefix in ("", "XPU_"))
    return {"PYTORCH_CUDA_ALLOC_CONF": text}


def rules_of(settings: Mapping[str, Any]) -> SegmentRules | None:
    """Read the rules of segments off an allocator's settings; ``None`` if segments have another size."""
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF", "").lower().replace(" ", "")
    if "large_segment_size_mb" in text or "max_non_split_rounding_mb" in text:
        return None
    rounded = sorted((int(mib), steps) for mib, steps in settings.get("roundup_power2_divisions", {}).items())
    divisions = tuple(steps for _, steps in rounded)
    size = settings.get("max_split_size", -1)
    return SegmentRules(
        max_split_size=size if size >= 0 else None,
        divisions=divisions if any(divisions) else (),
        expandable=settings.get("expandable_segments", "expandable_segments:true" in text),
        collection=settings.get("garbage_collection_threshold", 0.0),
    )


def events_as_trace(
    events: Iterable[Mapping[str, Any]],
    samples: int,
    alive: int,  # bytes at the first event
    segments: Iterable[Mapping[str, Any]] = (),  # of ``torch.cuda.memory_snapshot``, before the first event
    residents: Mapping[int, int] | None = None,
) -> MemoryTrace:
    """Convert an allocator's events into the stream of one step.

    A block is released when its release is requested: that is when the allocator's count of bytes
    falls. A block that is released without an allocation was alive before the step.
    """
    sizes, addresses, stream = [alive], [0], []
    initial: dict[int, int] = {}  # by address
    held: dict[int, int] = {}
    mapped: list[tuple[int, int]] = []  # addresses and bytes
    for event in events:
        if event["action"] == "segment_map":
            mapped.append((event["addr"], event["size"]))
        if event["action"] not in ("alloc", "free_requested"):
            continue  # segments, and failures, which have no address
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            held[address] = len(sizes)
            stream.append(len(sizes))
            sizes.append(size)
            addresses.append(address)
        else:
            number = held.pop(address, len(sizes))
            if number == len(sizes):
                sizes.append(size)
                addresses.append(0)
                sizes[0] -= rounded_up(size, ROUNDING)
                initial[address] = number
            stream.append(~number)
    layout = tuple(_layout(segment, initial) for segment in segments)
    places = {number: residents.get(address, 0) for address, number in initial.items()} if residents else {}
    return MemoryTrace(
        samples,
        tuple(sizes),
        canonical([0, *initial.values(), *stream]),
        layout=(*_first_addresses(mapped), *layout),
        addresses=tuple(addresses),
        residents=tuple(places.get(number, 0) for number in range(len(sizes))) if places else (),
    )


def _first_addresses(mapped: Iterable[tuple[int, int]]) -> Iterator[Segment]:
    """Return where segments that grow begin, as far as a step shows it: it has their lowest addresses mapped first."""
    pages = [(size == SMALL_SEGMENT, address) for address, size in mapped]
    for small in (True, False):
        addresses = [address for is_small, address in pages if is_small == small]
        if addresses:
            yield Segment(small, min(addresses), ())


def _layout(segment: Mapping[str, Any], numbers: Mapping[int, int]) -> Segment:
    """Return a segment in the form of ``MemoryTrace.layout``, with the numbers of blocks by address."""
    blocks, address = [], segment["address"]
    shared = tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)  # pools of graphs keep their holes to themselves
    for block in segment["blocks"]:
        is_hole = shared and block["state"] == "inactive"
        blocks.append((block["size"], -1 if is_hole else numbers.get(address, 0)))
        address += block["size"]
    return Segment(segment["segment_type"] == "small", segment["address"], tuple(blocks))
