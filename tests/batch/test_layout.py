"""Batches are counted by their layout; what is not laid out so is refused."""

from typing import Any

import pytest
import torch

from lightning_ga.batch.layout import Layout, LayoutError, SampleAxis

KNOWN = Layout({"batch": "fields", "batch['x']": SampleAxis(0), "batch['y']": SampleAxis(1), "batch['n']": "constant"})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(5), "y": torch.zeros(2, 3)}, r"batch\['x'\] has 5 of them and batch\['y'\] has 3: define"),
        (
            {"x": torch.zeros(5), "y": torch.zeros(5)},
            r"batch\['y'\] is of another kind .*\(now Tensor and the shape \(5,",
        ),
        ({"x": 7}, r"batch\['x'\] is of another kind .* \(now int\)"),
        ({"x": torch.zeros(5), "n": torch.zeros(5)}, r"batch\['n'\] is of another kind"),
        ({"x": torch.zeros(5), "z": torch.zeros(5)}, r"batch\['z'\] is of another kind"),
        (torch.zeros(5), "batch is of another kind"),
        ({}, "nothing in it grows with them"),
        ({"x": None}, "nothing in it grows with them"),
    ],
)
def test_a_later_batch_of_another_kind_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        KNOWN.samples(batch)
