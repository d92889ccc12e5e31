"""Neighbouring samples are taken out of one value of any type along any axis, as a view where that is possible."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from lightning_ga.batch.pytree import LayoutError
from lightning_ga.batch.take import take


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape)


class Boxes(torch.Tensor):
    """As in torchvision: operations return plain tensors."""

    canvas: tuple[int, int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_subclasses_keep_their_type_and_attributes() -> None:
    """What is drawn on which canvas, for example; a parameter becomes a view, as anywhere in torch."""
    boxes = numbers(2, 5).as_subclass(Boxes)
    boxes.canvas = (3, 4)
    ours = take(boxes, 1, 1, 3)
    assert type(ours) is Boxes
    assert ours.canvas == (3, 4)
    assert ours.tolist() == [[1, 2], [6, 7]]
    assert type(take(torch.nn.Parameter(torch.zeros(5)), 0, 1, 3)) is torch.Tensor


class Labelled(torch.Tensor):
    """Has a label for each of its rows, which indexing cuts with them, unless it is told not to."""

    labels: torch.Tensor
    cuts: ClassVar[bool] = True

    def __getitem__(self, places: Any) -> Any:
        part = super().__getitem__(places)
        if self.cuts:
            part.labels = self.labels[places]
        return part


def test_attributes_of_a_users_tensor_are_cut_by_its_own_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute that slices lack is refused by name, as nobody knows which of it is theirs."""
    rows = numbers(4, 2).as_subclass(Labelled)
    rows.labels = torch.arange(4)
    ours = take(rows, 0, 1, 3)
    assert (type(ours), ours.labels.tolist()) == (Labelled, [1, 2])
    monkeypatch.setattr(Labelled, "cuts", False)
    with pytest.raises(LayoutError, match=r"Slices of a Labelled lack its attribute 'labels'.*define split_batch"):
        take(rows, 0, 1, 3)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
def test_sparse_tensors_stay_sparse(layout: torch.layout, axis: int) -> None:
    """In their layout, along either axis."""
    whole = torch.arange(20.0).reshape(4, 5) * (torch.arange(5) % 2)
    ours = take(whole.to_sparse(layout=layout), axis, 1, 3)
    assert ours.layout == layout
    assert torch.equal(ours.to_dense(), whole.narrow(axis, 1, 2))
