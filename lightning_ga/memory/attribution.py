"""Add up what holds the memory at the peak of a recorded step: state, activations of which blocks, temporaries.

A ``MemoryTrace`` says which storages are alive when most bytes are, and ``StepOrigins`` where each was
made. The parts sum to the peak.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_ga.memory.trace import MemoryTrace, replay
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
    """Where a storage was made.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"update"``.
        place: The module that ran, by its name; the operation, outside of modules.
        kind: What it is, where that is known, as in ``plan.attribution``; empty for anything else.
    """

    phase: str
    place: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class StepOrigins:
    """Where the storages of one recorded step come from.

    Attributes:
        made: Where each was made, by its number in the trace; missing for those alive before the step.
        resident: What is known of storage 0, which stands for all that outlived the step: kind and bytes.
        complete: Whether the step ran to its end.
    """

    made: Mapping[int, Origin]
    resident: Mapping[str, int] = field(default_factory=dict)
    complete: bool = True


def attribute(trace: MemoryTrace, origins: StepOrigins, *, rounding: int = 1) -> Attribution:
    """Say what holds the memory at the peak of a recorded step.

    Args:
        trace: The step.
        origins: Where its storages come from.
        rounding: Bytes that every storage is rounded up to.

    Examples:
        >>> trace = MemoryTrace(2, sizes=(100, 8, 16, 4), events=(0, 1, 2, 3, ~3, ~2, ~1))
        >>> made = {1: Origin("forward", "a"), 2: Origin("forward", "b"), 3: Origin("backward", "b")}
        >>> attribute(trace, StepOrigins(made, {"parameters": 100})).parts
        (('parameters', 100), ('activations of b', 16), ('activations of a', 8), ('temporaries of b', 4))
    """
    begun = trace.events[: _peak_event(trace, rounding) + 1]
    alive = {event for event in begun if event >= 0} - {~event for event in begun if event < 0}
    last = _last_phases(trace, origins)
    held: Counter[str] = Counter()
    for number in alive - {0}:
        held[_part(origins.made.get(number), last[number])] += _rounded(trace.sizes[number], rounding)
    if 0 in alive:
        held.update(_residents(_rounded(trace.sizes[0], rounding), origins.resident))
    at = next((origins.made[event] for event in reversed(begun) if event in origins.made), Origin("forward", ""))
    parts = tuple((name, size) for name, size in held.most_common() if size)
    return Attribution(trace.samples, trace.peak(rounding), at.phase, at.place or THE_STEP, parts)


def with_unnamed(found: Attribution, peak: int) -> Attribution:
    """Add what an allocator handed out at its peak beyond all that tensors held.

    Examples:
        >>> with_unnamed(Attribution(2, 100, "forward", "net", (("parameters", 100),)), 130).peak_bytes
        130
    """
    missing = peak - found.peak_bytes
    if missing <= 0:
        return found
    parts = sorted([*found.parts, (UNNAMED, missing)], key=lambda part: -part[1])
    return replace(found, peak_bytes=peak, parts=tuple(parts))


def block(name: str) -> str:
    """Return the block of a network that a module belongs to: its name up to the first number.

    Examples:
        >>> block("net.blocks.11.mlp.fc1"), block("head")
        ('net.blocks.11', 'head')
    """
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _rounded(size: int, rounding: int) -> int:
    return -(-size // rounding) * rounding


def _residents(floor: int, known: Mapping[str, int]) -> Counter[str]:
    """Share out the bytes that outlived the step among what is known of them."""
    held: Counter[str] = Counter()
    for name, size in known.items():
        held[name] += min(size, floor)
        floor -= min(size, floor)
    held[BEFORE] += floor
    return held


def _peak_event(trace: MemoryTrace, rounding: int) -> int:
    """Return the first event after which most bytes are alive."""
    peak, alive = replay(trace.sizes, trace.events, rounding), 0
    for place, event in enumerate(trace.events):
        size = _rounded(trace.sizes[event if event >= 0 else ~event], rounding)
        alive += size if event >= 0 else -size
        if alive == peak:
            return place
    return 0


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
