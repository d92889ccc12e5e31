"""Steps of made-up storages, whose peak at every size is known: shared by the tests of replay and search."""

from collections.abc import Callable

from hypothesis import strategies as st

from lightning_ga.memory.trace import MemoryTrace, canonical
from lightning_ga.plan.records import Trial

Size = Callable[[int], int]
CONSTANT_OR_GROWING = st.tuples(st.integers(0, 500), st.integers(0, 60)).map(lambda k: lambda b: k[0] + k[1] * b)
SQUARES = st.tuples(st.integers(1, 3), st.integers(0, 9)).map(lambda k: lambda b: k[0] * b * b + k[1] * b)
UNFORESEEN = st.one_of(
    st.tuples(st.integers(1, 3), st.integers(1, 400)).map(lambda k: lambda b: k[0] * b * b + k[1]),
    st.integers(1, 99).map(lambda k: lambda b: k * -(-b // 8) * 8),
    st.tuples(st.integers(1, 99), st.integers(1, 40)).map(lambda k: lambda b: k[0] * max(0, b - k[1])),
)


@st.composite
def streams(draw: st.DrawFn, sizes: st.SearchStrategy[Size]) -> tuple[list[Size], list[int]]:
    """Storages as functions of the samples, and a stream that allocates and releases them."""
    storages = draw(st.lists(sizes, min_size=1, max_size=12))
    events: list[int] = []
    alive: list[int] = []
    for number in range(len(storages)):
        events.append(number)
        alive.append(number)
        while alive and draw(st.booleans()):
            events.append(~alive.pop(draw(st.integers(0, len(alive) - 1))))
    return storages, events


class FakeDevice:
    """Runs steps of a stream under a budget, and notes the sizes that were tried."""

    def __init__(self, stream: tuple[list[Size], list[int]], budget: int, *, traced: bool = True) -> None:
        self.storages, self.events = stream
        self.budget = budget
        self.traced = traced
        self.tried: list[int] = []

    def trace(self, samples: int) -> MemoryTrace:
        return MemoryTrace(samples, tuple(size(samples) for size in self.storages), canonical(self.events))

    def __call__(self, samples: int) -> tuple[Trial, MemoryTrace | None]:
        self.tried.append(samples)
        trace = self.trace(samples)
        fits = trace.peak() <= self.budget
        return Trial(samples, trace.peak(), fits, 0.0), trace if fits and self.traced else None

    def limit(self, high: int) -> int:
        return max((b for b in range(1, high + 1) if self.trace(b).peak() <= self.budget), default=0)


def linear(base: int, slope: int) -> tuple[list[Size], list[int]]:
    return [lambda b: base, lambda b: slope * b], [0, 1, ~1]
