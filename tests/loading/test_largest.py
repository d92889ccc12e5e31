"""Which samples are looked at, and which of them are kept."""

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_ga.batch.layout import elements
from lightning_ga.loading.known_samples import KnownSamples
from lightning_ga.loading.largest import Largest


def test_a_batch_is_the_larger_of_both_kinds() -> None:
    """Padded, with the longest of each field; packed, with the most elements."""
    samples = [(torch.ones(a), torch.ones(b)) for a, b in ((10, 1), (1, 10), (9, 9), (8, 8))]

    def padded(batch: list[Any]) -> Any:
        return [pad_sequence(list(field)) for field in zip(*batch)]

    def packed(batch: list[Any]) -> Any:
        return [torch.cat(field) for field in zip(*batch)]

    for collate, one, two in ((padded, 18, 40), (packed, 18, 34)):
        loader = DataLoader(samples, collate_fn=collate)  # type: ignore[arg-type]
        worst = Largest(KnownSamples(loader))
        assert (elements(worst.batch(1)), elements(worst.batch(2))) == (one, two)


def test_text_counts_only_where_it_is_made_into_tensors() -> None:
    """Only data that vary in size are looked at further."""
    samples = [(torch.ones(3), "x" * (n % 7)) for n in range(500)]
    own = DataLoader(samples, collate_fn=lambda batch: [text for _, text in batch])  # type: ignore[arg-type]
    for loader, seen in ((DataLoader(samples), 64), (own, 500)):  # type: ignore[arg-type]
        largest = Largest(KnownSamples(loader))
        assert (largest.seen, largest.total, largest.complete) == (64, 500, seen == 64)
        largest.look_further()
        assert (largest.seen, largest.complete) == (seen, True)


@pytest.mark.parametrize("stand_in", [False, True])
@pytest.mark.parametrize(("is_kept", "longest"), [(lambda n: n % 4 == 0, 100), (lambda n: n <= 50, 50)])
def test_samples_that_collating_drops_are_not_among_the_largest(is_kept: Any, longest: int, stand_in: bool) -> None:
    """Neither some of them nor all, even where a batch of dropped samples is not empty; so no batch has too few."""
    samples = [torch.ones(1 + n) for n in range(100)]

    def collate(batch: list[Any]) -> Any:
        kept = [sample for sample in batch if is_kept(len(sample))]
        return pad_sequence(kept or [torch.zeros(9)] * stand_in, batch_first=True)

    loader = DataLoader(samples, 4, collate_fn=collate)  # type: ignore[arg-type]
    largest = Largest(KnownSamples(loader))
    for _ in range(2):
        rows, length = largest.batch(40).shape
        assert rows == 40
        assert longest - 3 <= length <= longest
        largest.look_further()


def test_one_sample_may_be_the_whole_batch() -> None:
    """Then no batch grows, and none of the samples is dropped."""
    samples = [torch.ones(1 + n) for n in range(100)]
    loader = DataLoader(samples, 4, collate_fn=lambda batch: batch[0])  # type: ignore[arg-type]
    assert Largest(KnownSamples(loader)).batch(4).shape == (100,)


class FailsAt(Dataset[Any]):
    """One sample cannot be read."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.number:
            raise OSError("no such file")
        return torch.ones(1 + index % 9)


def test_a_sample_that_cannot_be_read_ends_the_look() -> None:
    """Training meets the error, if it reads that sample."""
    loader = DataLoader(FailsAt(77), 4, collate_fn=lambda batch: pad_sequence(batch, batch_first=True))
    largest = Largest(KnownSamples(loader))
    largest.look_further()
    assert not largest.complete
    assert 64 <= largest.seen < 500
    assert largest.batch(4).shape == (4, 9)
