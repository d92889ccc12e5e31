"""Lengths that padded batches show, and slices by them, against the samples that the batches were made of."""

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from lightning_ga.batch.layout import Layout, SampleAxis, SampleCount
from lightning_ga.errors import UserError
from lightning_ga.loading.padding import find_padding, shows_lengths, slices_by_size
from lightning_ga.plan.lengths import SizeLimits

LENGTHS = st.lists(st.integers(1, 9), min_size=2, max_size=20)
LAYOUT = Layout(
    {
        "batch": "fields",
        **{f"batch[{name!r}]": SampleAxis(0) for name in ("words", "labels", "number", "mask", "hidden", "lengths")},
        **{f"batch[{name!r}]": SampleAxis(0) for name in ("wide", "added")},
        **{f"batch[{name!r}]": SampleAxis(0) for name in ("kinds", "classes", "features")},
    }
)


def batch_of(lengths: list[int], *, shows: str, left: bool = False, extra: int = 0) -> dict[str, Any]:
    """Word j of sample i is 1 + 10 · i + j."""
    side = "left" if left else "right"
    words = [1 + 10 * number + torch.arange(length) for number, length in enumerate(lengths)]

    def padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
        batch = pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)
        return torch.nn.functional.pad(batch, (extra, 0) if left else (0, extra), value=value)

    mask = padded([torch.ones_like(row) for row in words], 0)
    shown = {
        "mask": mask,
        "hidden": mask == 0,
        "wide": mask[:, None, None],
        "added": torch.where(mask == 0, torch.finfo(torch.float32).min, 0.0)[:, None],
        "lengths": torch.tensor(lengths),
        "labels": padded(words, -100),
    }
    return {"words": padded(words, 0), "number": torch.arange(len(lengths)), shows: shown[shows]}


@given(
    LENGTHS,
    st.integers(1, 60),
    st.sampled_from(["mask", "hidden", "wide", "added", "labels", "lengths"]),
    st.booleans(),
    st.data(),
)
def test_slices_hold_every_sample_once_without_columns_of_padding(lengths, budget, shows, left, data):
    """However a batch shows its lengths; none above the budget but of one sample."""
    is_by_number = shows == "lengths"
    extra = 0 if is_by_number else data.draw(st.integers(0, 3))
    batches = [
        batch_of(each, shows=shows, left=left and not is_by_number, extra=extra) for each in ([1, 4, 2], lengths)
    ]
    paddings = find_padding(batches, LAYOUT, "auto")
    assert [each.path for each in paddings] == [f"batch[{shows!r}]"]
    slices = slices_by_size(batches[1], LAYOUT, paddings)
    assert list(slices.sizes) == sorted(lengths, reverse=True)
    pieces = slices.pieces(SizeLimits(budget, 100))
    assert sum(pieces) == slices.samples == len(lengths)
    numbers = []
    for start, stop in pairwise(accumulate(pieces, initial=0)):
        cut = slices.take(start, stop)
        words, numbers_here = cut["words"], cut["number"].tolist()
        numbers += numbers_here
        if len(pieces) > 1:
            assert len(words) == 1 or words.numel() <= budget
            assert words.shape[1] == max(lengths[number] for number in numbers_here)
        for row, number in zip(words, numbers_here, strict=True):
            assert row[row > 0].tolist() == [1 + 10 * number + place for place in range(lengths[number])]
    assert numbers == list(slices.order)
    assert sorted(numbers) == list(range(len(lengths)))


def test_what_looks_like_a_mask_or_lengths_is_none() -> None:
    """Segments of real words, classes, features as many as there are columns: words differ beyond them."""
    batch = batch_of([3, 5, 2], shows="mask")
    kinds, classes = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]), torch.tensor([1, 5, 3])
    more = {"kinds": kinds, "classes": classes, "features": torch.randn(3, 7)}
    (padding,) = find_padding(
        [{**batch, **more}, {**batch_of([4, 1, 1], shows="mask"), "classes": classes}], LAYOUT, "auto"
    )
    assert padding.path == "batch['mask']"
    assert padding.axes.keys() == {"batch['words']", "batch['mask']"}
    with pytest.raises(UserError, match="size_of='auto' finds no part"):
        find_padding([{name: value for name, value in {**batch, **more}.items() if name != "mask"}], LAYOUT, "auto")


