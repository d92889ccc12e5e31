"""A batch is cut into chunks of the sizes that are asked for, by its layout or by the user's hook."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from lightning_ga.batch.layout import HookLayout, Layout, SampleAxis
from lightning_ga.errors import UserError

ROWS = torch.arange(10.0).reshape(5, 2)
LAYOUT = Layout({"batch": "fields", **{f"batch['{name}']": SampleAxis(0) for name in ("x", "packed", "pinned", "mask")},
                 "batch['weights']": "shared", "batch['size']": "shared"})  # fmt: skip


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda batch, sizes: [batch], r"split_batch returned 1 chunks for sizes=\[2, 3\]"),
        (lambda batch, sizes: [batch] * 3, r"split_batch returned 3 chunks for sizes=\[2, 3\]"),
        (lambda batch, sizes: None, "split_batch returned None"),
        (5, r"hook=5 must be a method, split_batch\(self, batch, sizes\)"),
    ],
)
def test_a_hook_must_return_a_chunk_of_each_size(hook: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        HookLayout(hook).cut(ROWS, 0, 2)


def test_a_hook_cuts_what_cannot_be_read() -> None:
    whole: Callable[[Any, Sequence[int]], Any] = lambda batch, sizes: ["a", "b", "c"][: len(sizes)]  # noqa: E731
    assert [HookLayout(whole).cut(ROWS, *edges) for edges in ((0, 2), (2, 5), (2, 4), (0, 5))] == list("abba")


def test_what_belongs_to_no_sample_is_in_each_chunk() -> None:
    """The same object; ``None`` in the place of a part, too."""
    batch = MappingProxyType({"x": ROWS, "mask": None, "weights": torch.zeros(10), "size": (224, 224)})
    for edges in ((0, 2), (2, 5)):
        chunk = LAYOUT.cut(batch, *edges)
        assert type(chunk) is MappingProxyType
        assert chunk["weights"] is batch["weights"]
        assert (chunk["mask"], chunk["size"]) == (None, (224, 224))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_a_device_stay_there() -> None:
    """Joined again they are the batch; pinned memory stays pinned."""
    sequences = [torch.randn(length, 2) for length in (2, 5, 3, 1, 5)]
    packed = pack_sequence(sequences, enforce_sorted=False).to("cuda")
    batch = {"x": ROWS.cuda(), "packed": packed, "pinned": ROWS.pin_memory()}
    chunks = [LAYOUT.cut(batch, 0, 2), LAYOUT.cut(batch, 2, 5)]
    assert all(chunk["x"].is_cuda and chunk["packed"].is_cuda and chunk["pinned"].is_pinned() for chunk in chunks)
    assert torch.equal(torch.cat([chunk["x"] for chunk in chunks]), batch["x"])
    found = [sequence for chunk in chunks for sequence in unpack_sequence(chunk["packed"])]
    assert all(torch.equal(one, two.cuda()) for one, two in zip(found, sequences, strict=True))
