"""The cause of a difference follows from the numbers alone."""

import math

import pytest
import torch

from lightning_ga.fit.exactness.differences import Differences, compare, distance


@pytest.mark.parametrize(
    ("error", "summed", "best_weight", "best_error", "cause"),
    [
        (0.5, 0.0, -1e-17, 0.0, "weighted"),  # the first part holds padding only
        (0.5, 0.7, 2.0, 0.0, "coupled"),  # weights are not below zero
        (0.5, 0.7, 0.3, 0.4, "coupled"),
    ],
)
def test_the_cause_is_named(error: float, summed: float, best_weight: float, best_error: float, cause: str) -> None:
    assert Differences(error, summed, best_weight, best_error).cause(1e-6) == cause


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_the_weight_that_fits_best_is_found(dtype: torch.dtype) -> None:
    one, other = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = compare([0.3 * one + 0.7 * other], [one], [other], weight=0.5)
    assert found.best_weight == pytest.approx(0.3, abs=1e-2)
    assert found.best_error < 1e-2 < 0.1 < min(found.error, found.summed)


def test_gradients_that_cancel_are_compared_by_those_of_the_parts() -> None:
    """Near a minimum, rounding is left of the sum."""
    one = torch.tensor([1.0, -2.0])
    found = compare([torch.full((2,), 1e-7)], [one], [-one], weight=0.5)
    assert found.error < 1e-6


def test_a_distance_from_nothing_is_infinite() -> None:
    zero, one = [torch.zeros(2)], [torch.ones(2)]
    assert (distance(zero, zero), distance(zero, one), distance(one, zero)) == (0.0, math.inf, 1.0)
