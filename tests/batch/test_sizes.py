"""The shape of every field of a sample, and the length of a batch, whatever holds it."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_ga.batch.layout import elements, length_of_first


@dataclass
class Record:
    image: torch.Tensor
    label: int


class Ring:
    """Holds what holds it."""

    def __init__(self) -> None:
        self.data, self.ring = torch.zeros(3), self


Pair = namedtuple("Pair", "inputs lengths")


@pytest.mark.parametrize(
    ("sample", "count"),
    [
        (torch.zeros(3, 4), 12),
        (torch.zeros(()), 1),
        (torch.eye(4).to_sparse(), 4),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), 5),
        (np.zeros((2, 5)), 10),
        (np.float32(1), 1),
        (Image.new("RGB", (7, 5)), 35),
        ("text", 4),
        ([[1, 2, 3], [4]], 4),
        ({1, 2}, 2),
        ([], 0),
        (None, 1),
        (Pair(torch.zeros(4), 2), 5),
        (Record(torch.zeros(2, 2), 1), 5),
        (SimpleNamespace(x=torch.zeros(6)), 6),
        (UserDict(ids=[1, 2]), 2),
        ({"a": {"b": [torch.zeros(2)] * 20}}, 40),
        (Ring(), 3),
    ],
)
def test_elements_of_a_sample_are_counted(sample: Any, count: int) -> None:
    assert elements(sample) == count


class Graphs:
    """As a batch of torch_geometric."""

    num_graphs = 4
    nodes = torch.zeros(8)

    def to_data_list(self) -> Any:
        raise AssertionError("it need not be cut")

    from_data_list = to_data_list


Sized = namedtuple("Sized", "size inputs")


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.zeros(8, 3), 8),
        ({"scale": 0.5, "x": [torch.zeros(8, 3), torch.zeros(2)]}, 8),
        (Sized((224, 224), torch.zeros(8)), 8),
        (SimpleNamespace(t=torch.tensor(1.0), x=torch.zeros(8)), 8),
        (["a", "b", "c"], 3),
        (Graphs(), 4),
    ],
)
def test_the_first_tensor_tells_how_long_a_batch_is(batch: Any, length: int) -> None:
    assert length_of_first(batch) == length
