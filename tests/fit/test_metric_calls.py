"""Calls of a metric by pieces are made again with what all pieces gave it."""

from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torchmetrics.wrappers import MinMaxMetric, Running

from lightning_ga.errors import ExactnessWarning
from lightning_ga.fit.batch_metrics import whole_batch_metrics
from lightning_ga.fit.metric_calls import Call
from lightning_ga.fit.piece_buffer import PieceBuffer


class Noting(torchmetrics.MeanMetric):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def update(self, value: Any) -> None:
        self.given.append(value)


class Overwriting(Noting):
    """Works in what it is given."""

    def update(self, value: Any) -> None:
        super().update(value)
        value.zero_()


def call(metric: Any, *pieces: Any, samples: tuple[int, ...] = (3, 1)) -> Any:
    """Update a metric with a batch in pieces; return it."""
    calls = PieceBuffer[Call]()
    with whole_batch_metrics([metric], calls=calls):
        for piece, size in zip(pieces, samples):
            metric.update(piece)
            calls.keep(size, size)
    return metric


def seen(*pieces: Any) -> Any:
    """Return what a metric is given of a batch in pieces."""
    (given,) = call(Noting(), *pieces).given
    return given


def test_rows_are_joined_and_numbers_averaged() -> None:
    """In whatever they lie; what is the same for all pieces stays."""
    rows, more = torch.arange(3.0), torch.arange(1.0)
    torch.testing.assert_close(seen(rows, more), torch.tensor([0.0, 1.0, 2.0, 0.0]))
    torch.testing.assert_close(seen(torch.tensor(1.0), torch.tensor(5.0)), torch.tensor(2.0))
    torch.testing.assert_close(seen(1.0, 5.0), torch.tensor(2.0))
    assert seen({"a": ["x", "y", "z"], "b": None}, {"a": ["w"], "b": None}) == {"a": ["x", "y", "z", "w"], "b": None}
    np.testing.assert_array_equal(seen(np.zeros((3, 2)), np.ones((1, 2))), [[0, 0], [0, 0], [0, 0], [1, 1]])


def test_a_mean_that_is_told_its_weights_adds_up_by_itself() -> None:
    """The weights of the pieces are those of the batch."""
    metric, calls = torchmetrics.MeanMetric(), PieceBuffer[Call]()
    with whole_batch_metrics([metric], calls=calls):
        for value, size in ((1.0, 3), (5.0, 1)):
            metric.update(value, weight=size)
            calls.keep(size, size)
    assert (metric.compute(), metric.weight) == (2.0, 4.0)


def test_a_running_sum_adds_numbers_up() -> None:
    """A reset in the middle of a training happens at its place."""
    metric, calls = Running(torchmetrics.SumMetric(), window=2), PieceBuffer[Call]()
    metric(7.0)
    with whole_batch_metrics([metric], calls=calls):
        for value, size in ((1.0, 3), (5.0, 1)):
            if value == 1.0:
                metric.reset()
            metric(value)
            calls.keep(size, size)
    assert (metric.compute(), metric._num_vals_seen) == (6.0, 1)


def test_what_cannot_be_put_together_is_said() -> None:
    """The metric has seen pieces then; its methods are its own again."""
    metric = Noting()
    with pytest.warns(ExactnessWarning, match="Noting cannot be put together"):
        call(metric, torch.zeros(3, 2), torch.zeros(1, 4))
    assert len(metric.given) == 2
    assert not {"forward", "reset"} & vars(metric).keys()


def test_calls_for_each_sample_stay_as_they_are() -> None:
    """They are the same in pieces: to join the first of each piece would lose samples."""
    metric, calls = torchmetrics.CatMetric(), PieceBuffer[Call]()
    with whole_batch_metrics([metric], calls=calls):
        for piece in ((1.0, 2.0, 3.0), (4.0, 5.0)):
            for value in piece:
                metric(value)
            calls.keep(len(piece), len(piece))
    assert metric.compute().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_was_written_to_is_not_given_again() -> None:
    with pytest.warns(ExactnessWarning, match="was written to"):
        metric = call(Overwriting(), torch.ones(3), torch.ones(1))
    assert len(metric.given) == 2


def test_what_is_large_is_not_kept() -> None:
    metric = Noting()
    with pytest.warns(ExactnessWarning, match="too large"):
        call(metric, torch.zeros(3, 2**21), torch.zeros(1, 2**21))
    assert len(metric.given) == 2


def test_a_metric_that_is_called_beside_its_wrapper_sees_whole_batches() -> None:
    """Its wrapper sees pieces then, as to call that again would call the metric once more."""
    metric = torchmetrics.MeanSquaredError()
    both, calls = [metric, MinMaxMetric(metric)], PieceBuffer[Call]()
    predicted, targets = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    with whole_batch_metrics(both, calls=calls):
        for piece in (slice(0, 2), slice(2, 3)):
            metric(predicted[piece], targets[piece])
            calls.keep(2, 2)
    assert metric._forward_cache == pytest.approx(14 / 3)


def test_two_calls_of_a_batch_are_merged_though_a_piece_has_two_samples() -> None:
    """Only where every piece has a call for each of its samples may these be calls by sample."""
    metric, calls = torchmetrics.MeanMetric(), PieceBuffer[Call]()
    with whole_batch_metrics([metric], calls=calls):
        for value, size in ((1.0, 3), (4.0, 2)):
            metric.update(value)
            metric.update(2 * value)
            calls.keep(size, size)
    assert (metric.compute(), metric.weight) == (pytest.approx((2.2 + 4.4) / 2), 2.0)
