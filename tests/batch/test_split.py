"""A batch of any structure is cut into slices of its samples, which together are the batch."""

import copy
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from known_batches import BatchEncoding, same
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from lightning_ga.batch.layout import Layout, Role, SampleAxis, slices_by_hook, split_batch
from lightning_ga.batch.merge import merge_outputs
from lightning_ga.batch.pytree import extents, is_constant, is_plain_sequence, open_container
from lightning_ga.errors import UserError

Pair = namedtuple("Pair", "inputs labels")


def rows(length: int = 5) -> torch.Tensor:
    return torch.arange(length * 2.0).reshape(length, 2)


def layout_of(batch: Any, samples: int = 5) -> Layout:
    """The layout of a batch of these tests, in which only what is by sample has so many entries."""
    roles: dict[str, Role] = {}

    def read(path: str, node: Any) -> None:
        shape, children = extents(node), open_container(node)
        inner = [extents(child) for _, child in children or ()] if is_plain_sequence(node) else []
        if shape is not None and shape[0] == samples and not (inner and all(i and i[0] == samples for i in inner)):
            roles[path] = SampleAxis(0)
        elif is_constant(node):
            roles[path] = "constant"
        elif (shape is None or is_plain_sequence(node)) and children is not None:
            roles[path] = "fields"
            for name, child in children:
                read(path + name, child)
        else:
            roles[path] = "shared"

    read("batch", batch)
    return Layout(roles)


def split(batch: Any, sizes: Sequence[int]) -> Iterator[Any]:
    return split_batch(batch, sizes, layout=layout_of(batch))


