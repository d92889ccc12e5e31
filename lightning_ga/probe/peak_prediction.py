"""Predict the peak of a training step at any micro-batch size from the traces of two small ones.

A step allocates and releases the same storages in the same order whatever the number of samples; only their
sizes change. The peak moves from one operation to another as the batch grows, so every storage is extrapolated
by itself, the stream is replayed with those sizes, and the maximum is taken.

An allocator's record of a step has more blocks than its tensors: workspaces, buffers of sorts and of reductions, one
for each sample or none below some size. Two records of one step differ in these alone, so they are paired by what both
have: the tensors, recorded beside them, and their order. Pure.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from lightning_ga.memory.trace import MemoryTrace, canonical, replay
from lightning_ga.plan.accumulation import ceil_div

_SATURATED = 1.1  # times proportional: a temporary that was larger before depends on the device, and grows no more
_MIN_FOUND = 0.95  # share of the tensors that must be found among the blocks


@dataclass(frozen=True, slots=True)
class PeakPredictor:
    """Peak bytes as a function of the micro-batch size, from two traces of the same stream.

    A storage of equal size in both is constant. A line with an intercept of zero or more is
    affine. A line with a negative intercept cannot be the size of a tensor, so the storage is
    read as α·b² + β·b (a similarity matrix is b × b). One that shrinks keeps its larger size.
    """

    first: MemoryTrace
    second: MemoryTrace
    rounding: int = 1
    temporaries: frozenset[int] = frozenset()  # of kernels: they may grow, or may have ended growing

    @property
    def is_quadratic(self) -> bool:
        """Whether a storage was read as quadratic, which a further trace should confirm."""
        return any(map(self._is_square, self.first.sizes, self.second.sizes))

    def sizes(self, samples: int, *, at_least: bool = False) -> list[int]:
        """Return the bytes of every storage at a micro-batch of ``samples``, rounded up to whole bytes.

        With ``at_least``, temporaries have ended growing.
        """
        pairs = list(zip(self.first.sizes, self.second.sizes))
        known = {pair: self._size(*pair, samples) for pair in set(pairs)}  # most storages have a size in common
        sizes = [known[pair] for pair in pairs]
        for number in self.temporaries if at_least else ():
            sizes[number] = max(pairs[number][1], 0)
        return sizes

    def _size(self, small: int, large: int, samples: int) -> int:
        """Return the bytes of a storage that has these two sizes in the traces."""
        low = self.first.samples
        high = self.second.samples
        before = samples - low
        after = high - samples
        apart = high - low
        if large <= small:
            size = small
        elif not self._is_square(small, large):
            size = small - (small - large) * before // apart
        else:  # size / samples is a line through both points
            size = ceil_div(samples * (small * high * after + large * low * before), low * high * apart)
        return max(size, 0)

    def __call__(self, samples: int, *, at_least: bool = False) -> int:
        """Return the predicted peak in bytes at a micro-batch of ``samples``."""
        return replay(self.sizes(samples, at_least=at_least), self.second.events, self.rounding)

    def confirms(self, trace: MemoryTrace) -> bool:
        """Return whether a further trace has the same stream and exactly the predicted peak."""
        return trace.events == self.second.events and self(trace.samples) == trace.peak(self.rounding)

    def _is_square(self, small: int, large: int) -> bool:
        return small < large and small * self.second.samples < large * self.first.samples


def extrapolate(
    first: MemoryTrace, second: MemoryTrace, temporaries: frozenset[int] = frozenset(), *, rounding: int = 1
) -> PeakPredictor | None:
    """Read the whole memory curve off two traces in rising order; ``None`` if the streams do not align."""
    if first.samples >= second.samples or first.events != second.events:
        return None
    return PeakPredictor(first, second, rounding, temporaries)


def largest_fitting(predict: Callable[[int], int], low: int, high: int, budget: int) -> int:
    """Return the largest size in ``low..high`` whose predicted peak is within the budget; ``low - 1`` if none is.

    ``predict`` must not fall as the size grows.
    """
    return low - 1 + bisect_right(range(low, high + 1), budget, key=predict)


def paired(
    small: tuple[MemoryTrace, ...], large: tuple[MemoryTrace, ...]
) -> tuple[MemoryTrace, MemoryTrace, frozenset[int]] | None:
    """Return the smaller step as if it had the blocks of the larger one, the larger one, and which are temporaries.

    A step is given by its blocks and its tensors. The streams are equal then. ``None`` if the tensors do not align.
    """
    if len(small) != 2 or len(large) != 2:
        return None
    places_small = _places(*small)
    places_large = _places(*large)
    if not places_small or not places_large or _stream(small[1]) != _stream(large[1]):
        return None
    sizes = _sizes_in_smaller(small[0], places_small, large[0], places_large)
    blocks = replace(large[0], events=_once(large[0].events, list(zip(sizes, large[0].sizes))))
    temporaries = frozenset(number for number, place in enumerate(places_large) if place < 0)
    return replace(blocks, samples=small[0].samples, sizes=tuple(sizes)), blocks, temporaries


def _sizes_in_smaller(
    small: MemoryTrace, places_small: list[int], large: MemoryTrace, places_large: list[int]
) -> list[int]:
    """Return the sizes that the blocks of the larger step have in the smaller one; of none there, as in the larger."""
    sizes = list(large.sizes)
    before = _by_place(places_small)
    for place, numbers in _by_place(places_large).items():
        known = [small.sizes[number] for number in before.get(place, ())]
        if place < 0:
            known = _temporaries(known, [large.sizes[number] for number in numbers], small.samples / large.samples)
        for number, size in zip(numbers, known):  # tensors have a block each
            sizes[number] = size
    return sizes


def _once(events: tuple[int, ...], sizes: list[tuple[int, int]]) -> tuple[int, ...]:
    """Leave out blocks that are allocated and released at once, if such a block of the same sizes came just before.

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


def _stream(trace: MemoryTrace) -> tuple[int, ...]:
    """Return the allocations and releases of the tensors that the step makes, in order."""
    rank = {number: place for place, number in enumerate(_made(trace), 1)}
    stream = []
    for event in trace.events:
        number = max(event, ~event)
        if number in rank:
            stream.append(rank[number] if event >= 0 else ~rank[number])
    return canonical(stream)


def _temporaries(known: list[int], now: list[int], share: float) -> list[int]:
    """Return the sizes of temporaries in a step of a ``share`` of the samples, in which those ``known`` were seen.

    A temporary that was larger than in proportion to the samples depends on the device, and is treated as constant. If
    their numbers differ, those of a known size are constant, too; the others are matched by size, the largest first,
    and none grows faster than the samples.

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
    for index, size in enumerate(then):
        if size > _SATURATED * share * now[index]:
            then[index] = now[index]
    return then


def _by_place(places: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        if place:
            found[place].append(number)
    return found


def _places(blocks: MemoryTrace, tensors: MemoryTrace) -> list[int] | None:
    """Return which tensor each block contains, from 1 on, or between which tensors it lies, as a negative number.

    A tensor is in the last block that was handed out at its address before the tensor was made. Blocks from before the
    step are constant, and have no place.
    """
    made = _made(blocks)
    places = [0] * len(blocks.sizes)
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
    if not found or found < _MIN_FOUND * len(_made(tensors)):
        return None
    before = 0  # tensors that were made before a block without one
    for number in made:
        if places[number]:
            before += 1
        else:
            places[number] = -(before + 1)
    return places
