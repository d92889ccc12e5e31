"""Batches that come ready-made are read where a single reading is possible; all others are refused."""

from typing import Any

import pytest
import torch

from lightning_ga.batch.layout import LayoutError, SampleAxis
from lightning_ga.batch.ready_made import read_ready_made

WAY_OUT = r"define split_batch\(self, batch, sizes\) on the LightningModule"


class Unknown:
    """Something that says nothing of samples."""


def ready(*batches: Any) -> dict[str, Any]:
    return dict(read_ready_made(batches).roles)


Z = torch.zeros


def test_a_ready_made_batch_is_read_where_all_its_parts_agree() -> None:
    """On one number, which each has along one axis."""
    assert ready([Z(8, 7), Z(8)]) == {"batch": "fields", "batch[0]": SampleAxis(0), "batch[1]": SampleAxis(0)}
    roles = ready({"x": Z(8, 7), "names": list("abcdefgh"), "split": "train", "none": None, "scale": torch.tensor(1.0)})
    assert roles["batch['names']"] == SampleAxis(0)
    assert roles["batch['split']"] == roles["batch['scale']"] == "constant"
    assert ready(Z(8)) == {"batch": SampleAxis(0)}
    assert ready([Z(8, 1), Z(8)])["batch[0]"] == SampleAxis(0)


def test_ready_made_batches_of_two_sizes_tell_what_is_shared() -> None:
    """What does not change with them."""
    assert ready((Z(8, 7), Z(8), Z(10)), (Z(4, 7), Z(4), Z(10))) == {
        "batch": "fields",
        "batch[0]": SampleAxis(0),
        "batch[1]": SampleAxis(0),
        "batch[2]": "shared",
    }
    assert ready((Z(5, 8, 3), Z(8)), (Z(6, 4, 3), Z(4)))["batch[0]"] == SampleAxis(1)
    for two in [
        ((Z(8, 7), Z(7)), (Z(4, 7), Z(7))),
        (Z(8, 7), Z(4, 7)),
        (Z(8, 7), Z(8, 5)),
        ((Z(8, 7), Z(8)), (Z(8, 5), Z(8))),
    ]:
        with pytest.raises(LayoutError, match="no reading or for several"):
            ready(*two)


AMBIGUOUS: dict[str, list[Any]] = {
    "two axes": [Z(8, 7)],
    "a square": [[Z(8, 8), Z(8)]],
    "two lengths": [(Z(8, 5), Z(10))],
    "nodes and graphs": [{"nodes": Z(40, 16), "y": Z(4)}],
    "a shared vector in batches of one size": [(Z(8, 5), Z(8), Z(10)), (Z(8, 5), Z(8), Z(10))],
    "a size beside two samples": [{"x": Z(2, 3), "size": (224, 224)}],
    "one sample": [(Z(1, 7), Z(1, 7))],
    "both axes change": [Z(8, 7), Z(4, 6)],
    "other fields": [{"x": Z(8)}, {"y": Z(4)}],
    "images of unequal sizes": [[Z(3, 9, 5), Z(3, 9, 6)]],
    "nothing with a length": [{"loss": torch.tensor(1.0), "name": "a"}],
    "nothing": [{}],
    "a text": ["text"],
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_ready_made_batch_is_refused(name: str) -> None:
    """With its shapes and the way out."""
    with pytest.raises(LayoutError, match=rf"comes ready-made and its parts \(.+\) allow for no reading .*{WAY_OUT}"):
        read_ready_made(AMBIGUOUS[name])


def test_a_ready_made_batch_of_an_unknown_type_is_refused() -> None:
    """As any other."""
    with pytest.raises(LayoutError, match=r"batch\[1\] is of the type Unknown.*register_splitter"):
        read_ready_made([(Z(8), Unknown())])
