"""Metrics that are given a batch in pieces end as if they had been given the batch."""

from typing import Any

import pytest
import torch
import torchmetrics

from lightning_ga.fit.batch_metrics import whole_batch_metrics


class Custom(torchmetrics.Metric):
    """``full_state_update`` is as given, ``None`` where users leave it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: torch.Tensor) -> None:
        self.total += values.sum()  # in place
        self.values.append(values)

    def compute(self) -> torch.Tensor:
        return self.total + torch.cat(self.values).median()


class Added(Custom):
    full_state_update = False


class Full(Custom):
    full_state_update = True


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in (8, 8, 5)]


@pytest.mark.parametrize("kind", [Custom, Added, Full])
@pytest.mark.parametrize("sizes", [3, 8])
def test_a_metric_sees_one_batch(kind: Any, sizes: int) -> None:
    """The value of the batch, that of all so far, and the count of updates; states are copied before each piece."""
    ours, theirs = kind(), kind()
    for batch in batches():
        theirs(batch)
        with whole_batch_metrics([ours], lambda: (2, 2)):
            for piece in batch.split(sizes):
                assert ours(piece) == kind()(piece)
        torch.testing.assert_close(ours._forward_cache, theirs._forward_cache)
        torch.testing.assert_close(ours.compute(), theirs.compute())
        assert ours._update_count == theirs._update_count
        assert "forward" not in vars(ours)


@pytest.mark.parametrize("kind", [Custom, Added, Full])
def test_a_metric_that_is_reset_between_pieces_begins_anew(kind: Any) -> None:
    """Its value is that of the pieces since then, as it is without pieces."""
    ours, theirs = kind(), kind()
    first, second, third = batches()[0].split(3)
    ours(torch.ones(4))
    with whole_batch_metrics([ours], lambda: (2, 2)):
        ours(first)
        ours.reset()
        assert ours(second) == kind()(second)
        ours(third)
    theirs(torch.cat([second, third]))
    torch.testing.assert_close(ours.compute(), theirs.compute())


def test_a_mean_of_losses_weighs_a_piece_by_its_share() -> None:
    """If it is one number without a weight of its own; so do the pieces of a wrapped mean."""
    for mean in (torchmetrics.MeanMetric(), torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())):
        samples = iter([(3, 4), (1, 4)])
        metrics = [part for part in mean.modules() if isinstance(part, torchmetrics.Metric)]
        with whole_batch_metrics(metrics, lambda samples=samples: next(samples)):
            mean.update(torch.tensor(1.0))
            mean.update(torch.tensor(5.0))
        value = mean.compute()
        assert (value["raw"] if isinstance(value, dict) else value) == 2
    mean = torchmetrics.MeanMetric()
    with whole_batch_metrics([mean], lambda: (2, 4)):
        mean.update(torch.tensor([1.0, 2.0]))
        mean.update(torch.tensor(3.0), 7.0)
    assert mean.compute() == (1 + 2 + 3 * 7) / 9
    assert "update" in vars(mean)  # torchmetrics' own