@pytest.mark.parametrize("shows", ["mask", "hidden", "lengths"])
def test_samples_without_an_entry_keep_a_column(shows: str) -> None:
    """A maximum over no column is an error, which the whole batch does not have."""
    paddings = find_padding([batch_of([3, 5, 2], shows=shows)], LAYOUT, "auto")
    slices = slices_by_size(batch_of([4, 0, 0], shows=shows), LAYOUT, paddings)
    assert slices.sizes == (4, 0, 0)
    assert slices.take(1, 3)["words"].tolist() == [[0], [0]]


@pytest.mark.parametrize("words", [1, 3])
def test_words_without_a_target_are_no_padding(words: int) -> None:
    """Later samples have targets for some of their words only, or for none."""
    paddings = find_padding([batch_of([3, 5, 2], shows="labels")], LAYOUT, "auto")
    batch = batch_of([4, 4, 2], shows="labels")
    batch["labels"][1, 4 - words :] = -100
    batch["labels"][2] = -100
    slices = slices_by_size(batch, LAYOUT, paddings)
    assert slices.sizes == (4, 4, 2)
    assert slices.take(1, 3)["words"].tolist() == [[11, 12, 13, 14], [21, 22, 0, 0]]


def test_what_is_no_number_or_larger_than_the_batch_shows_no_lengths() -> None:
    """Texts in an array, times in nanoseconds, numbers beyond 64 bits, masks of pairs and sparse ones are read past."""
    batches = [batch_of([3, 5, 2], shows="mask"), batch_of([4, 1, 1], shows="mask")]
    square, sparse = torch.ones(3, 4, 4), torch.tensor([[0, 1], [1, 1], [1, 0]]).to_sparse()
    others = (np.array(["a", "b", "c"]), torch.full((3,), 10**18), [10**30] * 3, square, sparse, torch.ones(3, 2) * 1j)
    for more in others:
        (padding,) = find_padding([{**batch, "classes": more} for batch in batches], LAYOUT, "auto")
        assert padding.path == "batch['mask']"


def test_samples_lie_where_each_has_its_padding_at_its_ends() -> None:
    words = batch_of([3, 5, 2, 5], shows="mask")
    del words["number"]
    across = Layout(
        {path: SampleAxis(1) if isinstance(role, SampleAxis) else role for path, role in LAYOUT.roles.items()}
    )
    assert shows_lengths([words], "auto", LAYOUT)
    assert not shows_lengths([words], "auto", across)
    assert shows_lengths([{name: value.T for name, value in words.items()}], "auto", across)


def test_a_mask_that_is_none_any_more_is_refused() -> None:
    batch = batch_of([3, 5, 2], shows="mask")
    paddings = find_padding([batch], LAYOUT, "auto")
    with pytest.raises(UserError, match="no longer shows how long they are"):
        slices_by_size({**batch, "mask": 2 * batch["mask"]}, LAYOUT, paddings)


def test_arrays_lists_and_counts_follow_the_order_of_the_sizes() -> None:
    """What belongs to no sample stays; a kind of part that cannot be put in order is refused."""
    own = {"batch['count']": SampleCount(), "batch['names']": SampleAxis(0), "batch['unit']": "constant"}
    layout = Layout({**LAYOUT.roles, **own})
    more = {
        "features": np.array([[1], [2], [3]]),
        "names": ["a", "b", "c"],
        "count": 3,
        "hidden": None,
        "unit": "words",
    }
    batch = {**batch_of([3, 5, 2], shows="mask"), **more}
    paddings = find_padding([batch], layout, "auto")
    cut = slices_by_size(batch, layout, paddings).take(0, 2)
    assert (cut["features"].tolist(), cut["names"], cut["count"], cut["unit"]) == ([[2], [1]], ["b", "a"], 2, "words")
    assert cut["hidden"] is None
    with pytest.raises(ValueError, match="of the type Tensor, which is not sorted here"):
        slices_by_size({**batch, "names": torch.eye(3).to_sparse()}, layout, paddings).take(0, 2)
