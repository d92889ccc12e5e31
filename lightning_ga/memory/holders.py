"""Sum up what holds the memory at the peak of a recorded step.

A ``MemoryTrace`` says which storages are alive when most bytes are, and ``StepOrigins`` where each was made. A storage
that is made in the forward pass and released in the backward pass is an activation. The parts sum to the peak.

Tested in tests/integration/test_peak_holders.py.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_ga.memory.trace import MemoryTrace, bytes_alive, rounded_up
from lightning_ga.plan import records as holder
from lightning_ga.plan.records import Attribution


class Origin(NamedTuple):
    """Where a storage was made, and what it is, if that is known."""

    phase: str  # "forward", "backward" or "update"
    operation: str
    kind: str = ""  # as in ``plan.records``


@dataclass(frozen=True, slots=True)
class StepOrigins:
    """Where the storages of one recorded step come from."""

    made: Mapping[int, Origin]  # by the number in the trace; those alive before the step are missing
    resident: Mapping[str, int] = field(default_factory=dict)  # bytes of storage 0, by what is known of them
    complete: bool = True  # whether the step ran to its end


def attribute(trace: MemoryTrace, origins: StepOrigins, *, rounding: int = 1, peak: int = 0) -> Attribution:
    """Say what holds the memory at the peak of a step; ``peak`` is that of an allocator, which may be higher."""
    totals = bytes_alive(trace.sizes, trace.events, rounding)
    seen = max(totals)
    begun = trace.events[: totals.index(seen) + 1]
    past = {*begun}
    last = _last_phases(trace, origins)
    held = Counter({holder.UNNAMED: max(0, peak - seen)})
    for number in past:
        if number > 0 and ~number not in past:
            held[_part(origins.made.get(number), last[number])] += rounded_up(trace.sizes[number], rounding)
    before = rounded_up(trace.sizes[0], rounding)
    for name, size in origins.resident.items():
        held[name] += min(size, before)
        before -= min(size, before)
    held[holder.BEFORE] += before
    at = Origin("forward", "")
    for event in begun:
        at = origins.made.get(event, at)
    parts = tuple((name, size) for name, size in held.most_common() if size)
    return Attribution(trace.samples, max(seen, peak), at.phase, at.operation, parts)


def _last_phases(trace: MemoryTrace, origins: StepOrigins) -> list[str]:
    """Return the phase in which each storage was released; empty if it was not.

    If a step did not run to its end, storages from before the backward pass are treated as used in it.
    """
    phase = "forward"
    last = ["" if origins.complete else "backward"] * len(trace.sizes)
    for event in trace.events:
        if event in origins.made:
            phase = origins.made[event].phase
        if event < 0:
            last[~event] = phase
    return last


def _part(origin: Origin | None, released_in: str) -> str:
    """Name what a storage is: state, an activation, a temporary, or something that was kept."""
    if origin is None:
        return holder.BEFORE
    if origin.kind and (released_in or origin.kind != holder.LOGITS):
        return origin.kind
    if not released_in:
        return holder.KEPT
    if origin.phase == "update":
        return holder.UPDATE
    if origin.phase == "backward" and released_in == "update":
        return holder.GRADIENTS
    return holder.TEMPORARIES if origin.phase == released_in else holder.ACTIVATIONS
