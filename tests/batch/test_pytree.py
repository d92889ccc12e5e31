"""Neighbouring samples are taken out of one value of any type along any axis, as a view where that is possible."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from lightning_ga.batch.pytree import take

EDGES = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape)


@given(SHAPES, st.integers(0, 3), EDGES)
def test_tensors_and_arrays_are_cut_along_any_axis_as_views(shape: list[int], axis: int, edges: list[int]) -> None:
    """The entries are those of indexing along that axis, and no memory is new."""
    axis = min(axis, len(shape))
    whole = numbers(*shape[:axis], 5, *shape[axis:])
    start, stop = edges
    ours = take(whole, axis, start, stop)
    assert torch.equal(ours, whole.index_select(axis, torch.arange(start, stop)))
    assert ours.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    array = take(whole.numpy(), axis, start, stop)
    np.testing.assert_array_equal(array, ours.numpy())
    assert array.base is not None


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


SEQUENCES = [torch.randn(length, 2) for length in (2, 5, 3, 1, 5)]


@pytest.mark.parametrize("edges", [(0, 5), (0, 2), (1, 4), (4, 5)])
@pytest.mark.parametrize("ordered", [True, False])
def test_packed_sequences_are_cut_in_the_users_order(edges: tuple[int, int], ordered: bool) -> None:
    """What is taken is what packing its own sequences gives."""
    sequences = sorted(SEQUENCES, key=len, reverse=True) if ordered else SEQUENCES
    start, stop = edges
    ours = take(pack_sequence(sequences, enforce_sorted=ordered), 0, start, stop)
    expected = pack_sequence(sequences[start:stop], enforce_sorted=ordered)
    assert ours.batch_sizes.tolist() == expected.batch_sizes.tolist()
    assert (ours.sorted_indices is None) == ordered
    for mine, right in zip(unpack_sequence(ours), unpack_sequence(expected), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
def test_sparse_tensors_stay_sparse(layout: torch.layout, axis: int) -> None:
    """In their layout, along either axis."""
    whole = torch.arange(20.0).reshape(4, 5) * (torch.arange(5) % 2)
    ours = take(whole.to_sparse(layout=layout), axis, 1, 3)
    assert ours.layout == layout
    assert torch.equal(ours.to_dense(), whole.narrow(axis, 1, 2))
