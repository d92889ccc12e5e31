"""Add up what holds the memory at the peak of a recorded step: state, activations of which blocks, temporaries.

A ``MemoryTrace`` says which storages are alive when most bytes are, and ``StepOrigins`` where each was
made. The parts sum to the peak.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_ga.memory.trace import MemoryTrace, bytes_alive, rounded_up
from lightning_ga.plan.attribution import (
    ACTIVATIONS,
    BEFORE,
    GRADIENTS,
    KEPT,
    LOGITS,
    TEMPORARIES,
    UNNAMED,
    UPDATE,
    Attribution,
)

THE_STEP = "the step itself"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a storage was made, and what it is, where that is known."""

    phase: str  # "forward", "backward" or "update"
    place: str  # the name of the module; of the operation, outside of modules
    kind: str = ""  # as in ``plan.attribution``


@dataclass(frozen=True, slots=True)
class StepOrigins:
    """Where the storages of one recorded step come from."""

    made: Mapping[int, Origin]  # by the number in the trace; those alive before the step are missing
    resident: Mapping[str, int] = field(default_factory=dict)  # bytes of storage 0, by what is known of them
    complete: bool = True  # whether the step ran to its end


def attribute(trace: MemoryTrace, origins: StepOrigins, *, rounding: int = 1, peak: int = 0) -> Attribution:
    """Say what holds the memory at the peak of a step; ``peak`` is that of an allocator, which may be higher.

    Examples:
        >>> trace = MemoryTrace(2, sizes=(100, 8, 16, 4), events=(0, 1, 2, 3, ~3, ~2, ~1))
        >>> made = {1: Origin("forward", "a"), 2: Origin("forward", "b"), 3: Origin("backward", "b")}
        >>> attribute(trace, StepOrigins(made, {"parameters": 100})).parts
        (('parameters', 100), ('activations of b', 16), ('activations of a', 8), ('temporaries of b', 4))
    """
    totals = bytes_alive(trace.sizes, trace.events, rounding)
    seen = max(totals)
    begun = trace.events[: totals.index(seen) + 1]
    alive = {event for event in begun if event >= 0} - {~event for event in begun if event < 0}
    last = _last_phases(trace, origins)
    held = Counter({UNNAMED: max(0, peak - seen)})
    for number in alive - {0}:
        held[_part(origins.made.get(number), last[number])] += rounded_up(trace.sizes[number], rounding)
    if 0 in alive:
        held.update(_residents(rounded_up(trace.sizes[0], rounding), origins.resident))
    at = next((origins.made[event] for event in reversed(begun) if event in origins.made), Origin("forward", ""))
    parts = tuple((name, size) for name, size in held.most_common() if size)
    return Attribution(trace.samples, max(seen, peak), at.phase, at.place or THE_STEP, parts)


def block(name: str) -> str:
    """Return the block of a network that a module belongs to: its name up to the first number.

    Examples:
        >>> block("net.blocks.11.mlp.fc1"), block("head")
        ('net.blocks.11', 'head')
    """
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _residents(floor: int, known: Mapping[str, int]) -> Counter[str]:
    """Share out the bytes that outlived the step among what is known of them."""
    held: Counter[str] = Counter()
    for name, size in known.items():
        held[name] += min(size, floor)
        floor -= min(size, floor)
    held[BEFORE] += floor
    return held


def _last_phases(trace: MemoryTrace, origins: StepOrigins) -> list[str]:
    """Return the phase in which each storage was released; empty where it was not.

    Where a step did not run to its end, what it made before the backward pass would have been used there.
    """
    phase, last = "forward", ["" if origins.complete else "backward"] * len(trace.sizes)
    for event in trace.events:
        phase = origins.made[event].phase if event in origins.made else phase
        if event < 0:
            last[~event] = phase
    return last


def _part(origin: Origin | None, released_in: str) -> str:
    """Name what a storage is to a reader: state, an activation, a temporary, or something that was kept."""
    if origin is None:
        return BEFORE
    if origin.kind and (released_in or origin.kind != LOGITS):
        return origin.kind
    place = block(origin.place) or THE_STEP
    if not released_in:
        return f"{KEPT} {place}"
    if origin.phase == "update":
        return UPDATE
    if origin.phase == "backward" and released_in == "update":
        return GRADIENTS
    return f"{ACTIVATIONS if origin.phase != released_in else TEMPORARIES} {place}"
