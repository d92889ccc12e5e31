"""Pair the blocks of two steps where kernels take temporaries that depend on the number of samples. Pure.

An allocator's record of a step has more blocks than its tensors: workspaces, buffers of sorts and of reductions,
one for each sample or none below some size. Two records of one step differ in these alone, so they are paired by
what both have: the tensors, recorded beside them, and their order.
"""

from collections import defaultdict
from dataclasses import replace
from math import ceil

from lightning_ga.memory.trace import MemoryTrace, canonical

_SATURATED = 1.1  # times proportional: a temporary that was larger before goes by the device, and grows no more
_LEAST = 0.95  # share of the tensors that must be found among the blocks


def paired(
    small: tuple[MemoryTrace, ...], large: tuple[MemoryTrace, ...], *, begin_alike: bool = False
) -> tuple[MemoryTrace, MemoryTrace, frozenset[int]] | None:
    """Return the smaller step as if it had the blocks of the larger one, the larger one, and which are temporaries.

    A step is given by its blocks and its tensors. The streams are equal then, and gradients are added as they are if
    no dispatch mode watches. ``None`` if the tensors do not align. With ``begin_alike`` it is enough that they begin
    alike, and what comes after is constant: a first step goes on to make the optimizer's state.
    """
    if len(small) != 2 or len(large) != 2:
        return None
    fewer, more, alike = _places(*small), _places(*large), _alike(small[1], large[1])
    if not fewer or not more or alike < (1 if begin_alike else len(large[1].events)):
        return None
    blocks, share = large[0], small[0].samples / large[0].samples
    sizes, before = list(blocks.sizes), _by_place(fewer)
    for place, numbers in _by_place(more).items():
        known = [small[0].sizes[number] for number in before.get(place, ())]
        if abs(place) > alike:
            continue
        then = known if place > 0 else _temporaries(known, [blocks.sizes[number] for number in numbers], share)
        for number, size in zip(numbers, then):
            sizes[number] = size
    held = {tensor: number for number, tensor in enumerate(more)}
    rank = {number: place for place, number in enumerate(_made(large[1]), 1)}
    sums = [(held.get(rank[one], 0), held.get(rank[total], 0)) for one, total in large[1].sums]
    blocks = replace(blocks, sums=tuple(pair for pair in sums if all(pair))).unwatched()
    blocks = replace(blocks, events=_once(blocks.events, list(zip(sizes, blocks.sizes))))
    temporaries = frozenset(number for number, place in enumerate(more) if place < 0)
    return replace(blocks, samples=small[0].samples, sizes=tuple(sizes)), blocks, temporaries


def _once(events: tuple[int, ...], sizes: list[tuple[int, int]]) -> tuple[int, ...]:
    """Leave out what is taken and released at once where the same was before: it finds the memory as it left it.

    Examples:
        >>> _once((0, 1, ~1, 2, ~2, 3), [(9, 9), (4, 8), (4, 8), (4, 8)])
        (0, 1, -2, 3)
    """
    kept: list[int] = []
    seen: set[tuple[int, int]] = set()
    place = 0
    while place < len(events):
        event = events[place]
        if event > 0 and events[place + 1 : place + 2] == (~event,):
            kept += () if sizes[event] in seen else (event, ~event)
            seen.add(sizes[event])
            place += 2
        else:
            kept.append(event)
            seen.clear()
            place += 1
    return tuple(kept)


def _made(trace: MemoryTrace) -> list[int]:
    """Return what the step makes, in order: the storages whose addresses are known."""
    return [number for number in trace.events if number > 0 and trace.addresses[number]]


def _alike(small: MemoryTrace, large: MemoryTrace) -> int:
    """Return how many tensors two steps make in one order of allocations and releases; more than all if that is all."""
    streams = []
    for trace in (small, large):
        rank = {number: place for place, number in enumerate(_made(trace), 1)}
        stream = (rank.get(event if event >= 0 else ~event, 0) * (1 if event >= 0 else -1) for event in trace.events)
        streams.append(canonical(event if event >= 0 else ~-event for event in stream if event))
    if streams[0] == streams[1]:
        return max(len(large.events), 1)
    differing = (index for index, (one, other) in enumerate(zip(*streams)) if one != other)
    end = next(differing, min(map(len, streams)))
    return max(streams[1][:end], default=0)


def _temporaries(known: list[int], now: list[int], share: float) -> list[int]:
    """Return the sizes of temporaries in a step of a ``share`` of the samples, where there were those ``known``.

    One that was larger than in proportion to the samples goes by the device, and is taken to be constant. Where there
    were others, those of a known size are constant, too, of the others the largest were the largest, and none grows
    faster than the samples do.

    Examples:
        >>> _temporaries([50, 90], [100, 100], 0.5), _temporaries([512, 40], [512, 512, 512], 0.5)
        ([50, 100], [512, 512, 512])
        >>> _temporaries([80], [200, 100], 0.5)
        [100, 50]
    """
    then = list(known)
    if len(known) != len(now):
        others = iter(sorted(set(known) - set(now), reverse=True))
        then = list(now)
        for index in sorted(range(len(now)), key=lambda index: -now[index]):
            if now[index] not in known:
                then[index] = max(ceil(share * now[index]), next(others, 0))
    return [size if size <= _SATURATED * share * most else most for size, most in zip(then, now)]


def _by_place(places: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        if place:
            found[place].append(number)
    return found


def _places(blocks: MemoryTrace, tensors: MemoryTrace) -> list[int] | None:
    """Return which of the tensors each block holds, from 1 on, or between which it lies, as a negative number.

    A tensor is in the last block that was handed out at its address before it was there. Blocks from before the step
    are constant, and have no place.
    """
    made, places = _made(blocks), [0] * len(blocks.sizes)
    last: dict[int, int] = {}  # by address
    seen = found = 0
    for place, tensor in enumerate(_made(tensors), 1):
        for number in made[seen : tensors.handed_out[tensor]]:
            last[blocks.addresses[number]] = number
        seen = max(seen, tensors.handed_out[tensor])
        block = last.get(tensors.addresses[tensor])
        if block is not None and not places[block] and blocks.sizes[block] == tensors.sizes[tensor]:
            places[block] = place
            found += 1
    if not found or found < _LEAST * len(_made(tensors)):
        return None
    before = 0
    for number in made:
        before += places[number] > 0
        places[number] = places[number] or -1 - before
    return places
