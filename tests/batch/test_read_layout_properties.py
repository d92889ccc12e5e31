"""Batches of random structure are cut where their samples lie, or refused: never cut wrongly.

Each leaf of a batch is made by a function of some samples and of all of the batch, which makes a slice as well: that is
the oracle, which looks at no shape.
"""

import os
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_batches import Known, same
from torch.nn.utils.rnn import pack_sequence

from lightning_ga.batch.layout import LayoutError
from lightning_ga.batch.pytree import open_container
from lightning_ga.batch.read_layout import read_layout

Pair = namedtuple("Pair", "one two")
ABSENT = object()
EXAMPLES = int(os.environ.get("LIGHTNING_GA_EXAMPLES", settings().max_examples))
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
"""Makes a part of a batch, of the samples that it should show and all of the batch."""


def value(sample: Sample, shape: Sequence[int], blank: bool = False) -> torch.Tensor:
    numbers = torch.arange(int(np.prod(shape))).reshape(tuple(shape))
    return torch.zeros_like(numbers) if blank else numbers + 1000 * (sample.number + 1)


def stack(tensors: Sequence[torch.Tensor], shape: Sequence[int] = (2,), axis: int = 0) -> torch.Tensor:
    return torch.stack(list(tensors), axis) if tensors else torch.zeros((*shape[:axis], 0, *shape[axis:])).long()


def longest(samples: Sequence[Sample]) -> int:
    return max((s.length for s in samples), default=0)


