"""The shape of every field of a sample, whatever holds it."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_ga.batch.sizes import elements, leaves


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
        ([1, 2, 3], 3),
        ([[1, 2, 3], [4]], 4),
        ({1, 2}, 2),
        ([], 0),
        (None, 1),
        (Pair(torch.zeros(4), 2), 5),
        (Record(torch.zeros(2, 2), 1), 5),
        (SimpleNamespace(x=torch.zeros(6)), 6),
        (UserDict(ids=[1, 2]), 2),
        ({"a": {"b": [torch.zeros(2), torch.zeros(3)]}}, 5),
        ([torch.zeros(2)] * 20, 40),
        (Ring(), 3),
    ],
)
def test_elements_of_a_sample_are_counted(sample: Any, count: int) -> None:
    assert elements(sample) == count


def test_fields_are_named_by_where_they_are() -> None:
    """Items far down a sequence are one field: there may be any number of them."""
    fields = [field for field, _ in leaves([torch.zeros(n) for n in range(1, 30)])]
    assert len(fields) == 29
    assert len(set(fields)) == 9


def test_text_may_be_left_out() -> None:
    assert list(leaves({"path": "x.png"}, text=False)) == [(("path",), ())]
