from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from lightning_ga.batch.merge import merge_outputs
from lightning_ga.errors import UserError


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_loss_is_that_of_the_whole_batch(sizes: list[int]) -> None:
    losses = torch.rand(sum(sizes), dtype=torch.float64)
    means = [part.mean() for part in losses.split(sizes)]
    whole = merge_outputs([{"loss": mean, "again": mean.item()} for mean in means], sizes)
    torch.testing.assert_close(whole["loss"], losses.mean())
    torch.testing.assert_close(whole["again"], losses.mean().item())
    torch.testing.assert_close(merge_outputs(means, sizes), losses.mean())


def test_a_mean_over_tokens_is_weighted_by_tokens() -> None:
    outputs = [{"loss": torch.tensor(loss), "ids": torch.zeros(2)} for loss in (1.0, 4.0, float("nan"))]
    whole = merge_outputs(outputs, [2, 2, 2], weights=[10, 20, 0])
    assert whole["loss"].item() == 3.0
    assert whole["ids"].shape == (6,)


def test_means_over_nothing_are_those_of_the_last_piece() -> None:
    whole = merge_outputs([{"loss": torch.tensor(x), "acc": x} for x in (0.25, float("nan"))], [1, 1], weights=[0, 0])
    assert whole["loss"].isnan()
    assert np.isnan(whole["acc"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_the_dtype_of_a_loss_is_kept(dtype: torch.dtype) -> None:
    largest = torch.tensor(65504.0).to(dtype)
    whole = merge_outputs([largest, largest], [3, 2])
    assert whole.dtype == dtype
    assert whole == largest


def test_nothing_keeps_its_graph() -> None:
    """Outputs are stored for hooks; the graph has done its work."""
    part = torch.ones(2, requires_grad=True)
    outputs = [
        {"loss": part.sum(), "x": part * 2, "rows": [part[0] * 2, part[1] * 2], "odd": part[0].expand(length)}
        for length in (3, 4)
    ]
    whole = merge_outputs(outputs, [2, 2])
    tensors = [whole["loss"], whole["x"], *whole["rows"], *whole["odd"]]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert not merge_outputs([part.sum()], [2]).requires_grad


def test_a_loss_of_one_element_is_no_sample() -> None:
    whole = merge_outputs([{"loss": torch.tensor([x]), "score": torch.tensor([x])} for x in (1.0, 3.0)], [1, 1])
    assert whole["loss"].tolist() == [2.0]
    assert whole["score"].tolist() == [1.0, 3.0]


MERGED: dict[str, tuple[list[Any], list[int], Any]] = {
    "nothing": ([None, None], [2, 1], None),
    "skipped in a chunk": ([{"x": 1.0}, None, {"x": 4.0}], [2, 5, 1], {"x": 2.0}),
    "a key in some": ([{"x": 1.0}, {"x": 1.0, "y": "a"}], [2, 1], {"x": 1.0, "y": "a"}),
    "no samples": ([{"x": 1.0}, {"x": float("nan")}], [2, 0], {"x": 1.0}),
    "equal text": ([{"x": "a"}, {"x": "a"}], [2, 1], {"x": "a"}),
    "other text": ([{"x": "a"}, {"x": "b"}], [2, 1], {"x": ["a", "b"]}),
    "equal whole numbers": ([{"x": 7}, {"x": 7}], [2, 1], {"x": 7}),
    "other whole numbers": ([{"x": 7}, {"x": 10}], [2, 1], {"x": 8.0}),
    "the number of samples": ([{"n": 2}, {"n": 1}], [2, 1], {"n": 3}),
    "ones of one sample": ([{"n": 1}, {"n": 1}], [1, 1], {"n": 1}),
    "equal truths": ([{"x": True}, {"x": True}], [2, 1], {"x": True}),
    "other truths": ([{"x": True}, {"x": False}], [2, 1], {"x": [True, False]}),
    "kinds": ([{"x": 1.0}, {"x": "a"}], [2, 1], {"x": [1.0, "a"]}),
    "lists by sample": ([{"x": ["a", "b"]}, {"x": ["c"]}], [2, 1], {"x": ["a", "b", "c"]}),
    "tuples by sample": ([{"x": (1, 2)}, {"x": (3, 4)}], [2, 2], {"x": (1, 2, 3, 4)}),
    "lists of findings": ([{"x": [1, 2, 3]}, {"x": []}], [2, 1], {"x": [1, 2, 3]}),
    "lists of fields": ([{"x": [1.0, "a", 2.0]}, {"x": [4.0, "a", 5.0]}], [2, 1], {"x": [2.0, "a", 3.0]}),
    "detections": (
        [{"x": [{"box": 1}, {"box": 2}]}, {"x": [{"box": 3}]}],
        [2, 1],
        {"x": [{"box": 1}, {"box": 2}, {"box": 3}]},
    ),
    "one whole number in tensors": ([{"x": torch.tensor(7)}, {"x": torch.tensor(7)}], [2, 1], {"x": torch.tensor(7)}),
    "as many things as samples": ([{"x": (1.0, "a")}] * 2, [2, 2], {"x": (1.0, "a", 1.0, "a")}),
}


@pytest.mark.parametrize("name", MERGED)
def test_outputs_become_one(name: str) -> None:
    """What is by sample is joined, what is a mean is averaged, what is equal stays, the rest is listed."""
    outputs, sizes, expected = MERGED[name]
    assert merge_outputs(outputs, sizes) == expected


def test_tensors_that_are_not_by_sample() -> None:
    """Equal ones stay, means of classes are averaged, counts too; what may be several per sample is listed."""
    classes = torch.tensor([1.0, 2.0, 3.0])
    outputs = [
        {
            "classes": classes * k,
            "count": torch.tensor(k),
            "same": torch.arange(4),
            "views": torch.ones(4, 5) * k,
            "samples second": torch.ones(3, 2) * k,
            "mask": torch.tensor(k > 1),
            "steps": torch.zeros(k, 3),
        }
        for k in (1, 2)
    ]
    whole = merge_outputs(outputs, [2, 2])
    assert whole["classes"].tolist() == [1.5, 3.0, 4.5]
    assert whole["count"].item() == 1.5
    assert whole["same"].tolist() == [0, 1, 2, 3]
    assert [part.shape for part in whole["views"]] == [(4, 5), (4, 5)]
    assert [part.shape for part in whole["samples second"]] == [(3, 2), (3, 2)]
    assert [part.item() for part in whole["mask"]] == [False, True]
    assert [len(part) for part in whole["steps"]] == [1, 2]
    differing = merge_outputs([{"x": classes}, {"x": classes * 4}], [2, 1])
    assert differing["x"].tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_predictions_are_no_means(kind: Any) -> None:
    """The boxes of all pictures of a part, which may be as many in both; a value alone still is one."""
    outputs = [{"boxes": kind(np.full((5, 4), k)), "score": kind(np.array(k))} for k in (1.0, 2.0)]
    whole = merge_outputs(outputs, [3, 2], averages=False)
    assert [float(part.mean()) for part in whole["boxes"]] == [1.0, 2.0]
    assert float(whole["score"]) == pytest.approx(1.4)


def test_arrays_are_merged_like_tensors() -> None:
    """Those of text too."""
    outputs = [{"x": np.full((n, 2), n), "text": np.array(["a"] * n), "mean": np.full(3, float(n))} for n in (2, 1)]
    whole = merge_outputs(outputs, [2, 1])
    assert whole["x"].tolist() == [[2, 2], [2, 2], [1, 1]]
    assert whole["text"].tolist() == ["a", "a", "a"]
    np.testing.assert_allclose(whole["mean"], 5 / 3)
    listed = merge_outputs([{"x": np.array(["a", "b"])}, {"x": np.array(["c"])}], [3, 3])["x"]
    assert [part.tolist() for part in listed] == [["a", "b"], ["c"]]


def test_packed_sequences_are_packed_anew() -> None:
    sequences = [torch.arange(float(length)) for length in (2, 5, 3)]
    parts = [{"x": pack_sequence(part, enforce_sorted=False)} for part in (sequences[:2], sequences[2:])]
    for mine, expected in zip(unpack_sequence(merge_outputs(parts, [2, 1])["x"]), sequences, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(
    ("outputs", "sizes", "weights"), [([], [], None), ([1.0], [1, 2], None), ([1.0, 2.0], [1, 2], [1.0])]
)
def test_each_output_needs_a_size_and_a_weight(outputs: list[Any], sizes: list[int], weights: Any) -> None:
    with pytest.raises(UserError, match=rf"^{len(outputs)} outputs, {len(sizes)} sizes and"):
        merge_outputs(outputs, sizes, weights)


def test_fields_of_two_samples_are_told_from_samples() -> None:
    """Hidden states of two layers for two samples: each layer is joined."""
    hidden = [(torch.zeros(2, 5), torch.ones(2, 5))] * 2
    whole = merge_outputs([{"hidden": states} for states in hidden], [2, 2])["hidden"]
    assert [state.shape for state in whole] == [(4, 5), (4, 5)]
    assert whole[1].all()


class Odd:
    """Something whose comparison is no answer."""

    def __eq__(self, other: object) -> Any:
        return torch.zeros(2)

    __hash__ = None  # type: ignore[assignment]


def test_unknown_objects_are_kept() -> None:
    """One if it is the same in all chunks, otherwise all."""
    odd, other = Odd(), Odd()
    assert merge_outputs([{"x": odd}, {"x": odd}], [1, 1])["x"] is odd
    listed = merge_outputs([{"x": odd}, {"x": other}], [1, 1])["x"]
    assert listed[0] is odd
    assert listed[1] is other
