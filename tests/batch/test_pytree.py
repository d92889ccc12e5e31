"""Neighbouring samples are taken out of one value of any type along any axis, as a view where that is possible."""

from collections import namedtuple
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_ga.batch import pytree as structures
from lightning_ga.batch.pytree import register_splitter, take

EDGES = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape)


@settings(deadline=None)
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


def test_memory_format_and_gradient_are_kept() -> None:
    """A view of what is channels last is channels last; gradients go back to the whole."""
    images = torch.zeros(5, 3, 4, 4).to(memory_format=torch.channels_last)
    assert take(images, 0, 1, 3).is_contiguous(memory_format=torch.channels_last)
    leaf = torch.zeros(2, 5).requires_grad_()
    take(leaf, 1, 1, 3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.sum(0).tolist() == [0, 2, 2, 0, 0]


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    ("layout", "edges"),
    [*((torch.jagged, edges) for edges in ((0, 5), (1, 3), (4, 5))), (torch.strided, (1, 3)), (torch.strided, (2, 2))],
)
def test_nested_tensors_are_cut_by_sample(layout: torch.layout, edges: tuple[int, int]) -> None:
    """In their layout, samples of no rows too."""
    parts = [numbers(length, 2) for length in (2, 0, 3, 1, 5)]
    start, stop = edges
    ours = take(torch.nested.nested_tensor(parts, layout=layout), 0, start, stop)
    assert ours.layout == layout
    for mine, expected in zip(ours.unbind(), parts[start:stop], strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_jagged_tensors_with_holes_keep_them() -> None:
    """Their lengths are their own."""
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([3, 2, 1])
    whole = torch.nested.narrow(numbers(3, 8), 1, starts, lengths, layout=torch.jagged)
    assert [part.tolist() for part in take(whole, 0, 1, 3).unbind()] == [p.tolist() for p in whole.unbind()[1:3]]


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


def test_no_packed_sequence_is_an_empty_one() -> None:
    """Which cannot be packed by torch."""
    none = take(pack_sequence(SEQUENCES, enforce_sorted=False), 0, 2, 2)
    assert isinstance(none, PackedSequence)
    assert len(none.data) == len(none.batch_sizes) == 0


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
def test_sparse_tensors_stay_sparse(layout: torch.layout, axis: int) -> None:
    """In their layout, along either axis."""
    whole = torch.arange(20.0).reshape(4, 5) * (torch.arange(5) % 2)
    ours = take(whole.to_sparse(layout=layout), axis, 1, 3)
    assert ours.layout == layout
    assert torch.equal(ours.to_dense(), whole.narrow(axis, 1, 2))


class Rows(list[Any]):
    """A list with a name."""


@pytest.mark.parametrize("kind", [list, tuple, Rows])
def test_lists_are_cut_as_lists(kind: Any) -> None:
    """Subclasses stay what they are, and things in them the same."""
    things = [object() for _ in range(5)]
    ours = take(kind(things), 0, 1, 3)
    assert type(ours) is kind
    assert list(ours) == things[1:3]


def test_arrays_of_texts_and_objects_are_cut() -> None:
    """As any other."""
    assert take(np.array(list("abcde")), 0, 1, 3).tolist() == ["b", "c"]
    assert take(np.array([{}, None, 3, "a"], dtype=object), 0, 1, 3).tolist() == [None, 3]


class Frame:
    """As in pandas: ``[]`` looks columns up, ``iloc`` rows."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), 1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)

    @property
    def iloc(self) -> Any:
        outer = self

        class Rows:
            def __getitem__(self, key: Any) -> Frame:
                (rows,) = key
                return Frame(outer.rows[rows])

        return Rows()


def test_data_frames_are_cut_by_row() -> None:
    """By position and not by label."""
    assert take(Frame(list("abcde")), 0, 1, 3).rows == ["b", "c"]


def test_data_frames_of_pandas_are_cut_by_row() -> None:
    """Series too, whatever their index."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": range(5)}, index=list("vwxyz"))
    assert take(frame, 0, 1, 3)["x"].tolist() == [1, 2]
    assert take(frame["x"], 0, 1, 3).tolist() == [1, 2]


Bag = namedtuple("Bag", "items")


def test_a_registered_type_is_cut_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it could be cut otherwise."""
    monkeypatch.setattr(structures, "_SPLITTERS", {})
    register_splitter(Bag, count=lambda bag: len(bag.items), take=lambda bag, a, b: Bag(bag.items[a:b]))
    assert take(Bag([1, 2, 3, 4]), 0, 1, 3) == Bag([2, 3])


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_slices_of_packed_sequences_make_up_the_whole(lengths: list[int], data: st.DataObject) -> None:
    """Wherever it is cut."""
    sequences = [torch.randn(length) for length in lengths]
    packed = pack_sequence(sequences, enforce_sorted=False)
    inner = data.draw(st.lists(st.integers(0, len(lengths)), max_size=3).map(sorted))
    parts = [take(packed, 0, start, stop) for start, stop in pairwise([0, *inner, len(lengths)]) if start < stop]
    assert [s.tolist() for part in parts for s in unpack_sequence(part)] == [s.tolist() for s in sequences]
