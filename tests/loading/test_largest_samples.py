"""Which samples are looked at, and which of them are kept."""

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_ga.batch.layout import elements
from lightning_ga.loading.largest_samples import SAMPLES_KEPT, Largest, ScanOrder, largest_samples


def scan_order(size: int) -> ScanOrder:
    return ScanOrder(DataLoader(range(size)), range(size), size)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [64, 640, 4096, 50_000, 2**20])
def test_the_first_of_the_first_scan_meet_what_is_regular(size: int) -> None:
    for distance in (2, 3, 4):
        assert {index % distance for index in scan_order(size).first.read(24)[1:]} == set(range(distance))


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


def test_the_largest_of_every_field_comes_first() -> None:
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
    samples = tensors(*range(1, 1001))
    loader = DataLoader(samples, num_workers=workers)  # type: ignore[arg-type]
    worst = largest_samples(loader, ScanOrder(loader, range(1000), 1000))
    assert [len(sample) for sample in worst.by_weight] == list(range(1000, 1000 - SAMPLES_KEPT, -1))
    assert (worst.seen, worst.complete) == (1000, True)


def test_text_counts_only_where_it_is_made_into_tensors() -> None:
    samples = [(torch.ones(3), "x" * (n % 7)) for n in range(500)]
    loader = DataLoader(samples)  # type: ignore[arg-type]
    looks = ScanOrder(loader, range(500), 500)
    assert largest_samples(loader, looks).seen == len(looks.first)
    own = DataLoader(samples, collate_fn=lambda batch: [text for _, text in batch])  # type: ignore[arg-type]
    assert largest_samples(own, looks).seen == 500
