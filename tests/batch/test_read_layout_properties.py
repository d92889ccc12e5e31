"""Batches of random structure are cut where their samples lie, or refused: never cut wrongly.

Each leaf of a batch is made by a function of the batch's samples, and knows by itself what belongs to
some of them (``part``): that is the oracle, which looks at no shape.
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
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_ga.batch.layout import Layout, LayoutError
from lightning_ga.batch.pytree import open_container
from lightning_ga.batch.read_layout import read_layout, read_ready_made
from lightning_ga.batch.split import slices_of

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


class Leaf:
    """A part of a batch: ``make`` collates it, ``part`` says what of it belongs to neighbouring samples."""

    honest = False  # whether it must be cut: all others may be refused

    def make(self, samples: Sequence[Sample]) -> Any:
        raise NotImplementedError

    def part(self, samples: Sequence[Sample], start: int, stop: int) -> Any:
        return self.make(samples[start:stop])


class Whole(Leaf):
    """A part that belongs to all samples: it is the same in each slice."""

    honest = True

    def part(self, samples: Sequence[Sample], start: int, stop: int) -> Any:
        return self.make(samples)


def value(sample: Sample, shape: Sequence[int], blank: bool = False) -> torch.Tensor:
    numbers = torch.arange(int(np.prod(shape))).reshape(tuple(shape))
    return torch.zeros_like(numbers) if blank else numbers + 1000 * (sample.number + 1)


def stack(tensors: Sequence[torch.Tensor], shape: Sequence[int], axis: int = 0) -> torch.Tensor:
    return torch.stack(list(tensors), axis) if tensors else torch.zeros((*shape[:axis], 0, *shape[axis:])).long()


@dataclass(frozen=True)
class Stacked(Leaf):
    """One tensor or array of each sample, along any axis."""

    shape: tuple[int, ...] = ()
    axis: int = 0
    blank: bool = False
    array: bool = False
    honest = True

    def make(self, samples: Sequence[Sample]) -> Any:
        whole = stack([value(s, self.shape, self.blank) for s in samples], self.shape, self.axis)
        return whole.numpy() if self.array else whole


@dataclass(frozen=True)
class Padded(Leaf):
    """Sequences of unequal lengths, padded to the longest of the batch, or to a multiple."""

    time_first: bool = False
    multiple: int = 1
    honest = True

    def width(self, samples: Sequence[Sample]) -> int:
        return -(-max((s.length for s in samples), default=0) // self.multiple) * self.multiple

    def make(self, samples: Sequence[Sample], width: int | None = None) -> torch.Tensor:
        width = self.width(samples) if width is None else width
        rows = [torch.nn.functional.pad(value(s, (s.length,)), (0, width - s.length)) for s in samples]
        return stack(rows, (width,), int(self.time_first))

    def part(self, samples: Sequence[Sample], start: int, stop: int) -> torch.Tensor:
        return self.make(samples[start:stop], self.width(samples))


@dataclass(frozen=True)
class Lengths(Leaf):
    """How long each sequence is, or how many rows it has."""

    listed: bool = False
    rows: bool = False
    honest = True

    def make(self, samples: Sequence[Sample]) -> Any:
        lengths = [s.rows if self.rows else s.length for s in samples]
        return lengths if self.listed else torch.tensor(lengths, dtype=torch.long)


@dataclass(frozen=True)
class Listed(Leaf):
    """A list with one thing for each sample."""

    kind: str = "texts"
    honest = True

    def make(self, samples: Sequence[Sample]) -> Any:
        if self.kind == "texts":
            return [f"s{s.number}" for s in samples]
        if self.kind == "images":
            return tuple(value(s, (2, s.length)) for s in samples)
        return [{"boxes": value(s, (s.rows, 4)), "label": s.number} for s in samples]


@dataclass(frozen=True)
class Sequences(Leaf):
    """Packed sequences."""

    honest = True

    def make(self, samples: Sequence[Sample]) -> Any:
        return pack_sequence([value(s, (s.length, 2)) for s in samples], enforce_sorted=False)

    def part(self, samples: Sequence[Sample], start: int, stop: int) -> Any:
        return self.make(samples[start:stop]) if stop > start else None


@dataclass(frozen=True)
class Shared(Whole):
    """The same for all batches: weights, a size, a text, nothing."""

    what: Any

    def make(self, samples: Sequence[Sample]) -> Any:
        if isinstance(self.what, tuple) and self.what and self.what[0] == "tensor":
            return torch.arange(int(np.prod(self.what[1]))).reshape(self.what[1])
        return self.what


@dataclass(frozen=True)
class OfLongest(Whole):
    """Depends on the longest sequence of the batch: positions, or its length."""

    positions: bool = True

    def make(self, samples: Sequence[Sample]) -> Any:
        longest = max((s.length for s in samples), default=0)
        return torch.arange(longest) if self.positions else longest


@dataclass(frozen=True)
class Optional(Leaf):
    """There if the samples have it: else ``None``, or no such key."""

    inner: Stacked
    every: bool = True
    key: bool = False

    def there(self, samples: Sequence[Sample]) -> bool:
        return (all if self.every else any)(s.has for s in samples)

    def make(self, samples: Sequence[Sample]) -> Any:
        return self.inner.make(samples) if self.there(samples) else ABSENT if self.key else None

    def part(self, samples: Sequence[Sample], start: int, stop: int) -> Any:
        if not self.there(samples):
            return ABSENT if self.key else None
        return self.inner.part(samples, start, stop)


@dataclass(frozen=True)
class Rows(Leaf):
    """Several rows of each sample, next to one another or view after view; ``k`` 0 for as many as it has."""

    k: int = 0
    views: bool = False
    blank: bool = False

    def make(self, samples: Sequence[Sample]) -> torch.Tensor:
        if self.views and self.k:
            parts = [value(s, (1, 2), self.blank) + view for view in range(self.k) for s in samples]
        else:
            parts = [value(s, (self.k or s.rows, 2), self.blank) for s in samples]
        return torch.cat(parts) if parts else torch.zeros(0, 2).long()


@dataclass(frozen=True)
class Offsets(Leaf):
    """Where the rows of each sample are: counted in the batch."""

    kind: str

    def make(self, samples: Sequence[Sample]) -> torch.Tensor:
        rows = torch.tensor([s.rows for s in samples], dtype=torch.long)
        if self.kind == "starts and end":
            return torch.cat([torch.zeros(1).long(), rows.cumsum(0)])
        if self.kind == "ends":
            return rows.cumsum(0)
        if self.kind == "index of rows":
            return torch.arange(len(samples)).repeat_interleave(rows)
        if self.kind == "order":
            return torch.tensor([s.length for s in samples], dtype=torch.long).argsort(stable=True)
        return torch.arange(len(samples))


@dataclass(frozen=True)
class Some(Leaf):
    """Every second sample, for example: each slice would have its own."""

    start: int = 0
    step: int = 2
    blank: bool = False

    def make(self, samples: Sequence[Sample]) -> torch.Tensor:
        return stack([value(s, (2,), self.blank) for s in samples[self.start :: self.step]], (2,))


@dataclass(frozen=True)
class First(Whole):
    """The first few samples once more, for all samples to be compared with."""

    honest = False
    most: int = 1

    def make(self, samples: Sequence[Sample]) -> torch.Tensor:
        return stack([value(s, (2,)) for s in samples[: self.most]], (2,))


@dataclass(frozen=True)
class Filled(Leaf):
    """As many rows as a multiple: the last ones are empty."""

    multiple: int
    blank: bool = False

    def make(self, samples: Sequence[Sample]) -> torch.Tensor:
        rows = [value(s, (2,), self.blank) for s in samples]
        return stack([*rows, *[torch.zeros(2).long()] * (-len(rows) % self.multiple)], (2,))


@dataclass(frozen=True)
class Pairwise(Leaf):
    """A matrix of all pairs of samples."""

    def make(self, samples: Sequence[Sample]) -> torch.Tensor:
        numbers = torch.tensor([s.number for s in samples], dtype=torch.long)
        return (numbers[:, None] == numbers).long()

    def part(self, samples: Sequence[Sample], start: int, stop: int) -> Any:
        return self.make(samples) if stop - start == len(samples) else None


@dataclass(frozen=True)
class Total(Leaf):
    """The sum over the batch: each slice would have its own."""

    def make(self, samples: Sequence[Sample]) -> torch.Tensor:
        return sum((value(s, (3,)) for s in samples), torch.zeros(3).long())


NUMBERS: dict[str, Callable[[int], float]] = {
    "n": lambda n: n,
    "2n": lambda n: 2 * n,
    "n + 1": lambda n: n + 1,
    "n // 2": lambda n: n // 2,
    "half, rounded up": lambda n: -(-n // 2),
    "at least 4": lambda n: max(n, 4),
    "1 / n": lambda n: 1 / max(n, 1),
}


@dataclass(frozen=True)
class Counted(Leaf):
    """A number that follows from the number of samples."""

    name: str = "n"
    tensor: bool = False
    repeated: int = 0

    def make(self, samples: Sequence[Sample]) -> Any:
        number = NUMBERS[self.name](len(samples))
        if self.repeated:
            return torch.full((self.repeated,), number)
        return torch.tensor(number) if self.tensor else number


@dataclass(frozen=True)
class Many:
    """A container."""

    kind: str
    children: tuple[Any, ...]

    @property
    def honest(self) -> bool:
        return all(child.honest for child in self.children)

    def make(self, samples: Sequence[Sample]) -> Any:
        return self.filled([child.make(samples) for child in self.children])

    def part(self, samples: Sequence[Sample], start: int, stop: int) -> Any:
        return self.filled([child.part(samples, start, stop) for child in self.children])

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
        return self.tree.make(self.order(samples))

    def part(self, samples: Sequence[Sample], start: int, stop: int) -> Any:
        return self.tree.part(self.order(samples), start, stop)


def stacked(shapes: st.SearchStrategy[tuple[int, ...]] = SHAPES) -> st.SearchStrategy[Stacked]:
    def along(shape: tuple[int, ...], axis: int, blank: bool, array: bool) -> Stacked:
        return Stacked(shape, min(axis, len(shape)), blank, array)

    return st.builds(along, shapes, st.integers(0, 2), st.booleans(), st.booleans())


SHARED = st.builds(
    Shared,
    st.none()
    | st.sampled_from(["train", 3, 4, 0.5, (224, 224), (1, 2, 3), (1, 2, 3, 4)])
    | st.tuples(st.just("tensor"), SHAPES),
)
HONEST: st.SearchStrategy[Any] = st.one_of(
    stacked(),
    st.builds(Padded, st.booleans(), st.sampled_from([1, 4])),
    st.builds(Lengths, st.booleans(), st.booleans()),
    st.builds(Listed, st.sampled_from(["texts", "images", "targets"])),
    SHARED,
    st.builds(OfLongest, st.booleans()),
)
ODD: st.SearchStrategy[Any] = st.one_of(
    st.builds(Sequences),
    st.builds(Optional, stacked(), st.booleans(), st.booleans()),
    st.builds(Rows, st.integers(0, 4), st.booleans(), st.booleans()),
    st.builds(Offsets, st.sampled_from(["starts and end", "ends", "index of rows", "order", "place"])),
    st.builds(Some, st.integers(0, 2), st.integers(2, 4), st.booleans()),
    st.builds(First, st.integers(1, 3)),
    st.builds(Filled, st.sampled_from([2, 4, 8]), st.booleans()),
    st.just(Pairwise()),
    st.just(Total()),
    st.builds(Counted, st.sampled_from(list(NUMBERS)), st.booleans(), st.sampled_from([0, 0, 3, 4])),
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


class Known:
    """Batches of known samples, of one collate function for each loader."""

    def __init__(self, samples: Sequence[Sample], *collate: Callable[[list[Sample]], Any]) -> None:
        self.samples, self.collate = samples, collate
        self.kinds, self.loaders = len(samples), len(collate)

    def batch(self, counts: Sequence[int], kinds: Sequence[int], seed: int = 0) -> Any:
        batches = [
            collate([self.samples[kinds[place % len(kinds)]] for place in range(count)])
            for collate, count in zip(self.collate, counts)
        ]
        return batches[0] if self.loaders == 1 else batches


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, PackedSequence):
        return same(list(unpack_sequence(one)), list(unpack_sequence(other)))
    mine, theirs = open_container(one), open_container(other)
    if mine is None or theirs is None:
        return bool(one == other)
    return [name for name, _ in mine] == [name for name, _ in theirs] and all(
        same(a, b) for (_, a), (_, b) in zip(mine, theirs)
    )


BY_SAMPLE = st.builds(
    lambda first, tree, shared: Collate(Many("dict", (first, tree, shared))),
    stacked(),
    trees(
        st.one_of(
            stacked(),
            st.builds(Padded, st.booleans(), st.sampled_from([1, 4])),
            st.builds(Lengths, st.booleans(), st.booleans()),
            st.just(Listed("texts")),
        )
    ),
    st.sampled_from([Shared(None), Shared("train"), Shared(3), Shared(4), Shared(0.5)]),
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
    stacked(),
    trees(HONEST),
    st.booleans(),
)


@settings(deadline=None, max_examples=EXAMPLES)
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


@settings(deadline=None, max_examples=EXAMPLES)
@given(HONESTLY, kinds_of_samples(), CHOSEN, st.data())
def test_usual_batches_are_not_refused(
    collate: Collate, kinds: list[Sample], chosen: list[int], data: st.DataObject
) -> None:
    """Stacked, padded and listed samples beside whatever belongs to all of them, of any extent."""
    samples = [kinds[number % len(kinds)] for number in chosen]
    start, stop = slices(data.draw, len(samples))
    batch, layout = collate(samples), read_layout(Known(kinds, collate))
    assert layout.samples(batch) == len(samples)
    ours = slices_of(batch, layout).take(start, stop)
    assert same(ours, collate.part(samples, start, stop))


@settings(deadline=None, max_examples=EXAMPLES)
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


@settings(deadline=None, max_examples=EXAMPLES)
@given(BY_SAMPLE, kinds_of_samples(), st.lists(st.integers(0, 2), min_size=2, max_size=9), st.data())
def test_one_ready_made_batch_is_cut_rightly_or_refused(
    collate: Collate, kinds: list[Sample], chosen: list[int], data: st.DataObject
) -> None:
    """If everything with a length in it is by sample, and it holds several: of more than that one batch cannot tell."""
    assert_ready_made(collate, [[kinds[number % len(kinds)] for number in chosen]], data.draw)


@settings(deadline=None, max_examples=EXAMPLES)
@given(HONESTLY, st.integers(1, 5), st.lists(st.integers(1, 9), min_size=2, max_size=2, unique=True), st.data())
def test_ready_made_batches_of_two_sizes_are_cut_rightly_or_refused(
    collate: Collate, length: int, counts: list[int], data: st.DataObject
) -> None:
    """What stays the same between them belongs to all samples; here sequences are of one length."""
    assert_ready_made(collate, [[Sample(n, length) for n in range(count)] for count in counts], data.draw)