SEQUENCES = [torch.randn(length, 2) for length in (2, 5, 3, 1, 5)]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda batch, sizes: [*split(batch, sizes)][:1], r"split_batch returned 1 chunks for sizes=\[2, 3\]"),
        (lambda batch, sizes: [*split(batch, sizes), batch], r"split_batch returned 3 chunks for sizes=\[2, 3\]"),
        (lambda batch, sizes: [*split(batch, [1] * 5)][:2], r"not hold 2 samples for sizes=\[2, 3\] \(chunk 1\)"),
        (lambda batch, sizes: None, "split_batch returned None"),
        (5, r"hook=5 must be a method, split_batch\(self, batch, sizes\)"),
    ],
)
def test_a_hook_must_return_a_chunk_of_each_size(hook: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        slices_by_hook(hook, rows(), 5, layout_of(rows())).take(0, 2)


def test_a_hook_cuts_what_cannot_be_read() -> None:
    whole: Callable[[Any, Sequence[int]], Any] = lambda batch, sizes: ["a", "b", "c"][: len(sizes)]  # noqa: E731
    for layout in (None, layout_of(rows())):
        slices = slices_by_hook(whole, rows(), 5, layout)
        assert [slices.take(*edges) for edges in ((0, 2), (2, 5), (2, 4), (0, 5))] == ["a", "b", "b", "a"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([2, 2], r"sizes=\[2, 2\] add up to 4, and the batch holds 5 samples"),
        ([6], r"add up to 6"),
        ([], r"add up to 0"),
        ([6, -1], r"sizes=\[6, -1\] must not be negative"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_at_once(sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split({"x": rows()}, sizes)


def test_a_batch_of_no_samples_is_cut_into_empty_ones() -> None:
    batch = {"x": rows(0), "names": list[str]()}
    layout = Layout({"batch": "fields", "batch['x']": SampleAxis(0), "batch['names']": SampleAxis(0)})
    assert [len(chunk["x"]) for chunk in split_batch(batch, [0, 0], layout=layout)] == [0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_a_device_stay_there() -> None:
    """Merged again they are the batch; pinned memory stays pinned."""
    packed = pack_sequence(SEQUENCES, enforce_sorted=False).to("cuda")
    batch = {"x": rows().cuda(), "packed": packed, "pinned": rows().pin_memory()}
    chunks = list(split(batch, [2, 3]))
    assert all(chunk["x"].is_cuda and chunk["packed"].is_cuda and chunk["pinned"].is_pinned() for chunk in chunks)
    merged = merge_outputs(chunks, [2, 3])
    assert torch.equal(merged["x"], batch["x"])
    assert all(torch.equal(one, two.cuda()) for one, two in zip(unpack_sequence(merged["packed"]), SEQUENCES))


COUNT = 9


def leaves() -> st.SearchStrategy[Any]:
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16])
    by_sample = st.builds(
        lambda dtype, shape: (torch.rand(COUNT, *shape) * 50).to(dtype), dtypes, st.lists(st.integers(0, 3), max_size=2)
    )
    lists = st.sampled_from(
        [
            list("abcdefghi"),
            tuple("abcdefghi"),
            [torch.rand(20 + length) for length in range(COUNT)],
            [{"boxes": torch.rand(length, 4)} for length in range(COUNT)],
            list(range(100, 100 + COUNT)),
        ]
    )
    shared = st.sampled_from([None, "text", 3.5, 1234, True, torch.tensor(2.5), torch.zeros(20, 2), (224, 224, 3), []])
    arrays = st.builds(lambda: np.random.default_rng(0).random((COUNT, 2)))
    return by_sample | lists | shared | arrays


@dataclass
class Record:
    one: Any
    two: Any


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(children, min_size=1, max_size=4)
    named = st.dictionaries(st.sampled_from("abcd"), children, max_size=4)
    return st.one_of(
        few,
        few.map(tuple),
        named,
        named.map(lambda data: OrderedDict(sorted(data.items(), reverse=True))),
        named.map(lambda data: BatchEncoding(data, list("abcdefghi"), 1)),
        named.map(lambda data: SimpleNamespace(**data)),
        named.map(lambda data: defaultdict(list, data)),
        st.builds(Pair, children, children),
        st.builds(Record, children, children),
    )


# The first chunk is longer than any list of fields, and than what is left in the others.
SIZES = st.lists(st.integers(0, 4), max_size=4).map(lambda cuts: [b - a for a, b in pairwise([0, *sorted(cuts), 4])])


@given(st.recursive(leaves(), containers, max_leaves=8), SIZES)
def test_merging_what_was_split_gives_the_batch_again(batch: Any, rest: list[int]) -> None:
    """Whatever its structure, and without touching it; tensors of chunks are views of those of the batch."""
    batch = {"x": torch.arange(COUNT), "batch": batch}
    before, sizes, layout = copy.deepcopy(batch), [5, *rest], layout_of(batch, COUNT)
    assert layout.samples(batch) == COUNT
    chunks = list(split_batch(batch, sizes, layout=layout))
    owned = {tensor.untyped_storage().data_ptr() for tensor in tensors(batch)}
    for chunk, size in zip(chunks, sizes, strict=True):
        assert layout.samples(chunk) == size
        assert {tensor.untyped_storage().data_ptr() for tensor in tensors(chunk)} <= owned
    assert same(merge_outputs(chunks, sizes), before)
    assert same(batch, before)


def tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    for _, child in open_container(node) or ():
        yield from tensors(child)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_cut_by_sample(layout: torch.layout) -> None:
    """And merged again."""
    whole = torch.nested.nested_tensor(SEQUENCES, layout=layout)
    assert layout_of({"x": whole}).samples({"x": whole}) == 5
    chunks = list(split({"x": whole}, [2, 3]))
    assert [chunk["x"].size(0) for chunk in chunks] == [2, 3]
    assert {chunk["x"].layout for chunk in chunks} == {layout}
    parts = [part for chunk in chunks for part in chunk["x"].unbind()]
    merged = merge_outputs(chunks, [2, 3])["x"]
    assert merged.layout == layout
    for mine, again, expected in zip(parts, merged.unbind(), SEQUENCES, strict=True):
        assert torch.equal(mine, expected)
        assert torch.equal(again, expected)


def test_what_belongs_to_no_sample_is_in_each_chunk() -> None:
    """The same object; ``None`` in the place of a part, too."""
    layout = layout_of({"x": rows(), "mask": rows(), "weights": torch.zeros(10), "size": (224, 224)})
    batch = MappingProxyType({"x": rows(), "mask": None, "weights": torch.zeros(10), "size": (224, 224)})
    for chunk in split_batch(batch, [2, 3], layout=layout):
        assert type(chunk) is MappingProxyType
        assert chunk["weights"] is batch["weights"]
        assert (chunk["mask"], chunk["size"]) == (None, (224, 224))