def stacked_at(shape: tuple[int, ...], axis: int, blank: bool, array: bool) -> Make:
    """One tensor or array of each sample, along any axis."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> Any:
        whole = stack([value(s, shape, blank) for s in own], shape, min(axis, len(shape)))
        return whole.numpy() if array else whole

    return make


def padded(time_first: bool, multiple: int) -> Make:
    """Sequences of unequal lengths, padded to the longest of the batch, or to a multiple."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> torch.Tensor:
        width = -(-longest(batch) // multiple) * multiple
        rows = [torch.nn.functional.pad(value(s, (s.length,)), (0, width - s.length)) for s in own]
        return stack(rows, (width,), int(time_first))

    return make


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


def optional(inner: Make, every: bool, key: bool) -> Make:
    """There if the samples have it: else ``None``, or no such key."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> Any:
        there = (all if every else any)(s.has for s in batch)
        return inner(own, batch) if there else ABSENT if key else None

    return make


def rows_of(k: int, views: bool, blank: bool) -> Make:
    """Several rows of each sample, next to one another or view after view; ``k`` 0 for as many as it has."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> torch.Tensor:
        if views and k:
            parts = [value(s, (1, 2), blank) + view for view in range(k) for s in own]
        else:
            parts = [value(s, (k or s.rows, 2), blank) for s in own]
        return torch.cat(parts) if parts else torch.zeros(0, 2).long()

    return make


def filled(multiple: int, blank: bool) -> Make:
    """As many rows as a multiple: the last ones are empty."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> torch.Tensor:
        rows = [value(s, (2,), blank) for s in own]
        return stack([*rows, *[torch.zeros(2).long()] * (-len(rows) % multiple)])

    return make


def pairs(own: Sequence[Sample], batch: Sequence[Sample]) -> torch.Tensor:
    """A matrix of all pairs of samples."""
    numbers = torch.tensor([s.number for s in own], dtype=torch.long)
    return (numbers[:, None] == numbers).long()


NUMBERS: dict[str, Callable[[int], float]] = {
    "n": lambda n: n,
    "2n": lambda n: 2 * n,
    "n + 1": lambda n: n + 1,
    "half, rounded up": lambda n: -(-n // 2),
    "at least 4": lambda n: max(n, 4),
    "1 / n": lambda n: 1 / max(n, 1),
}


def counted(name: str, tensor: bool, repeated: int) -> Make:
    """A number that follows from the number of samples."""

    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> Any:
        number = NUMBERS[name](len(own))
        if repeated:
            return torch.full((repeated,), number)
        return torch.tensor(number) if tensor else number

    return make


@dataclass
class Record:
    one: Any
    two: Any


NAMED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": dict,
    "turned": lambda parts: OrderedDict(reversed(parts.items())),
    "with defaults": lambda parts: defaultdict(list, parts),
    "read only": MappingProxyType,
    "attributes": lambda parts: SimpleNamespace(**parts),
}
LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "pair": lambda parts: Pair(*(parts * 2)[:2]),
    "record": lambda parts: Record(*(parts * 2)[:2]),
}


@dataclass(frozen=True)
class Many:
    """A container."""

    kind: str
    children: tuple[Any, ...]

    def __call__(self, own: Sequence[Sample], batch: Sequence[Sample]) -> Any:
        parts = [child(own, batch) for child in self.children]
        if self.kind in NAMED:
            return NAMED[self.kind]({f"k{place}": part for place, part in enumerate(parts) if part is not ABSENT})
        return LISTS[self.kind]([None if part is ABSENT else part for part in parts])


@dataclass(frozen=True)
class Collate:
    """A collate function, which may put the longest sample first."""

    tree: Any
    longest_first: bool = False

    def order(self, samples: Sequence[Sample]) -> list[Sample]:
        return sorted(samples, key=lambda s: -s.length) if self.longest_first else list(samples)

    def __call__(self, samples: Sequence[Sample]) -> Any:
        ordered = self.order(samples)
        return self.tree(ordered, ordered)

    def part(self, samples: Sequence[Sample], start: int, stop: int) -> Any:
        ordered = self.order(samples)
        return self.tree(ordered[start:stop], ordered)


def shared(*what: Any) -> st.SearchStrategy[Make]:
    """The same for all batches: weights, a size, a text, nothing."""
    return st.sampled_from(what).map(lambda one: lambda own, batch: one)


def listed(name: str) -> Make:
    return lambda own, batch: LISTED[name](own)


def offsets(name: str) -> Make:
    def make(own: Sequence[Sample], batch: Sequence[Sample]) -> torch.Tensor:
        lengths = [s.length if name == "order" else s.rows for s in own]
        return OFFSETS[name](torch.tensor(lengths, dtype=torch.long))

    return make


STACKED = st.builds(stacked_at, SHAPES, st.integers(0, 2), st.booleans(), st.booleans())
PADDED = st.builds(padded, st.booleans(), st.sampled_from([1, 4]))
HONEST: st.SearchStrategy[Make] = st.one_of(
    STACKED,
    PADDED,
    st.sampled_from([*LISTED]).map(listed),
    shared(None, "train", 3, 4, 0.5, (224, 224), (1, 2, 3), (1, 2, 3, 4)),
    SHAPES.map(lambda shape: lambda own, batch: torch.arange(int(np.prod(shape))).reshape(shape)),
    st.just(lambda own, batch: torch.arange(longest(batch))),
    st.just(lambda own, batch: longest(batch)),
)
ODD: st.SearchStrategy[Make] = st.one_of(
    st.just(lambda own, _: pack_sequence([value(s, (s.length, 2)) for s in own], enforce_sorted=False)),
    st.builds(optional, STACKED, st.booleans(), st.booleans()),
    st.builds(rows_of, st.integers(0, 4), st.booleans(), st.booleans()),
    st.sampled_from([*OFFSETS]).map(offsets),
    # The first few samples once more, for all samples to be compared with; the sum over the batch; pairs.
    st.integers(1, 3).map(lambda most: lambda _, batch: stack([value(s, (2,)) for s in batch[:most]])),
    st.just(lambda own, _: sum((value(s, (3,)) for s in own), torch.zeros(3).long())),
    st.just(pairs),
    st.builds(filled, st.sampled_from([2, 4, 8]), st.booleans()),
    st.builds(counted, st.sampled_from(list(NUMBERS)), st.booleans(), st.sampled_from([0, 0, 3, 4])),
)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.builds(
            Many, st.sampled_from([*NAMED, *LISTS]), st.lists(inner, min_size=1, max_size=4).map(tuple)
        ),
        max_leaves=6,
    )


@st.composite
def kinds_of_samples(draw: st.DrawFn) -> list[Sample]:
    fields = st.tuples(st.integers(1, 5), st.integers(0, 3), st.booleans())
    return [Sample(number, *each) for number, each in enumerate(draw(st.lists(fields, min_size=1, max_size=3)))]


COLLATE = st.builds(Collate, trees(HONEST | ODD), st.booleans())
HONESTLY = st.builds(
    lambda first, tree, longest_first: Collate(Many("dict", (first, tree)), longest_first),
    STACKED,
    trees(HONEST),
    st.booleans(),
)


@settings(max_examples=EXAMPLES)
@given(
    st.lists(COLLATE, min_size=1, max_size=2),
    kinds_of_samples(),
    st.integers(1, 4),
    st.lists(st.integers(1, 3), min_size=2, max_size=2),
    st.data(),
)
def test_any_batch_is_cut_rightly_or_refused(collate, kinds, groups, shares, data):
    """Whatever collate functions do; of two loaders as many parts as they have in common, with a share of both."""
    counts = [groups * share for share in shares[: len(collate)]]
    of_loaders = [[kinds[place % len(kinds)] for place in range(count)] for count in counts]
    batches = [make(samples) for make, samples in zip(collate, of_loaders)]
    batch = batches[0] if len(batches) == 1 else batches
    try:
        layout = read_layout(Known(kinds, *collate))
        found, sizes = layout.samples(batch), layout.sizes(batch)
    except LayoutError:
        return
    if sizes != dict(enumerate(counts)):  # the loader knows how many it fetched
        return
    assert found == gcd(*counts)
    start = data.draw(st.integers(0, found - 1), label="start")
    stop = data.draw(st.integers(start + 1, found), label="stop")
    expected = [
        make.part(samples, *(edge * (len(samples) // found) for edge in (start, stop)))
        for make, samples in zip(collate, of_loaders)
    ]
    try:
        ours = layout.cut(batch, start, stop)
    except LayoutError:
        return
    right = expected[0] if len(expected) == 1 else expected
    assert same(ours, right), f"{batch=} was cut to {ours}, not {right}, by {dict(layout.roles)}"


@settings(max_examples=EXAMPLES)
@given(HONESTLY, kinds_of_samples(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_usual_batches_are_split_into_what_their_samples_make(collate, kinds, sizes):
    """Never refused, not touched, and cut as views."""
    samples = [kinds[place % len(kinds)] for place in range(sum(sizes))]
    batch, layout = collate(samples), read_layout(Known(kinds, collate))
    assert layout.samples(batch) == len(samples)
    owned = set(storages(batch))
    for stop, size in zip(accumulate(sizes), sizes):
        chunk = layout.cut(batch, stop - size, stop)
        assert same(chunk, collate.part(samples, stop - size, stop))
        assert owned.issuperset(storages(chunk))
    assert same(batch, collate(samples))


def storages(node: Any) -> Iterator[int]:
    if isinstance(node, torch.Tensor):
        yield node.untyped_storage().data_ptr()
    for _, child in open_container(node) or ():
        yield from storages(child)
