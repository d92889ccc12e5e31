"""Batches are counted by their layout; what is not laid out so is refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_ga.batch.layout import Layout, LayoutError, SampleAxis, SampleCount, Samples
from lightning_ga.split import FlattenedBatch

PACKED = pack_sequence([torch.ones(5, 2), torch.ones(3, 2)])
ROW = FlattenedBatch(position_ids=torch.tensor([[0, 1, 0, 0, 1]]))
JAGGED = torch.nested.nested_tensor_from_jagged(torch.ones(10, 3), offsets=torch.tensor([0, 2, 6, 7, 10]))
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


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"id": torch.tensor(3), "deep": [(torch.zeros(4, 2), torch.zeros(9))]}, 4),
        (SimpleNamespace(x=np.zeros((5, 2))), 5),
        ([PACKED, torch.zeros(8)], 2),
        (ROW, 3),
        ({"x": JAGGED}, 4),
        (["a", "b"], 2),
    ],
)
def test_samples_are_those_of_the_first_tensor(batch: Any, samples: int) -> None:
    assert Samples()(batch) == samples


def test_what_has_no_samples_is_refused_with_the_way_out() -> None:
    with pytest.raises(LayoutError, match=r"How many samples a dict has is not known: call .*register_splitter"):
        Samples()({"x": "a"})


@pytest.mark.parametrize("count", [4, 4.0, np.int64(4), np.array(4), torch.tensor(4)])
def test_a_number_of_samples_is_that_of_the_part(count: Any) -> None:
    """Of the same type, an array of no axes included."""
    layout = Layout({"batch": "fields", "batch[0]": SampleAxis(), "batch[1]": SampleCount()})
    _, found = layout.cut((torch.zeros(4), count), 1, 3)
    assert type(found) is type(count)
    assert found == 2
    assert getattr(found, "shape", ()) == ()
