"""Batches of random structure are cut where their samples lie, or refused: never cut wrongly.

Each leaf of a batch is made by a function of some samples and of all of the batch, which makes a slice as well: that is
the oracle, which looks at no shape.
"""

import os
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_batches import Known, same
from torch.nn.utils.rnn import pack_sequence

from lightning_ga.batch.layout import Layout, LayoutError, slices_of
from lightning_ga.batch.read_layout import read_layout, read_ready_made

Pair = namedtuple("Pair", "one two")
ABSENT = object()
EXAMPLES = int(os.environ.get("LIGHTNING_GA_EXAMPLES", 3 * settings().max_examples))
EXTENTS = st.integers(1, 5) | st.sampled_from([3, 4, 8])
SHAPES = st.lists(EXTENTS, max_size=2).map(tuple)


@dataclass(frozen=True)
class Sample:
    """One sample: its values are made from its number, its ragged fields from its lengths."""

    number: int
    length: int = 1
    rows: int = 1
    has: bool = True


Make = Callable[[Sequence[Sample], Sequence[Sample]], Any]


@dataclass(frozen=True)
class Leaf:
    """A part of a batch: ``make`` is given the samples that it should show, and all of the batch."""

    name: str
    make: Make


def value(sample: Sample, shape: Sequence[int], blank: bool = False) -> torch.Tensor:
    numbers = torch.arange(int(np.prod(shape))).reshape(tuple(shape))
    return torch.zeros_like(numbers) if blank else numbers + 1000 * (sample.number + 1)


def stack(tensors: Sequence[torch.Tensor], shape: Sequence[int] = (2,), axis: int = 0) -> torch.Tensor:
    return torch.stack(list(tensors), axis) if tensors else torch.zeros((*shape[:axis], 0, *shape[axis:])).long()


def longest(samples: Sequence[Sample]) -> int:
    return max((s.length for s in samples), default=0)


def stacked_at(shape: tuple[int, ...], axis: int, blank: bool, array: bool) -> Leaf:
    """One tensor or array of each sample, along any axis."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> Any:
        whole = stack([value(s, shape, blank) for s in own], shape, min(axis, len(shape)))
        return whole.numpy() if array else whole

    return Leaf(f"stacked {shape} at {axis}, {blank=}, {array=}", make)


def padded(time_first: bool, multiple: int) -> Leaf:
    """Sequences of unequal lengths, padded to the longest of the batch, or to a multiple."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> torch.Tensor:
        width = -(-longest(batch) // multiple) * multiple
        rows = [torch.nn.functional.pad(value(s, (s.length,)), (0, width - s.length)) for s in own]
        return stack(rows, (width,), int(time_first))

    return Leaf(f"padded to a multiple of {multiple}, {time_first=}", make)


LISTED: dict[str, Callable[[Sequence[Sample]], Any]] = {
    "lengths": lambda own: torch.tensor([s.length for s in own], dtype=torch.long),
    "listed lengths": lambda own: [s.length for s in own],
    "rows": lambda own: torch.tensor([s.rows for s in own], dtype=torch.long),
    "listed rows": lambda own: [s.rows for s in own],
    "texts": lambda own: [f"s{s.number}" for s in own],
    "images": lambda own: tuple(value(s, (2, s.length)) for s in own),
    "targets": lambda own: [{"boxes": value(s, (s.rows, 4)), "label": s.number} for s in own],
}
OFFSETS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of the rows of samples, counted in the batch
    "starts and end": lambda rows: torch.cat([torch.zeros(1).long(), rows.cumsum(0)]),
    "ends": lambda rows: rows.cumsum(0),
    "index of rows": lambda rows: torch.arange(len(rows)).repeat_interleave(rows),
    "order": lambda rows: rows.argsort(stable=True),
    "place": lambda rows: torch.arange(len(rows)),
}


