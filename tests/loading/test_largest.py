"""Which samples are looked at, and which of them are kept."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

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
