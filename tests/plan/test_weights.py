"""Weights, against the mean over the window taken in one go."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from window_counts import COUNTS, means_and_all, seen_by_the_optimizer

from lightning_ga.errors import UserError
from lightning_ga.plan.weights import (
    AttentionMaskTokens,
    Samples,
    TargetTokens,
    count_items,
    known_weight,
)


@settings(deadline=None)
@given(COUNTS.filter(lambda counts: sum(map(sum, counts)) > 0), st.integers(0, 3))
def test_known_weights_give_the_mean_over_the_window(counts: list[list[int]], missing: int) -> None:
    """Whatever the counts are, empty chunks and a ragged window of fewer chunks than the factor included."""
    means, whole = means_and_all(counts)
    factor, window, world_size = len(counts[0]) + missing, sum(map(sum, counts)), len(counts)
    weights = [[known_weight(n, window, factor=factor, world_size=world_size) for n in row] for row in counts]
    torch.testing.assert_close(seen_by_the_optimizer(means, weights, factor), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("found", "words"), [(None, "a NoneType"), ([3, 4], "a list"), (torch.ones(2, 3), r"a Tensor of shape \(2, 3\)")]
)
def test_a_count_that_is_no_number_is_refused(found: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"normalize returned {words} for a batch: it has to return one number"):
        count_items(lambda batch: found, None)
    assert count_items(torch.sum, torch.ones(2, 3)) == 6.0


def test_a_batch_without_tensors_has_no_samples_to_count() -> None:
    with pytest.raises(UserError, match=r"normalize=Samples\(\) finds no tensor in a list: give a callable"):
        Samples()(["a", "b"])


LABELS = torch.tensor([[5, 7, -100], [8, -100, -100]])


@pytest.mark.parametrize(
    ("counter", "batch", "expected"),
    [
        (TargetTokens(), {"labels": LABELS}, 3),
        (TargetTokens(shift=True), {"labels": LABELS}, 1),
        (TargetTokens(key=1, ignore_index=8), (None, LABELS), 5),
        (TargetTokens(), SimpleNamespace(labels=LABELS), 3),
        (AttentionMaskTokens(), {"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, 3),
        (AttentionMaskTokens(key=0), [torch.tensor([[True, False]])], 1),
        (Samples(), {"id": torch.tensor(3), "deep": [(torch.zeros(4, 2), torch.zeros(9))]}, 4),
    ],
)
def test_counters_count_what_a_loss_is_a_mean_over(counter: Any, batch: Any, expected: int) -> None:
    """In a mapping, a sequence or an object; a shifted loss leaves the first token of each sequence out."""
    assert counter(batch) == expected


def test_a_shifted_count_is_that_of_a_shifted_loss() -> None:
    """The oracle is the loss itself: its sum is its mean times the count."""
    labels = torch.tensor([[5, 7, -100, 1], [-100, 2, 3, -100]])
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))
    logits, targets = logits[:, :-1].reshape(-1, 9), labels[:, 1:].reshape(-1)
    total, mean = (torch.nn.functional.cross_entropy(logits, targets, reduction=way) for way in ("sum", "mean"))
    assert TargetTokens(shift=True)({"labels": labels}) == round(float(total / mean))


def test_a_wrong_key_is_refused_with_the_keys_there_are() -> None:
    """The way out is in the message."""
    with pytest.raises(
        UserError, match=r"'labels' in a dict with the keys \['input_ids', 'target'\]: give the right key"
    ):
        TargetTokens()({"target": LABELS, "input_ids": LABELS})
    with pytest.raises(UserError, match="looks for 2 in a tuple"):
        TargetTokens(key=2)((LABELS, LABELS))