def optional(inner: Leaf, every: bool, key: bool) -> Leaf:
    """There if the samples have it: else ``None``, or no such key."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> Any:
        there = (all if every else any)(s.has for s in batch)
        return inner.make(own, batch) if there else ABSENT if key else None

    return Leaf(f"optional {inner.name}, {every=}, {key=}", make)


def rows_of(k: int, views: bool, blank: bool) -> Leaf:
    """Several rows of each sample, next to one another or view after view; ``k`` 0 for as many as it has."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> torch.Tensor:
        if views and k:
            parts = [value(s, (1, 2), blank) + view for view in range(k) for s in own]
        else:
            parts = [value(s, (k or s.rows, 2), blank) for s in own]
        return torch.cat(parts) if parts else torch.zeros(0, 2).long()

    return Leaf(f"{k} rows, {views=}, {blank=}", make)


def every_second(start: int, step: int, blank: bool) -> Leaf:
    """Every second sample, for example: each slice would have its own."""
    return Leaf(f"{start}::{step}", lambda own, batch: stack([value(s, (2,), blank) for s in own[start::step]]))


def filled(multiple: int, blank: bool) -> Leaf:
    """As many rows as a multiple: the last ones are empty."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> torch.Tensor:
        rows = [value(s, (2,), blank) for s in own]
        return stack([*rows, *[torch.zeros(2).long()] * (-len(rows) % multiple)])

    return Leaf(f"filled up to a multiple of {multiple}, {blank=}", make)


def pairs(own: Sequence[Sample], batch: Sequence[Sample]) -> torch.Tensor:
    """A matrix of all pairs of samples."""
    numbers = torch.tensor([s.number for s in own], dtype=torch.long)
    return (numbers[:, None] == numbers).long()


NUMBERS: dict[str, Callable[[int], float]] = {
    "n": lambda n: n,
    "2n": lambda n: 2 * n,
    "n + 1": lambda n: n + 1,
    "n // 2": lambda n: n // 2,
    "half, rounded up": lambda n: -(-n // 2),
    "at least 4": lambda n: max(n, 4),
    "1 / n": lambda n: 1 / max(n, 1),
}


def counted(name: str, tensor: bool, repeated: int) -> Leaf:
    """A number that follows from the number of samples."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> Any:
        number = NUMBERS[name](len(own))
        if repeated:
            return torch.full((repeated,), number)
        return torch.tensor(number) if tensor else number

    return Leaf(f"{name}, {tensor=}, {repeated=}", make)


@dataclass(frozen=True)
class Many:
    """A container."""

    kind: str
    children: tuple[Any, ...]

    def make(self, own: Sequence[Sample], batch: Sequence[Sample]) -> Any:
        return self.filled([child.make(own, batch) for child in self.children])

    def filled(self, parts: list[Any]) -> Any:
        if self.kind == "dict":
            return {f"k{place}": part for place, part in enumerate(parts) if part is not ABSENT}
        parts = [None if part is ABSENT else part for part in parts]
        if self.kind == "pair":
            return Pair(*(parts * 2)[:2])
        return tuple(parts) if self.kind == "tuple" else parts


@dataclass(frozen=True)
class Collate:
    """A collate function, which may put the longest sample first."""

    tree: Any
    longest_first: bool = False

    def order(self, samples: Sequence[Sample]) -> list[Sample]:
        return sorted(samples, key=lambda s: -s.length) if self.longest_first else list(samples)

    def __call__(self, samples: Sequence[Sample]) -> Any:
        ordered = self.order(samples)
        return self.tree.make(ordered, ordered)

    def part(self, samples: Sequence[Sample], start: int, stop: int) -> Any:
        ordered = self.order(samples)
        return self.tree.make(ordered[start:stop], ordered)


def shared(*what: Any) -> st.SearchStrategy[Leaf]:
    """The same for all batches: weights, a size, a text, nothing."""
    return st.sampled_from([Leaf(f"shared {one}", lambda own, batch, one=one: one) for one in what])


def of_shape(shape: tuple[int, ...]) -> Leaf:
    return Leaf(f"shared {shape}", lambda own, batch: torch.arange(int(np.prod(shape))).reshape(shape))


