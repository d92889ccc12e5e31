"""What pieces log becomes what the whole batch would have logged."""

from typing import Any

import pytest
import torch

from lightning_ga.compat.logs import LogBuffer


def logged(*pieces: tuple[float, int, list[tuple[str, Any, dict[str, Any]]]]) -> list[tuple[str, Any, dict[str, Any]]]:
    """Calls of ``log`` after these pieces: weight, samples, and what each logged."""
    ledger, calls = LogBuffer(), []
    for weight, samples, entries in pieces:
        ledger.begin_piece(weight, samples)
        for name, value, settings in entries:
            ledger.note("training_step", name, torch.tensor(value), **settings)
    ledger.replay(lambda fx, name, value, **settings: calls.append((name, value.item(), settings)))
    return calls


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        *((name, 2.5) for name in ("mean", "avg", torch.mean)),
        *((name, 6.0) for name in ("sum", "SUM", torch.sum, sum)),
        *((name, 4.0) for name in ("max", torch.max, max)),
        *((name, 2.0) for name in ("min", torch.min, min)),
    ],
)
def test_values_are_merged_as_they_are_reduced(reduce_fx: Any, expected: float) -> None:
    settings = {"reduce_fx": reduce_fx}
    ((_, value, kept),) = logged((3.0, 3, [("a", 2.0, settings)]), (1.0, 1, [("a", 4.0, settings)]))
    assert value == expected
    assert kept == settings


@pytest.mark.parametrize(
    ("sizes", "samples", "size", "value"),
    [
        ((3, 1), (3, 1), 4, 2.4),  # samples: weighed as the loss, here by 8 and 2 tokens
        ((12, 2), (3, 1), 14, 2 + 2 * 2 / 14),  # a count of something else
        ((4, 4), (3, 1), 4, 2.4),  # a constant: the pieces differ, it does not
        ((4, 4), (2, 2), 4, 2.4),  # a constant: the size of the batch
        ((1, 1), (2, 2), 1, 2.4),  # a constant: one
        ((2, 2), (2, 2), 4, 2.4),
        ((1, 1), (1, 1), 2, 2.4),
        ((6, 6), (2, 2), 12, 3.0),
    ],
)
def test_batch_sizes_that_count_add_up_and_constants_stay(sizes, samples, size, value):
    parts = [("a", number, {"batch_size": given}) for number, given in zip((2.0, 4.0), sizes)]
    ((_, merged, kept),) = logged((8.0, samples[0], parts[:1]), (2.0, samples[1], parts[1:]))
    assert merged == pytest.approx(value)
    assert kept == {"batch_size": size}


def test_names_stay_apart_and_in_order() -> None:
    first = [("a", 1.0, {}), ("a", 3.0, {}), ("b", 5.0, {})]
    calls = logged((1.0, 1, first), (1.0, 1, [*first[:2], ("c", 7.0, {})]))
    assert [(name, value) for name, value, _ in calls] == [("a", 1.0), ("a", 3.0), ("b", 5.0), ("c", 7.0)]
