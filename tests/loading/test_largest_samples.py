"""Which samples are looked at, and which of them are kept."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ga.batch.sizes import elements
from lightning_ga.loading.largest_samples import (
    SAMPLES_AT_ONCE,
    SAMPLES_KEPT,
    Largest,
    ScanOrder,
    largest_samples,
)
from lightning_ga.loading.samples import FirstSamples


def scan_order(size: int) -> ScanOrder:
    return ScanOrder(DataLoader(range(size)), range(size), size)  # type: ignore[arg-type]


@given(st.integers(1, 5000))
def test_all_samples_are_looked_at_once(size: int) -> None:
    """The first look is small, and holds the first and the last."""
    looks = scan_order(size)
    first = looks.first.read()
    assert {0, size - 1} <= set(first)
    assert len(first) <= SAMPLES_AT_ONCE + 1
    assert sorted([*first, *(index for look in looks.rest() for index in look)]) == list(range(size))


def test_looks_that_are_cut_short_are_spread_over_all_samples() -> None:
    """A few of them leave no large gap, wherever they end."""
    looks = scan_order(100_000)
    rest = looks.rest()
    seen = sorted([*looks.first.read(), *(index for _ in range(20) for index in next(rest))])
    assert max(b - a for a, b in pairwise(seen)) < 300


@pytest.mark.parametrize("size", [64, 640, 4096, 50_000, 2**20])
def test_the_first_of_the_first_scan_meet_what_is_regular(size: int) -> None:
    """Every second sample may lack a label, every fourth be of one class: these are not hidden from the check."""
    for distance in (2, 3, 4):
        assert {index % distance for index in scan_order(size).first.read(24)[1:]} == set(range(distance))


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_read_is_not_read_again(stream: bool) -> None:
    """A stream is, from its start, as it cannot go on in a copy."""
    read: list[int] = []

    class Noting(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    class NotingStream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return map(Noting().__getitem__, range(5))

    samples = FirstSamples(DataLoader(NotingStream() if stream else Noting()), [0, 1, 2, 3, 4])
    assert samples.read(2) == [0, 1]
    assert samples.read(3, most=4, seconds=60) == [0, 1, 2, 3]
    assert samples.read(1, most=3) == [0, 1, 2]
    assert read == ([0, 1, 0, 1, 2, 3] if stream else [0, 1, 2, 3])
    assert samples.read() == [0, 1, 2, 3, 4]


def test_time_bounds_the_samples_that_are_only_of_use() -> None:
    """Those that are needed are read however long it takes."""
    samples = FirstSamples(DataLoader(range(9)), list(range(9)))  # type: ignore[arg-type]
    assert samples.read(3, most=9, seconds=-1) == [0, 1, 2]


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_the_most_elements_are_kept(sizes: list[int]) -> None:
    """Whatever order they come in; of equal ones the first."""
    kept = Largest()
    samples = tensors(*sizes)
    for start in range(0, len(samples), 7):
        kept.see(samples[start : start + 7])
    expected = sorted(samples, key=len, reverse=True)[:SAMPLES_KEPT]
    assert [id(sample) for sample in kept.by_weight] == [id(sample) for sample in expected]
    assert kept.uniform == (len(set(sizes)) == 1)


def test_the_largest_of_every_field_comes_first() -> None:
    """As few samples as hold them all: one that is largest in two fields stands for both."""
    source, both = {"a": torch.ones(9), "b": torch.ones(1), "c": 1}, {"a": torch.ones(2), "b": torch.ones(5, 2), "c": 1}
    middle = [{"a": torch.ones(7), "b": torch.ones(4, 1), "c": n} for n in range(SAMPLES_KEPT)]
    kept = Largest()
    assert kept.see([source, *middle, both])[-1] is both
    assert {id(sample) for sample in kept.by_field[:2]} == {id(source), id(both)}
    assert len(kept.by_field) == len(kept.by_weight) == SAMPLES_KEPT + 1


def test_a_batch_is_the_larger_of_both_kinds() -> None:
    """Padded, with the longest of each field; packed, with the most elements."""
    samples = [(torch.ones(a), torch.ones(b)) for a, b in ((10, 1), (1, 10), (9, 9), (8, 8))]

    def padded(batch: list[Any]) -> Any:
        return [pad_sequence(list(field)) for field in zip(*batch)]

    def packed(batch: list[Any]) -> Any:
        return [torch.cat(field) for field in zip(*batch)]

    for collate, one, two in ((padded, 18, 40), (packed, 18, 34)):
        loader = DataLoader(samples, collate_fn=collate)  # type: ignore[arg-type]
        worst = largest_samples(loader, ScanOrder(loader, range(4), 4))
        assert (elements(worst.batch(loader, 1)), elements(worst.batch(loader, 2))) == (one, two)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_samples_are_looked_at_where_they_vary(workers: int) -> None:
    """In this process or in workers, which send only what is worth keeping."""
    samples = tensors(*range(1, 1001))
    loader = DataLoader(samples, num_workers=workers)  # type: ignore[arg-type]
    worst = largest_samples(loader, ScanOrder(loader, range(1000), 1000))
    assert [len(sample) for sample in worst.by_weight] == list(range(1000, 1000 - SAMPLES_KEPT, -1))
    assert (worst.seen, worst.complete) == (1000, True)


def test_text_counts_only_where_it_is_made_into_tensors() -> None:
    """The path of a picture is no reason to read all pictures."""
    samples = [(torch.ones(3), "x" * (n % 7)) for n in range(500)]
    loader = DataLoader(samples)  # type: ignore[arg-type]
    looks = ScanOrder(loader, range(500), 500)
    assert largest_samples(loader, looks).seen == len(looks.first)
    own = DataLoader(samples, collate_fn=lambda batch: [text for _, text in batch])  # type: ignore[arg-type]
    assert largest_samples(own, looks).seen == 500