def listed(name: str) -> Leaf:
    return Leaf(name, lambda own, batch: LISTED[name](own))


def offsets(name: str) -> Leaf:
    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> torch.Tensor:
        lengths = [s.length if name == "order" else s.rows for s in own]
        return OFFSETS[name](torch.tensor(lengths, dtype=torch.long))

    return Leaf(name, make)


STACKED = st.builds(stacked_at, SHAPES, st.integers(0, 2), st.booleans(), st.booleans())
PADDED = st.builds(padded, st.booleans(), st.sampled_from([1, 4]))
HONEST: st.SearchStrategy[Leaf] = st.one_of(
    STACKED,
    PADDED,
    st.sampled_from([*LISTED]).map(listed),
    shared(None, "train", 3, 4, 0.5, (224, 224), (1, 2, 3), (1, 2, 3, 4)),
    SHAPES.map(of_shape),
    st.just(Leaf("positions", lambda own, batch: torch.arange(longest(batch)))),
    st.just(Leaf("longest", lambda own, batch: longest(batch))),
)
ODD: st.SearchStrategy[Leaf] = st.one_of(
    st.just(Leaf("packed", lambda own, _: pack_sequence([value(s, (s.length, 2)) for s in own], enforce_sorted=False))),
    st.builds(optional, STACKED, st.booleans(), st.booleans()),
    st.builds(rows_of, st.integers(0, 4), st.booleans(), st.booleans()),
    st.sampled_from([*OFFSETS]).map(offsets),
    st.builds(every_second, st.integers(0, 2), st.integers(2, 4), st.booleans()),
    # The first few samples once more, for all samples to be compared with; the sum over the batch; pairs.
    st.integers(1, 3).map(lambda most: Leaf("first", lambda _, batch: stack([value(s, (2,)) for s in batch[:most]]))),
    st.just(Leaf("total", lambda own, _: sum((value(s, (3,)) for s in own), torch.zeros(3).long()))),
    st.just(Leaf("pairs", pairs)),
    st.builds(filled, st.sampled_from([2, 4, 8]), st.booleans()),
    st.builds(counted, st.sampled_from(list(NUMBERS)), st.booleans(), st.sampled_from([0, 0, 3, 4])),
)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.builds(
            Many, st.sampled_from(["dict", "list", "tuple", "pair"]), st.lists(inner, min_size=1, max_size=4).map(tuple)
        ),
        max_leaves=6,
    )


@st.composite
def kinds_of_samples(draw: st.DrawFn) -> list[Sample]:
    fields = st.tuples(st.integers(1, 5), st.integers(0, 3), st.booleans())
    return [Sample(number, *each) for number, each in enumerate(draw(st.lists(fields, min_size=1, max_size=3)))]


BY_SAMPLE = st.builds(
    lambda first, tree, shared: Collate(Many("dict", (first, tree, shared))),
    STACKED,
    trees(st.one_of(STACKED, PADDED, st.sampled_from(["lengths", "listed rows", "texts"]).map(listed))),
    shared(None, "train", 3, 4, 0.5),
)


def slices(draw: Callable[..., Any], number: int) -> tuple[int, int]:
    start = draw(st.integers(0, number - 1), label="start")
    return start, draw(st.integers(start + 1, number), label="stop")


def assert_cut(layout: Layout, batch: Any, part: tuple[int, int], expected: Any) -> None:
    """Assert that the cut gives what the leaves say, if it does not refuse."""
    try:
        ours = slices_of(batch, layout).take(*part)
    except LayoutError:
        return
    assert same(ours, expected), f"{batch=} was cut to {ours}, not {expected}, by {dict(layout.roles)}"


CHOSEN = st.lists(st.integers(0, 2), min_size=1, max_size=9)
COLLATE = st.builds(Collate, trees(HONEST | ODD), st.booleans())
HONESTLY = st.builds(
    lambda first, tree, longest_first: Collate(Many("dict", (first, tree)), longest_first),
    STACKED,
    trees(HONEST),
    st.booleans(),
)


