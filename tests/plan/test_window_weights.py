"""Weights, against the mean over the window taken in one go."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ga.errors import UserError
from lightning_ga.plan.item_counters import AttentionMaskTokens, TargetTokens, count_items
from lightning_ga.plan.window_weights import WindowWeights

# The counts of a window: one list per rank, all of the same length.
COUNTS = st.tuples(st.integers(1, 5), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 60), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


def gradient_of(count: int, place: int) -> torch.Tensor:
    """The gradients of ``count`` samples, one a row: a function of the place alone."""
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(place), dtype=torch.float64)


def means_and_all(counts: list[list[int]]) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """The mean gradient of each micro-batch, as its loss gives it, and that of all samples."""
    samples = [[gradient_of(n, 10 * rank + i) for i, n in enumerate(row)] for rank, row in enumerate(counts)]
    means = [[g.mean(0) if len(g) else torch.zeros(3, dtype=torch.float64) for g in row] for row in samples]
    return means, torch.cat([g for row in samples for g in row]).mean(0)


def seen_by_the_optimizer(means: list[list[torch.Tensor]], weights: list[list[float]], factor: int) -> torch.Tensor:
    """What Lightning and data parallelism make of it: losses ÷ factor, gradients averaged over ranks."""
    ranks = [sum(w * g / factor for w, g in zip(*row)) for row in zip(weights, means)]
    return torch.stack(ranks).mean(0)  # type: ignore[arg-type]


@given(COUNTS.filter(lambda counts: sum(map(sum, counts)) > 0), st.integers(0, 3))
def test_known_weights_give_the_mean_over_the_window(counts: list[list[int]], missing: int) -> None:
    means, whole = means_and_all(counts)
    factor, window, world_size = len(counts[0]) + missing, sum(map(sum, counts)), len(counts)
    known = WindowWeights(world_size)

    def weight(count: int) -> float:
        known.weigh_known(count, planned=count, window=window, factor=factor, first=True)
        return known.weight

    weights = [[*map(weight, row)] for row in counts]
    torch.testing.assert_close(seen_by_the_optimizer(means, weights, factor), whole, rtol=1e-12, atol=1e-14)


def test_each_window_knows_whether_samples_may_be_dropped() -> None:
    """Data that are loaded again may have another collate function: of 16 planned samples, 12 are left."""
    known = WindowWeights(2, sum_over_ranks=lambda count: 2 * count)
    scales = []
    for counts, may_differ in (((4, 4), False), ((4, 2), True), ((4, 4), False)):
        for number, count in enumerate(counts):
            known.weigh_known(count, planned=4, window=16, factor=2, first=number == 0, count_may_differ=may_differ)
            known.reach()
        scales.append(known.close())
    assert scales == [1.0, 16 / 12, 1.0]


@pytest.mark.parametrize(
    ("found", "words"), [(None, "a NoneType"), ([3, 4], "a list"), (torch.ones(2, 3), r"a Tensor of shape \(2, 3\)")]
)
def test_a_count_that_is_no_number_is_refused(found: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"normalize returned {words} for a batch: it has to return one number"):
        count_items(lambda batch: found, None)
    assert count_items(torch.sum, torch.ones(2, 3)) == 6.0


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf")])
def test_a_count_that_is_no_finite_number_of_items_is_refused(count: float) -> None:
    """Whether the count of the window is known before its end or not."""
    weights = WindowWeights()
    with pytest.raises(UserError, match=f"normalize counted {count} in a micro-batch"):
        weights.weigh_late(count, factor=1, first=True)
    with pytest.raises(UserError, match=f"normalize counted {count} in a micro-batch"):
        weights.weigh_known(count, planned=count, window=8.0, factor=1, first=True)


def test_a_window_that_counts_nothing_is_refused() -> None:
    late = WindowWeights()
    late.weigh_late(0.0, factor=1, first=True)
    late.reach()
    with pytest.raises(UserError, match=r"normalize counted 0 in all micro-batches.*ignore_index"):
        late.close()


LABELS = torch.tensor([[5, 7, -100], [8, -100, -100]])


def nested(layout: torch.layout) -> torch.Tensor:
    rows = [torch.tensor([-100, 7]), torch.tensor([5, 8, -100])]
    with warnings.catch_warnings(action="ignore"):  # a prototype, says PyTorch
        return torch.nested.nested_tensor(rows, layout=layout)


@pytest.mark.parametrize(
    ("counter", "batch", "expected"),
    [
        (TargetTokens(), {"labels": LABELS}, 3),
        (TargetTokens(shift=True), {"labels": LABELS}, 1),
        (TargetTokens(key=1, ignore_index=8), (None, LABELS), 5),
        (TargetTokens(), SimpleNamespace(labels=LABELS), 3),
        (AttentionMaskTokens(), {"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, 3),
        (AttentionMaskTokens(key=0), [torch.tensor([[True, False]])], 1),
        (AttentionMaskTokens(), {"attention_mask": torch.ones(3001, dtype=torch.bfloat16)}, 3001),
        (TargetTokens(), {"labels": LABELS.numpy()}, 3),
        (TargetTokens(shift=True), {"labels": LABELS.numpy()}, 1),
        (TargetTokens(), {"labels": nested(torch.jagged)}, 3),
        (TargetTokens(shift=True), {"labels": nested(torch.jagged)}, 2),
        (TargetTokens(shift=True), {"labels": nested(torch.strided)}, 2),
    ],
)
def test_counters_count_what_a_loss_is_a_mean_over(counter: Any, batch: Any, expected: int) -> None:
    assert counter(batch) == expected


@pytest.mark.parametrize(
    ("counter", "batch", "message"),
    [
        (TargetTokens(), {"target": LABELS, "input_ids": LABELS}, r"'labels' in a dict with the keys \['input_ids'"),
        (TargetTokens(key=2), (LABELS, LABELS), "looks for 2 in a tuple: give the right key"),
    ],
)
def test_what_cannot_be_counted_is_refused_with_the_way_out(counter: Any, batch: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        counter(batch)


@given(COUNTS.filter(lambda counts: sum(map(sum, counts)) > 0), st.sampled_from([1.0, 7.0, 64.0]), st.integers(0, 3))
def test_late_weights_give_the_mean_once_the_window_is_over(counts, reference, missing):
    """Counts that are known only as they come: gradients are scaled once, by the counts of all ranks."""
    factor, world_size = len(counts[0]) + missing, len(counts)
    means, whole = means_and_all(counts)
    weights, scales = [], []
    for rank, row in enumerate(counts):
        own = factor + rank  # a rank that has run its window again has more micro-batches than the others
        asked: list[float] = []

        def sum_over_ranks(value: float, asked: list[float] = asked) -> float:
            asked.append(value)
            return float(sum(map(sum, counts)))

        window = WindowWeights(world_size, sum_over_ranks=sum_over_ranks, reference=reference)
        weights.append([])
        for i, n in enumerate(row):
            window.weigh_late(n, factor=own, first=i == 0)
            window.reach()
            weights[-1].append(window.weight * factor / own)
        scales.append(window.close())
        assert asked == [sum(row)]  # one number a window
    assert len(set(scales)) == 1
    torch.testing.assert_close(seen_by_the_optimizer(means, weights, factor) * scales[0], whole, rtol=1e-12, atol=1e-14)


def test_a_late_window_leaves_skipped_micro_batches_out() -> None:
    late = WindowWeights(world_size=1, reference=4.0)
    late.weigh_late(8, factor=2, first=True)
    assert late.weight == 4.0
    late.reach()
    late.weigh_late(100, factor=2, first=False)
    assert late.close() == 4.0 / 8
    late.weigh_late(5, factor=2, first=True)
    assert late.close() == 1.0


def test_a_window_of_which_all_is_left_out_is_zero_and_no_error() -> None:
    """Also if tokens are counted; one that counts nothing by itself is refused."""
    for leaves_out in (True, False):
        late = WindowWeights()
        for number in range(2):
            late.weigh_late(5.0 if leaves_out else 0.0, factor=2, first=number == 0)
            if leaves_out:
                late.leave_out()
            late.reach()
        if leaves_out:
            assert (late.weight, late.close()) == (0.0, 1.0)
        else:
            with pytest.raises(UserError, match="counted 0 in all"):
                late.close()


def test_ranks_have_one_reference_whatever_their_factors() -> None:
    references = set()
    for factor in (2, 4):
        late = WindowWeights(world_size=2, sum_over_ranks=lambda _: 32.0)
        late.weigh_late(8 / factor, factor=factor, first=True)
        references.add(late.reference)
    assert len(references) == 1