@settings(max_examples=EXAMPLES)
@given(COLLATE, kinds_of_samples(), CHOSEN, st.data())
def test_any_batch_is_cut_rightly_or_refused(
    collate: Collate, kinds: list[Sample], chosen: list[int], data: st.DataObject
) -> None:
    """Whatever the collate function does with its samples."""
    samples = [kinds[number % len(kinds)] for number in chosen]
    start, stop = slices(data.draw, len(samples))
    batch = collate(samples)
    try:
        layout = read_layout(Known(kinds, collate))
        found = layout.samples(batch)
    except LayoutError:
        return
    if found == len(samples):  # the loader knows how many it fetched
        assert_cut(layout, batch, (start, stop), collate.part(samples, start, stop))


@settings(max_examples=EXAMPLES)
@given(HONESTLY, kinds_of_samples(), CHOSEN, st.data())
def test_usual_batches_are_not_refused(
    collate: Collate, kinds: list[Sample], chosen: list[int], data: st.DataObject
) -> None:
    samples = [kinds[number % len(kinds)] for number in chosen]
    start, stop = slices(data.draw, len(samples))
    batch, layout = collate(samples), read_layout(Known(kinds, collate))
    assert layout.samples(batch) == len(samples)
    ours = slices_of(batch, layout).take(start, stop)
    assert same(ours, collate.part(samples, start, stop))


@settings(max_examples=EXAMPLES)
@given(COLLATE, COLLATE, kinds_of_samples(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_batches_of_two_loaders_are_cut_in_proportion_or_refused(
    one: Collate, two: Collate, kinds: list[Sample], groups: int, few: int, many: int, data: st.DataObject
) -> None:
    """As many parts as the numbers of samples have in common, each with its share of both."""
    counts = [groups * few, groups * many]
    both = [[kinds[place % len(kinds)] for place in range(count)] for count in counts]
    batch = [one(both[0]), two(both[1])]
    try:
        layout = read_layout(Known(kinds, one, two))
        found, sizes = layout.samples(batch), layout.sizes(batch)
    except LayoutError:
        return
    if sizes != dict(enumerate(counts)):
        return
    assert found == gcd(*counts)
    start, stop = slices(data.draw, found)
    expected = [
        collate.part(samples, *(edge * (len(samples) // found) for edge in (start, stop)))
        for collate, samples in zip((one, two), both)
    ]
    assert_cut(layout, batch, (start, stop), expected)


def assert_ready_made(collate: Collate, every: list[list[Sample]], draw: Callable[..., Any]) -> None:
    try:
        layout = read_ready_made([collate(samples) for samples in every])
    except LayoutError:
        return
    for samples in every:
        batch, (start, stop) = collate(samples), slices(draw, len(samples))
        found = layout.samples(batch)
        assert found == len(samples), f"{found} samples instead of {len(samples)} in {batch}"
        assert_cut(layout, batch, (start, stop), collate.part(samples, start, stop))


@settings(max_examples=EXAMPLES)
@given(BY_SAMPLE, kinds_of_samples(), st.lists(st.integers(0, 2), min_size=2, max_size=9), st.data())
def test_one_ready_made_batch_is_cut_rightly_or_refused(
    collate: Collate, kinds: list[Sample], chosen: list[int], data: st.DataObject
) -> None:
    assert_ready_made(collate, [[kinds[number % len(kinds)] for number in chosen]], data.draw)


@settings(max_examples=EXAMPLES)
@given(HONESTLY, st.integers(1, 5), st.lists(st.integers(1, 9), min_size=2, max_size=2, unique=True), st.data())
def test_ready_made_batches_of_two_sizes_are_cut_rightly_or_refused(
    collate: Collate, length: int, counts: list[int], data: st.DataObject
) -> None:
    assert_ready_made(collate, [[Sample(n, length) for n in range(count)] for count in counts], data.draw)
